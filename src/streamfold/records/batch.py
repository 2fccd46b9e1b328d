"""Batches of records that keep every rule and wait for their slot in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from streamfold.model.configs import TimestampMode
from streamfold.model.records import RECORD_OVERHEAD, Record, is_command, metered_size
from streamfold.records.payload import decode
from streamfold.records.plain import PlainRecords, encode_rest
from streamfold.records.rules import (
    Command,
    Fence,
    Trim,
    check_count,
    check_metered,
    check_types,
    command_of,
)
from streamfold.records.sequencing import Sequenced, Slot
from streamfold.records.single import SingleRecord

__all__ = ["Fence", "RecordBatch", "Sequenced", "Trim", "validate"]


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
            return _single(records[0])
        return validate(records)

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


def _single(record: Record) -> RecordBatch:
    """A batch of one record in few steps: writers that wait for each ack send these."""
    metered = RECORD_OVERHEAD + len(record.body)
    check_metered(metered)
    rest = encode_rest(record)
    return RecordBatch(1, metered, (), SingleRecord(record.timestamp, rest, metered, 0))
