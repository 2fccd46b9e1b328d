"""Batches: valid contents, and the slots of their records."""

from __future__ import annotations

from typing import Any

import pytest

from streamfold.errors import InvalidError
from streamfold.model.configs import TimestampMode
from streamfold.model.positions import U64_MAX, Timestamp
from streamfold.model.records import Header, Record, fence_record, trim_record
from streamfold.records import Fence, RecordBatch, Trim, decode, parse_append_input

from .models import Clock, sequence, serialize_input

ARRIVAL, PREFER, REQUIRE = (
    TimestampMode.ARRIVAL,
    TimestampMode.CLIENT_PREFER,
    TimestampMode.CLIENT_REQUIRE,
)


def stamped(*stamps: int | None) -> list[Record]:
    return [Record(b"x", (), None if s is None else Timestamp(s)) for s in stamps]


def stamps_of(records: list[Record], clock: Clock) -> list[int]:
    """Timestamps after sequencing, the same however the batch was made."""
    batches = RecordBatch.of(records), parse_append_input(serialize_input(records)).batch
    found = [[r.timestamp for r in decode(sequence(b, 9, clock).payload)] for b in batches]
    assert found[0] == found[1]
    return [int(stamp) for stamp in found[0]]


def test_records_get_consecutive_sequence_numbers() -> None:
    payload = sequence(RecordBatch.of([Record(b"a")] * 3), 126, Clock()).payload
    assert [record.seq_num for record in decode(payload)] == [126, 127, 128]


def test_clients_timestamps_are_preferred_and_arrival_fills_in() -> None:
    assert stamps_of(stamped(5, None, 12), Clock(PREFER, True, now=10)) == [5, 10, 12]


def test_arrival_mode_ignores_what_clients_say() -> None:
    assert stamps_of(stamped(5, None, 12), Clock(ARRIVAL, True, now=10)) == [10, 10, 10]


def test_timestamps_from_the_future_are_capped_unless_uncapped() -> None:
    assert stamps_of(stamped(11, 12), Clock(PREFER, False, now=10)) == [10, 10]
    assert stamps_of(stamped(11, 12), Clock(REQUIRE, True, now=10)) == [11, 12]


def test_timestamps_never_decrease_even_below_an_uncapped_past() -> None:
    assert stamps_of(stamped(3, 7, 5, None), Clock(PREFER, False, now=10)) == [3, 7, 7, 10]
    assert stamps_of(stamped(3, 7, 5, None), Clock(PREFER, False, now=10, floor=20)) == [20] * 4


def test_the_whole_range_of_timestamps_survives() -> None:
    clock = Clock(PREFER, True, now=10)
    assert stamps_of(stamped(0, 1 << 63, U64_MAX), clock) == [0, 1 << 63, U64_MAX]


@pytest.mark.parametrize("records", [stamped(None), stamped(5, 5, None), stamped(1, None, 2)])
def test_client_require_names_the_first_record_without_timestamp(records: list[Record]) -> None:
    index = [record.timestamp for record in records].index(None)
    for batch in (RecordBatch.of(records), parse_append_input(serialize_input(records)).batch):
        with pytest.raises(InvalidError, match=f"record {index} has no timestamp"):
            sequence(batch, 0, Clock(REQUIRE))


@pytest.mark.parametrize("records", [stamped(None), stamped(None, 5)])
def test_sequencing_changes_nothing_so_it_can_be_repeated(records: list[Record]) -> None:
    for batch in (RecordBatch.of(records), parse_append_input(serialize_input(records)).batch):
        before = sequence(batch, 0, Clock())
        with pytest.raises(InvalidError):
            sequence(batch, 0, Clock(REQUIRE))
        assert sequence(batch, 70_000, Clock(ARRIVAL)) != before
        assert sequence(batch, 0, Clock()) == before


def test_zero_positions_and_empty_records_leave_no_bytes() -> None:
    assert sequence(RecordBatch.of([Record()]), 0, Clock(now=0)).payload == b"\x0a\x00"


def test_commands_are_found_among_records_made_in_python() -> None:
    batch = RecordBatch.of([Record(), trim_record(4), fence_record("me")])
    assert batch.commands == (Trim(1, 4), Fence(2, "me"))


def test_batches_made_in_python_keep_the_limits() -> None:
    assert RecordBatch.of([Record()] * 1000).count == 1000
    assert RecordBatch.of([Record(b"x" * ((1 << 20) - 8))]).metered == 1 << 20
    for records in ([], [Record()] * 1001, [Record(b"x" * ((1 << 20) - 7))]):
        with pytest.raises(InvalidError):
            RecordBatch.of(records)


def record_of(**members: Any) -> Record:
    return Record(**members)


@pytest.mark.parametrize(
    "record",
    [
        record_of(timestamp=-1),
        record_of(timestamp=U64_MAX + 1),
        record_of(timestamp="now"),
        record_of(timestamp=1.5),
        record_of(body="text"),
        record_of(body=None),
        record_of(body=bytearray(b"x")),
        record_of(headers=(Header("name", b"value"),)),  # type: ignore[arg-type]
        record_of(headers=((b"name",),)),
        record_of(headers=(b"nv",)),
        record_of(headers=(None,)),
    ],
)
def test_records_of_the_wrong_types_are_refused_by_index(record: Record) -> None:
    with pytest.raises(InvalidError, match="record 1: "):
        RecordBatch.of([Record(), record])
