"""Naive reference models of records, checked against the official protobuf classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from s2_sdk._generated.s2.v1 import s2_pb2 as pb

from streamfold.errors import InvalidError
from streamfold.model.configs import TimestampMode
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, Record, SequencedRecord
from streamfold.records import (
    AppendInput,
    RecordBatch,
    Sequenced,
    parse_append_input,
)
from streamfold.records.rules import Slot
from tests.records import reference


class Clock(NamedTuple):
    """How a batch gets its timestamps."""

    mode: TimestampMode = TimestampMode.CLIENT_PREFER
    uncapped: bool = False
    now: int = 1_800_000_000_000
    floor: int = 0


#: A clock for tests that do not care.
NOON = Clock()


def sequence(batch: RecordBatch, first: int, clock: Clock) -> Sequenced:
    return batch.sequence(Slot(first, clock.mode, clock.uncapped, clock.now, clock.floor))


def assign_slots(records: Sequence[Record], first: int, clock: Clock) -> list[SequencedRecord]:
    """The records with their slots, by the specification."""
    previous = clock.floor
    out = []
    for index, record in enumerate(records):
        value = record.timestamp
        if value is None or clock.mode == "arrival":
            value = Timestamp(clock.now)
        if not clock.uncapped:
            value = min(value, Timestamp(clock.now))
        previous = max(previous, value)
        out.append(
            SequencedRecord(SeqNum(first + index), Timestamp(previous), record.headers, record.body)
        )
    return out


def serialize_input(
    records: Sequence[Record], match: int | None = None, token: str | None = None
) -> bytes:
    """An AppendInput, as clients send it."""
    message = pb.AppendInput(match_seq_num=match, fencing_token=token)
    for record in records:
        headers = [pb.Header(name=name, value=value) for name, value in record.headers]
        message.records.add(timestamp=record.timestamp, headers=headers, body=record.body)
    return bytes(message.SerializeToString())


def serialize_batch(records: Sequence[SequencedRecord]) -> bytes:
    """A ReadBatch, as clients expect it."""
    message = pb.ReadBatch()
    for record in records:
        headers = [pb.Header(name=name, value=value) for name, value in record.headers]
        message.records.add(
            seq_num=record.seq_num, timestamp=record.timestamp, headers=headers, body=record.body
        )
    return bytes(message.SerializeToString())


def records_of(message: Any) -> list[Record]:
    """The records of a decoded pb.AppendInput."""
    return [
        Record(
            record.body,
            tuple(Header(header.name, header.value) for header in record.headers),
            Timestamp(record.timestamp) if record.HasField("timestamp") else None,
        )
        for record in message.records
    ]


def protobuf_accepts(raw: bytes) -> bool:
    try:
        pb.AppendInput.FromString(raw)
    except Exception as error:
        if type(error).__name__ == "DecodeError":
            return False
        raise
    return True


def parses(raw: bytes) -> dict[str, AppendInput | tuple[type[InvalidError], str]]:
    """What native code and the reference make of `raw`."""
    return {
        "native": outcome(parse_append_input, raw),
        "reference": outcome(reference.parse_append_input, raw),
    }


def outcome(
    parse: Callable[[bytes], AppendInput], raw: bytes
) -> AppendInput | tuple[type[InvalidError], str]:
    try:
        return parse(raw)
    except InvalidError as error:
        # The offset at which bytes stop making sense may differ; that they do not may not.
        return type(error), error.message if type(error) is InvalidError else ""
