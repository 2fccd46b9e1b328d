"""Batches of records that keep every rule and wait for their slot in a stream.

The smallest append is one record with a body and without headers. Writers that wait for each
acknowledgement send these, and their cost is all fixed cost: no objects are made of the record, and
no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from streamfold.model.configs import TimestampMode
from streamfold.model.records import RECORD_OVERHEAD, Record, is_command, metered_size
from streamfold.records.payload import decode
from streamfold.records.plain import (
    APPEND_BODY,
    APPEND_TIMESTAMP,
    RECORDS,
    PlainRecords,
    encode_body,
    encode_position,
)
from streamfold.records.protobuf import read_varint, varint
from streamfold.records.rules import (
    Command,
    Fence,
    Sequenced,
    Slot,
    Trim,
    check_count,
    check_metered,
    check_timestamp,
    check_types,
    command_of,
    missing_timestamp,
)

__all__ = ["Fence", "RecordBatch", "Sequenced", "SingleRecord", "Trim", "scan_single", "validate"]


class SingleRecord(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One record that waits for its slot."""

    count: ClassVar[int] = 1

    _timestamp: int | None
    _rest: bytes
    metered: int
    #: Offset after the record in the message that it came in.
    end: int

    def nameless(self) -> list[tuple[int, int, int]]:
        """Extents of records with a nameless header; none, because this one has no headers."""
        return []

    def sequence(self, slot: Slot) -> Sequenced:
        now, stamp = slot.now, self._timestamp
        if (
            stamp is None
            or slot.mode is TimestampMode.ARRIVAL
            or (stamp > now and not slot.uncapped)
        ):
            if stamp is None and slot.mode is TimestampMode.CLIENT_REQUIRE:
                raise missing_timestamp(0)
            stamp = now
        if stamp < slot.floor:
            stamp = slot.floor
        position = encode_position(slot.first, stamp)
        rest = self._rest
        payload = b"\x0a%b%b%b" % (varint(len(position) + len(rest)), position, rest)
        return Sequenced(payload, stamp, stamp)


def scan_single(raw: bytes) -> SingleRecord | None:
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


class Unsequenced(Protocol):
    """Records in a form that is quick to sequence."""

    def sequence(self, slot: Slot) -> Sequenced: ...


class RecordBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """1 to 1000 records, at most 1 MiB metered, every command among them well-formed."""

    count: int
    #: Bytes, as limits and accounting count them.
    metered: int
    #: In the order in which they take effect.
    commands: tuple[Command, ...]
    _records: Unsequenced

    @classmethod
    def of(cls, records: Sequence[Record]) -> RecordBatch:
        """Make a batch of records that were built in Python; errors name the one that breaks a rule."""
        check_count(len(records))
        for index, record in enumerate(records):
            check_types(index, record)
        if len(records) == 1 and not records[0].headers:
            return cls.of_one(records[0].body, records[0].timestamp)
        return validate(records)

    @classmethod
    def of_one(cls, body: bytes, timestamp: int | None = None) -> RecordBatch:
        """The same for one record without headers, in few steps: most appends are such a record."""
        if timestamp is not None:
            check_timestamp(0, timestamp)
        metered = RECORD_OVERHEAD + len(body)
        check_metered(metered)
        return cls(1, metered, (), SingleRecord(timestamp, encode_body(body), metered, 0))

    @property
    def only_trims(self) -> bool:
        """Whether it only removes records."""
        if len(self.commands) != self.count:
            return False
        return all(isinstance(command, Trim) for command in self.commands)

    def sequence(self, slot: Slot) -> Sequenced:
        """Give the records the sequence numbers and timestamps of `slot`.

        Changes nothing, so that it may be called again with another slot.
        """
        return self._records.sequence(slot)

    def bodies(self) -> list[bytes]:
        """The body of every record that is not a command."""
        sequenced = self.sequence(Slot(0, TimestampMode.ARRIVAL, uncapped=True, now=0, floor=0))
        return [record.body for record in decode(sequenced.payload) if not is_command(record)]


def validate(records: Sequence[Record]) -> RecordBatch:
    """A batch of records whose members have the right types."""
    check_count(len(records))
    commands = tuple(
        command
        for index, record in enumerate(records)
        if record.headers and (command := command_of(index, record))
    )
    metered = sum(map(metered_size, records))
    check_metered(metered)
    return RecordBatch(len(records), metered, commands, PlainRecords.of(records))
