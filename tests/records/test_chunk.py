"""Stored payloads: measuring, cutting and detecting damage."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import DataCorruptError
from streamfold.model.configs import TimestampMode
from streamfold.model.positions import U64_MAX, SeqNum, Timestamp
from streamfold.model.records import Header, Record, SequencedRecord, metered_size
from streamfold.records import Index, decode, measure

from . import strategies as some
from .models import Clock, assign_slots
from .reference import encode_records
from .reference import measure as measure_slowly

repeatable = settings(derandomize=True, deadline=None, max_examples=100)

firsts = st.sampled_from([0, 1, 126, 1 << 40, (1 << 63) - 5, (1 << 63) + 5])
moments = st.integers(0, 50)
uncapped = st.builds(
    Clock, st.just(TimestampMode.CLIENT_PREFER), st.just(True), now=moments, floor=moments
)


def sequenced(*seq_nums: int, timestamp: int = 5) -> list[SequencedRecord]:
    return [SequencedRecord(SeqNum(s), Timestamp(timestamp), (), b"x") for s in seq_nums]


def naive_cut(
    records: list[SequencedRecord], first: int, count: int, metered: int, until: int | None
) -> tuple[int, int, int, int]:
    end, used = first, 0
    for record in records[first : first + count]:
        late = until is not None and record.timestamp >= until
        if late or used + metered_size(record) > metered:
            break
        end, used = end + 1, used + metered_size(record)
    start, stop = (len(encode_records(records[:index])) for index in (first, end))
    return end, start, stop, used


@repeatable
@given(some.batches, firsts, uncapped)
def test_measuring_finds_offsets_timestamps_and_sizes(
    batch: list[Record], first: int, clock: Clock
) -> None:
    records = assign_slots(batch, first, clock)
    payload = encode_records(records)
    offsets = [0, *accumulate(len(encode_records([record])) for record in records)]
    stamps = [record.timestamp for record in records]
    sizes = [0, *accumulate(map(metered_size, records))]
    index = measure(payload)
    found = (index.offsets, index.timestamps, index.metered, index.first_seq_num)
    assert found == measure_slowly(payload) == (offsets, stamps, sizes, first)


@repeatable
@given(
    some.batches,
    uncapped,
    st.integers(0, 14),
    st.integers(0, 1000),
    st.none() | some.stamps,
    st.data(),
)
def test_cuts_are_the_longest_runs_that_keep_every_limit(
    batch: list[Record],
    clock: Clock,
    count: int,
    metered: int,
    until: int | None,
    data: st.DataObject,
) -> None:
    records = assign_slots(batch, 7, clock)
    first = data.draw(st.integers(0, len(records)))
    cut = measure(encode_records(records)).cut(first, count=count, metered=metered, until=until)
    expected = naive_cut(records, first, count, metered, until)
    assert (cut.end_index, cut.byte_start, cut.byte_end, cut.metered) == expected
    part = encode_records(records)[cut.byte_start : cut.byte_end]
    assert decode(part) == records[first : cut.end_index]


@repeatable
@given(some.batches, uncapped, some.stamps)
def test_the_first_record_at_or_after_a_timestamp_is_found(
    batch: list[Record], clock: Clock, timestamp: int
) -> None:
    records = assign_slots(batch, 0, clock)
    found = measure(encode_records(records)).index_of_timestamp(timestamp)
    assert found == sum(record.timestamp < timestamp for record in records)


def test_timestamps_beyond_every_record_are_after_the_last() -> None:
    index = measure(encode_records(sequenced(1, 2, timestamp=U64_MAX)))
    assert index.index_of_timestamp(U64_MAX) == 0
    assert index.index_of_timestamp(U64_MAX + 1) == index.count == 2
    assert index.cut(0, count=5, metered=99, until=U64_MAX + 1).end_index == 2


def test_an_empty_payload_has_no_records() -> None:
    index = measure(b"")
    assert (index.count, decode(b"")) == (0, [])
    cut = index.cut(0, count=1, metered=1, until=None)
    assert (cut.end_index, cut.byte_start, cut.byte_end, cut.metered) == (0, 0, 0, 0)


def test_payloads_are_read_from_any_buffer() -> None:
    payload = encode_records(sequenced(3, 4))
    for view in (memoryview(payload), memoryview(bytearray(payload))):
        assert measure(view).offsets == measure(payload).offsets
        assert decode(view) == sequenced(3, 4)


def test_a_payload_in_an_odd_encoding_is_measured_all_the_same() -> None:
    index = measure(b"\x0a\x83\x00\x08\x85\x00" + encode_records(sequenced(6)))
    assert (index.count, index.first_seq_num) == (2, 5)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x0a",
        b"\x0a\x05\x08\x01",
        b"\x12\x00",
        b"\x0a\x02\x08\x80",
        b"\x0a\x02\x10\x80",
        b"\x0a\x03\x08\x01\x22",
        encode_records(sequenced(1)) + b"\x00",
        encode_records(sequenced(1)) + b"\x12\x00",
    ],
)
def test_payloads_that_cannot_be_walked_are_corrupt(payload: bytes) -> None:
    with pytest.raises(DataCorruptError, match=f"{len(payload)} bytes"):
        measure(payload)
    with pytest.raises(DataCorruptError):
        decode(payload)


def test_a_gap_between_sequence_numbers_is_corrupt() -> None:
    with pytest.raises(DataCorruptError, match="record 1 has seq_num 9, not 8"):
        measure(encode_records(sequenced(7, 9)))


@repeatable
@given(some.batches, st.data())
def test_damage_is_noticed_or_harmless_but_never_crashes(
    batch: list[Record], data: st.DataObject
) -> None:
    payload = bytearray(encode_records(assign_slots(batch, 300, Clock())))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    assert (index := attempt(damaged)) is None or index.count == len(decode(damaged))


def attempt(payload: bytes) -> Index | None:
    try:
        return measure(payload)
    except DataCorruptError:
        return None


def test_headers_are_metered() -> None:
    headers = (Header(b"ab", b"c"), Header(b"d", b""))
    record = SequencedRecord(SeqNum(0), Timestamp(0), headers, b"body")
    assert measure(encode_records([record])).metered == [0, 8 + 5 + 3 + 4]
