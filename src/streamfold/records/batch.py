"""Validated record batches that wait for their slot in a stream, and append requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from streamfold._native import Batch, CodecError, contents, parse_append
from streamfold.errors import MalformedError, StreamfoldError
from streamfold.model.configs import TimestampMode
from streamfold.model.names import parse_token
from streamfold.model.records import BATCH_RECORDS_MAX, Record
from streamfold.records.payload import malformed
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
    too_many_records,
)

# Looked up once: in Python 3.11 each lookup of a member takes as long as a call.
_CLIENT_REQUIRE: Final = TimestampMode.CLIENT_REQUIRE
_ARRIVAL: Final = TimestampMode.ARRIVAL

__all__ = ["Fence", "RecordBatch", "Sequenced", "Trim"]


class RecordBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """1 to 1000 valid records of at most 1 MiB metered, including well-formed commands."""

    count: int
    #: Metered bytes.
    metered: int
    #: In order of effect.
    commands: tuple[Command, ...]
    _records: Batch

    @classmethod
    def of(cls, records: Sequence[Record]) -> RecordBatch:
        """Make a batch from Python records. Errors name the invalid record."""
        check_count(len(records))
        for index, record in enumerate(records):
            check_types(index, record)
        return cls.checked(Batch.of(list(records)))

    @classmethod
    def of_one(cls, body: bytes, timestamp: int | None = None) -> RecordBatch:
        """Make a batch of one record without headers. Fast, because most appends are such a record."""
        if timestamp is not None:
            check_timestamp(0, timestamp)
        batch = Batch.of_one(body, timestamp)
        check_metered(batch.metered)
        return cls(1, batch.metered, (), batch)

    @classmethod
    def checked(cls, batch: Batch) -> RecordBatch:
        """Make a batch from records with valid types. Raises InvalidError if they break a rule."""
        count, metered = len(batch), batch.metered
        check_count(count)
        check_metered(metered)
        nameless = batch.nameless()
        commands = tuple([command_of(*record) for record in nameless]) if nameless else ()
        return cls(count, metered, commands, batch)

    @property
    def only_trims(self) -> bool:
        """Whether the batch only removes records."""
        if len(self.commands) != self.count:
            return False
        return all(isinstance(command, Trim) for command in self.commands)

    def sequence(self, slot: Slot) -> Sequenced:
        """Return the records with the sequence numbers and timestamps of `slot`.

        Does not modify the batch, so it may be called again with another slot.
        """
        mode, batch = slot.mode, self._records
        if mode is _CLIENT_REQUIRE and (missing := batch.unstamped) is not None:
            raise missing_timestamp(missing)
        arrival = mode is _ARRIVAL
        return Sequenced(*batch.sequence(slot.first, slot.now, slot.floor, arrival, slot.uncapped))

    def bodies(self) -> list[bytes]:
        """Return the bodies of all records that are not commands."""
        sequenced = self.sequence(Slot(0, TimestampMode.ARRIVAL, uncapped=True, now=0, floor=0))
        return contents(sequenced.payload)[1]


class AppendInput(msgspec.Struct, frozen=True, gc=False):
    """A batch and the conditions for appending it. None means no condition."""

    batch: RecordBatch
    match_seq_num: int | None
    fencing_token: str | None


def parse_append_input(raw: bytes) -> AppendInput:
    """Decode and validate a protobuf `s2.v1.AppendInput` in any legal encoding."""
    try:
        parsed: Batch = parse_append(raw, BATCH_RECORDS_MAX)
    except CodecError as error:
        raise _refusal(raw, error) from None
    token = parsed.fencing_token
    if token is not None:
        token = parse_token(token, "fencing token")
    return AppendInput(RecordBatch.checked(parsed), parsed.match_seq_num, token)


def _refusal(raw: bytes, error: CodecError) -> StreamfoldError:
    code, start, end, _ = error.args
    if code == "records":
        return too_many_records()
    if code == "token":
        return MalformedError(f"fencing token {raw[start:end][:64]!r} is not UTF-8")
    return malformed(error)
