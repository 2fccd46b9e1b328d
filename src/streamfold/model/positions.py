"""Positions in a stream."""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

#: A record's index in its stream: from 0, without gaps, never reused.
SeqNum = NewType("SeqNum", int)

#: Milliseconds since the Unix epoch by convention. Any unsigned 64-bit number is legal.
Timestamp = NewType("Timestamp", int)

#: Maximum seq_num and timestamp: both are unsigned 64-bit numbers on the wire and on disk.
U64_MAX = 2**64 - 1


class StreamPosition(msgspec.Struct, frozen=True, gc=False):
    """A sequence number and its timestamp."""

    seq_num: SeqNum
    timestamp: Timestamp


class StartKind(enum.StrEnum):
    """How the start of a read is specified. Values are S2's query parameter names."""

    SEQ_NUM = "seq_num"
    TIMESTAMP = "timestamp"
    TAIL_OFFSET = "tail_offset"


#: Tail of a stream that never had a record.
STREAM_START = StreamPosition(SeqNum(0), Timestamp(0))
