"""The way of the smallest append: one record, with a body and without headers.

Writers that wait for each acknowledgement send these, and their cost is all fixed cost: no objects
are made of the record, and no arrays.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from streamfold.model.configs import TimestampMode
from streamfold.model.records import RECORD_OVERHEAD
from streamfold.records.plain import APPEND_BODY, APPEND_TIMESTAMP, RECORDS, encode_position
from streamfold.records.protobuf import read_varint, varint
from streamfold.records.sequencing import Sequenced, Slot, missing_timestamp


class SingleRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One record that waits for its place."""

    count: ClassVar[int] = 1

    _timestamp: int | None
    _rest: bytes
    metered: int
    #: Offset after the record in the message that it came in.
    end: int

    def nameless(self) -> list[tuple[int, int, int]]:
        """Records that have a header with an empty name: this one has no headers."""
        return []

    def sequence(self, slot: Slot) -> Sequenced:
        first, mode, uncapped, now, floor = slot
        stamp = self._timestamp
        if stamp is None or mode is TimestampMode.ARRIVAL or (stamp > now and not uncapped):
            if stamp is None and mode is TimestampMode.CLIENT_REQUIRE:
                raise missing_timestamp(0)
            stamp = now
        if stamp < floor:
            stamp = floor
        position = encode_position(first, stamp)
        rest = self._rest
        payload = b"\x0a%b%b%b" % (varint(len(position) + len(rest)), position, rest)
        return Sequenced(payload, stamp, stamp)


def scan(raw: bytes) -> SingleRecord | None:
    """The only record of an AppendInput; None when there are others, or it is not so simple."""
    size = len(raw)
    if size < 2 or raw[0] != RECORDS:
        return None
    length, at = read_varint(raw, 1, size)
    end = at + length
    if not length or end > size or (end < size and raw[end] == RECORDS):
        return None
    timestamp = None
    if raw[at] == APPEND_TIMESTAMP:
        timestamp, at = read_varint(raw, at + 1, end)
    if at >= end or raw[at] != APPEND_BODY:
        return None
    body, start = read_varint(raw, at + 1, end)
    if start + body != end or not body:
        return None
    if start - at <= 3 and (body >= 0x80) == (start - at == 3):
        rest = b"\x22" + raw[at + 1 : end]
    else:
        rest = b"\x22" + varint(body) + raw[start:end]  # its length was longer than needed
    return SingleRecord(timestamp, rest, RECORD_OVERHEAD + body, end)
