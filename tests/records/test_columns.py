"""Native column code agrees with the reference for records of every shape."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.errors import DataCorruptError, MalformedError
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, Record, SequencedRecord, metered_size
from streamfold.records import columns, decode
from streamfold.records.columns import AppendColumns, BytesColumn, Columns, HeaderColumn
from streamfold.records.protobuf import varint
from tests.records import reference
from tests.records import strategies as some
from tests.records.models import Clock, assign_slots, serialize_input
from tests.records.reference import encode_records
from tests.records.test_bytes import repeatable


def plain_values(found: Any) -> Any:
    """Arrays as lists, so that two results can be compared."""
    if isinstance(found, np.ndarray):
        return found.tolist()
    return tuple(map(plain_values, found)) if isinstance(found, tuple) else found


def cells(column: BytesColumn) -> list[bytes]:
    ends = column.offsets.tolist()
    data = column.content.tobytes()
    return [data[start:end] for start, end in pairwise(ends)]


def records_of(found: Columns) -> list[SequencedRecord]:
    assert found.headers is not None
    assert found.bodies is not None
    offsets = found.headers.offsets.tolist()
    pairs = list(map(Header, cells(found.headers.names), cells(found.headers.values)))
    return [
        SequencedRecord(SeqNum(seq_num), Timestamp(stamp), tuple(pairs[start:end]), body)
        for seq_num, stamp, start, end, body in zip(
            found.seq_nums.tolist(),
            found.timestamps.tolist(),
            offsets,
            offsets[1:],
            cells(found.bodies),
            strict=False,
        )
    ]


@repeatable
@given(some.batches, st.booleans(), st.booleans())
def test_what_was_read_is_what_the_columns_hold(
    batch: list[Record], headers: bool, bodies: bool
) -> None:
    placed = assign_slots(batch, 300, Clock())
    tail = b"\x12\x04\x08\x05\x10\x06"
    payload = encode_records(placed) + tail + encode_records(placed)
    found = columns.read_columns(payload, headers=headers, bodies=bodies)
    assert plain_values(found) == plain_values(
        reference.read_columns(payload, headers=headers, bodies=bodies)
    )
    if headers and bodies:
        assert records_of(found) == placed * 2


@repeatable
@given(some.batches)
def test_rows_become_the_records_that_a_client_would_send(batch: list[Record]) -> None:
    found = [header for record in batch for header in record.headers]
    rows = AppendColumns(
        np.array([record.timestamp or 0 for record in batch], np.uint64),
        np.array([record.timestamp is not None for record in batch]),
        HeaderColumn(
            np.cumsum([0, *(len(record.headers) for record in batch)], dtype=np.int32),
            reference.bytes_column([header.name for header in found]),
            reference.bytes_column([header.value for header in found]),
        ),
        reference.bytes_column([record.body for record in batch]),
    )
    encoded = columns.encode_columns(rows)
    assert encoded.raw == serialize_input(batch)
    assert encoded.metered.tolist() == list(map(metered_size, batch))
    ends = accumulate(len(serialize_input([record])) for record in batch)
    assert encoded.offsets.tolist() == [0, *ends]


@repeatable
@given(some.batches, st.data())
def test_damage_is_found_as_by_the_reference(batch: list[Record], data: st.DataObject) -> None:
    payload = bytearray(encode_records(assign_slots(batch, 300, Clock())))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    assert outcome(columns.read_columns, damaged) == outcome(reference.read_columns, damaged)


def outcome(read: Any, payload: bytes) -> Any:
    try:
        return plain_values(read(payload))
    except MalformedError as error:
        return str(error)


def test_an_odd_encoding_is_read() -> None:
    body_first = b"\x22\x01b" + b"\x08\x07"
    found = columns.read_columns(b"\x0a" + varint(len(body_first)) + body_first)
    assert records_of(found) == [SequencedRecord(SeqNum(7), Timestamp(0), (), b"b")]


def test_a_seq_num_beyond_a_signed_column_is_refused() -> None:
    record = SequencedRecord(SeqNum(2**63), Timestamp(0), (), b"")
    with pytest.raises(MalformedError, match="9223372036854775808"):
        columns.read_columns(encode_records([record]))


def test_nothing_has_no_rows() -> None:
    assert len(columns.read_columns(b"").seq_nums) == 0


@repeatable
@given(some.batches, st.sampled_from([0, 126, 1 << 40]))
def test_records_as_objects_are_those_that_were_written(batch: list[Record], first: int) -> None:
    records = assign_slots(batch, first, Clock())
    assert decode(encode_records(records)) == records


@pytest.mark.parametrize("size", [1, 1000])
def test_records_that_are_cut_off_are_corrupt(size: int) -> None:
    with pytest.raises(DataCorruptError):
        decode(b"\x0a\x05cut" * size)


def test_columns_whose_offsets_do_not_fit_are_refused() -> None:
    empty = HeaderColumn(np.zeros(2, np.int32), *[reference.bytes_column([])] * 2)
    for ends in ([0, 4], [2, 1], [-1, 1]):
        bodies = BytesColumn(np.array(ends, np.int32), np.frombuffer(b"abc", np.uint8))
        rows = AppendColumns(np.zeros(1, np.uint64), np.zeros(1, np.bool_), empty, bodies)
        with pytest.raises(MalformedError, match="row 0"):
            columns.encode_columns(rows)
