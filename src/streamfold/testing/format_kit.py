"""Conformance tests for archive formats.

    class TestMyFormat(FormatConformance):
        @pytest.fixture
        def format(self) -> Format:
            return MyFormat()

Needs pytest: `pip install streamfold[archive,testing]`.
"""

# ruff: noqa: A002 - the fixture is named after what it is
from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats import Format
from streamfold.archive.formats.conforming import as_list, list_lengths
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.extras import needing_extra
from streamfold.testing.format_samples import (
    EVERY_TYPE,
    ORDERS,
    bad_changes,
    changes_of,
    cut,
    in_another_layout,
    misfits,
    orders,
    table_of,
)

with needing_extra("testing"):
    import pyarrow as pa
    import pytest

#: Arrow memory limit for a writer or reader, and size of the table it processes. Both in bytes.
MEMORY_MAX, TABLE_BYTES = 128 << 20, 160 << 20
#: Number of file offsets to damage, one per run.
DAMAGES = 150


class WriteOnly:
    """A sink without seek, tell or read, such as a pipe or an upload body."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.closed = False
        self.write = sink.write

    def flush(self) -> None:
        self._sink.flush()


class FormatConformance:
    """Conformance suite. Subclass it in a test module and override the `format` fixture."""

    #: Whether the format detects every flipped bit.
    checksummed: ClassVar[bool] = False
    #: Whether the format detects a file truncated at a row boundary.
    knows_its_end: ClassVar[bool] = False

    @pytest.fixture
    def format(self) -> Format:
        raise NotImplementedError("override the `format` fixture: return a format")

    @pytest.mark.parametrize("sample", EVERY_TYPE)
    def test_every_type_reads_back_exactly(self, format: Format, sample: str) -> None:
        schema, rows = table_of(*EVERY_TYPE[sample])
        data, count = write(format.write_rows, schema, [rows])
        assert count == len(rows)
        assert_same(read(format.read_rows(io.BytesIO(data), schema), schema.arrow), rows)

    @pytest.mark.parametrize("sample", EVERY_TYPE)
    def test_changes_of_every_type_read_back_exactly(self, format: Format, sample: str) -> None:
        schema, rows = table_of(*EVERY_TYPE[sample])
        changes = changes_of(schema, rows)
        data, count = write(format.write_changes, schema, [changes])
        assert count == len(changes)
        assert_same(read(format.read_changes(io.BytesIO(data), schema), schema.changes), changes)

    @pytest.mark.parametrize("batches", [[], [orders(0)], [orders(0), orders(0)]])
    def test_an_empty_table_is_a_file_too(
        self, format: Format, batches: list[pa.RecordBatch]
    ) -> None:
        data, count = write(format.write_rows, ORDERS, batches)
        assert count == 0
        assert list(format.read_rows(io.BytesIO(data), ORDERS)) == []
        data, count = write(format.write_changes, ORDERS, [])
        assert count == 0
        assert list(format.read_changes(io.BytesIO(data), ORDERS)) == []

    def test_rows_keep_their_order_over_many_batches(self, format: Format) -> None:
        rows = orders(140_000)
        data, _ = write(format.write_rows, ORDERS, cut(rows, 50_021))
        batches = list(format.read_rows(io.BytesIO(data), ORDERS))
        assert max(map(len, batches)) <= 65536
        assert_same(read(iter(batches), ORDERS.arrow), rows)

    def test_the_same_rows_give_the_same_bytes_however_they_arrive(self, format: Format) -> None:
        rows = orders(70_000)
        whole, _ = write(format.write_rows, ORDERS, [rows])
        arrivals = (cut(rows, 999), [orders(0), rows], [in_another_layout(rows)])
        for batches in arrivals:
            assert write(format.write_rows, ORDERS, batches)[0] == whole
        changes = changes_of(ORDERS, orders(500))
        assert write(format.write_changes, ORDERS, [changes]) == write(
            format.write_changes, ORDERS, cut(changes, 7)
        )

    def test_values_hidden_in_null_slots_are_not_written(self, format: Format) -> None:
        values = pa.array([1, 2, 3], pa.int64())
        hidden = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), values.buffers()[1]])
        schema = TableSchema.of([pa.field("id", pa.int64()), pa.field("value", pa.int64())], ["id"])
        clean = pa.array([1, None, 3], pa.int64())
        written = [
            write(format.write_rows, schema, [pa.record_batch([values, column], schema.arrow)])
            for column in (hidden, clean)
        ]
        assert written[0] == written[1]

    def test_only_the_columns_asked_for_are_read_in_their_order(self, format: Format) -> None:
        rows = orders(1000)
        data, _ = write(format.write_rows, ORDERS, [rows])
        names = ["note", "shop"]
        got = read(format.read_rows(io.BytesIO(data), ORDERS, names), ORDERS.select(names))
        assert_same(got, rows.select(names))
        for wrong in (["absent"], []):
            with pytest.raises(InvalidError, match="columns"):
                list(format.read_rows(io.BytesIO(data), ORDERS, wrong))

    def test_a_file_of_an_older_schema_reads_under_a_newer_one(self, format: Format) -> None:
        old = TableSchema.of([pa.field("id", pa.int32()), pa.field("gone", pa.string())], ["id"])
        new = TableSchema.of([pa.field("id", pa.int64()), pa.field("more", pa.float64())], ["id"])
        merged = old.merged(new)
        rows = pa.record_batch([pa.array([1, 2], pa.int32()), pa.array(["a", None])], old.arrow)
        data, _ = write(format.write_rows, old, [rows])
        got = read(format.read_rows(io.BytesIO(data), merged), merged.arrow)
        assert got.to_pylist() == [
            {"id": 1, "gone": "a", "more": None},
            {"id": 2, "gone": None, "more": None},
        ]
        got = read(format.read_rows(io.BytesIO(data), merged, ["more"]), merged.select(["more"]))
        assert got.to_pylist() == [{"more": None}, {"more": None}]

    def test_a_delete_keeps_its_key_when_nothing_else_is_known(self, format: Format) -> None:
        key = {"shop": "x y", "number": 2**60}
        rows = [{"action": "DELETE", "key": key}]
        changes = pa.RecordBatch.from_pylist(rows, schema=ORDERS.changes)
        data, _ = write(format.write_changes, ORDERS, [changes])
        got = read(format.read_changes(io.BytesIO(data), ORDERS), ORDERS.changes).to_pylist()
        assert got[0]["key"] == key
        assert got[0]["before"] == dict.fromkeys(ORDERS.names) | key
        assert got[0]["after"] is None

    @pytest.mark.parametrize("wrong", ["extra", "type", "null", "missing", "map"])
    def test_rows_that_do_not_fit_the_schema_are_refused(self, format: Format, wrong: str) -> None:
        schema, batch = misfits()[wrong]
        with pytest.raises(InvalidError):
            write(format.write_rows, schema, [batch])

    @pytest.mark.parametrize("wrong", range(8))
    def test_changes_that_break_a_rule_are_refused(self, format: Format, wrong: int) -> None:
        changes = pa.RecordBatch.from_pylist(bad_changes()[wrong], schema=ORDERS.changes)
        with pytest.raises(InvalidError):
            write(format.write_changes, ORDERS, cut(changes, 1))

    def test_a_failing_source_of_batches_does_not_look_like_its_end(self, format: Format) -> None:
        def failing() -> Iterator[pa.RecordBatch]:
            yield orders(10)
            raise FileNotFoundError("the caller's own")

        with pytest.raises(FileNotFoundError, match="the caller's own"):
            write(format.write_rows, ORDERS, failing())

    def test_a_cut_file_is_refused(self, format: Format) -> None:
        """A format that cannot detect truncation must still read a correct prefix of the rows."""
        for kind, data, original in self._files(format):
            for length in self._offsets(len(data)):
                got = self._damaged(kind, data[:length])
                if self.knows_its_end or got is None:
                    assert got is None, f"{length} of {len(data)} bytes went unnoticed"
                else:
                    assert_same(got, original.slice(0, len(got)))

    def test_bytes_after_the_end_are_refused(self, format: Format) -> None:
        for kind, data, _ in self._files(format):
            assert self._damaged(kind, data + b"x") is None

    def test_a_changed_bit_is_refused(self, format: Format) -> None:
        """A format without checksums may miss the damage, but must not raise any other error."""
        for kind, data, original in self._files(format):
            for offset in self._offsets(len(data)):
                changed = bytearray(data)
                changed[offset] ^= 1 << offset % 8
                got = self._damaged(kind, bytes(changed))
                if self.checksummed and got is not None:
                    assert_same(got, original)

    def test_bytes_of_something_else_are_refused(self, format: Format) -> None:
        noise = random.Random(3).randbytes(5000)  # noqa: S311 - reproducible data, no secret
        for data in (noise, b"%PDF-1.7\n" + noise, b"\x00" * 100, b"[1,2,3]\n"):
            for kind, _, _ in self._files(format):
                assert self._damaged(kind, data) is None

    def test_a_sink_need_not_seek(self, format: Format) -> None:
        whole, _ = write(format.write_rows, ORDERS, [orders(1000)])
        target = io.BytesIO()
        format.write_rows(cast("BinaryIO", WriteOnly(target)), ORDERS, [orders(1000)])
        assert target.getvalue() == whole

    def test_a_source_is_read_from_its_start_and_left_open(self, format: Format) -> None:
        data, _ = write(format.write_rows, ORDERS, [orders(10)])
        source = io.BytesIO(data)
        source.seek(0, io.SEEK_END)
        for _ in range(2):
            assert_same(read(format.read_rows(source, ORDERS), ORDERS.arrow), orders(10))
        assert not source.closed

    def test_it_travels_to_other_processes(self, format: Format) -> None:
        there = pickle.loads(pickle.dumps(format))  # noqa: S301 - our own bytes
        assert write(there.write_rows, ORDERS, [orders(9)]) == write(
            format.write_rows, ORDERS, [orders(9)]
        )

    def test_memory_is_bounded_by_batches_not_by_the_table(
        self, format: Format, tmp_path: Path
    ) -> None:
        start, peak = pa.total_allocated_bytes(), 0
        batch = orders(5_000, note="x" * 8000)

        def many() -> Iterator[pa.RecordBatch]:
            nonlocal peak
            for number in range(TABLE_BYTES // batch.nbytes):
                peak = max(peak, pa.total_allocated_bytes() - start)
                yield batch if number % 2 else batch.take(pa.array(range(len(batch))))

        path = tmp_path / "large"
        with path.open("wb") as sink:
            written = format.write_rows(sink, ORDERS, many())
        assert written * batch.nbytes // len(batch) > TABLE_BYTES * 0.9
        assert peak < MEMORY_MAX
        seen = peak = 0
        with path.open("rb") as source:
            for part in format.read_rows(source, ORDERS):
                seen += len(part)
                peak = max(peak, pa.total_allocated_bytes() - start)
        assert seen == written
        assert peak < MEMORY_MAX

    def _files(self, format: Format) -> Iterator[tuple[Callable[..., Any], bytes, pa.RecordBatch]]:
        rows = orders(400)
        yield format.read_rows, write(format.write_rows, ORDERS, [rows])[0], rows
        changes = changes_of(ORDERS, rows)
        yield format.read_changes, write(format.write_changes, ORDERS, [changes])[0], changes

    def _offsets(self, size: int) -> list[int]:
        chance = random.Random(size)  # noqa: S311 - reproducible damage, no secret
        spread = chance.sample(range(1, size), min(DAMAGES, size - 1))
        return sorted({*spread, 1, size - 1, *range(max(1, size - 20), size)})

    def _damaged(self, kind: Callable[..., Any], data: bytes) -> pa.RecordBatch | None:
        """Return the rows read from damaged bytes, or None if the format rejects them as corrupt."""
        try:
            batches = list(kind(io.BytesIO(data), ORDERS))
        except ArtifactCorruptError:
            return None
        return joined(batches) if batches else orders(0)


def write(call: Callable[..., int], schema: TableSchema, batches: Any) -> tuple[bytes, int]:
    sink = io.BytesIO()
    count = call(sink, schema, batches)
    return sink.getvalue(), count


def read(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Join all batches. Each must be non-empty and have exactly this schema."""
    pieces = list(batches)
    for batch in pieces:
        batch.validate(full=True)
        assert len(batch)
        assert batch.schema.equals(schema), f"{batch.schema}\nis not\n{schema}"
    return joined(pieces)


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches)


def assert_same(got: pa.RecordBatch, expected: pa.RecordBatch) -> None:
    """Assert that all values are equal. NaN equals NaN; -0.0 differs from 0.0."""
    assert len(got) == len(expected)
    for name, left, right in zip(got.schema.names, got.columns, expected.columns, strict=True):
        assert_equal(left, right, name)


def assert_equal(left: pa.Array, right: pa.Array, path: str) -> None:
    """Compare as Arrow does, except for floats, where Arrow treats NaN as unequal to itself."""
    assert left.type == right.type, path
    if pa.types.is_nested(left.type):
        assert left.is_null().equals(right.is_null()), path
        if not pa.types.is_struct(left.type):
            left, right = as_list(left), as_list(right)
            assert (list_lengths(left) == list_lengths(right)).all(), path
        for part, other in zip(parts(left), parts(right), strict=True):
            assert_equal(part, other, path)
    elif pa.types.is_floating(left.type):
        assert repr(left.to_pylist()) == repr(right.to_pylist()), path
    else:
        assert left.equals(right), f"{path}: {left}\nis not {right}"


def parts(array: pa.Array) -> list[pa.Array]:
    flat = array.flatten()
    return flat if isinstance(flat, list) else [flat]
