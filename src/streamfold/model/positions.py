"""Positions in a stream."""

from __future__ import annotations

from typing import NewType

import msgspec

#: Index of a record in its stream: 0 for the first, dense, never reused.
SeqNum = NewType("SeqNum", int)

#: Milliseconds since the Unix epoch by convention; any 64-bit unsigned number is legal.
Timestamp = NewType("Timestamp", int)

#: Largest value of a seq_num or timestamp: both are 64-bit unsigned on the wire and on disk.
U64_MAX = 2**64 - 1


class StreamPosition(msgspec.Struct, frozen=True, gc=False):
    """A sequence number and the timestamp that goes with it."""

    seq_num: SeqNum
    timestamp: Timestamp


#: Tail of a stream to which nothing was ever appended.
STREAM_START = StreamPosition(SeqNum(0), Timestamp(0))
