"""Tables of any shape, through every format, and all formats saying the same."""

from __future__ import annotations

import io
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamfold.archive.formats import FORMATS, Format, format_of
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.testing.format_kit import assert_same, read, write
from streamfold.testing.format_samples import ORDERS, changes_of, orders

EVERY_FORMAT: list[Format] = [
    *(format_of(name) for name in FORMATS.ids()),
    format_of("jsonl", "gzip"),
    format_of("jsonl", "zstd"),
]

SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32).filter(lambda x: not math.isnan(x))),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.decimal128(30, 12), st.decimals(-(10**17), 10**17, places=12)),
    (pa.decimal256(60, 3), st.integers(-(10**50), 10**50).map(Decimal)),
    (pa.string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    (pa.timestamp("us", "UTC"), st.integers(-(2**63), 2**63 - 1)),
    (pa.timestamp("ns"), st.integers(-(2**63), 2**63 - 1)),
]
NAMES = st.text(min_size=1, max_size=5)


@st.composite
def columns(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    """A type, and values of it."""
    shape = draw(st.sampled_from(["scalar"] * 3 + ["list", "struct", "map"])) if depth else "scalar"
    if shape == "scalar":
        found: tuple[pa.DataType, st.SearchStrategy[Any]] = draw(st.sampled_from(SCALARS))
        return found
    if shape == "struct":
        names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
        inner = [draw(columns(depth - 1)) for _ in names]
        fields = [pa.field(name, kind) for name, (kind, _) in zip(names, inner, strict=True)]
        parts = {name: st.none() | v for name, (_, v) in zip(names, inner, strict=True)}
        return pa.struct(fields), st.fixed_dictionaries(parts)
    kind, values = draw(columns(depth - 1))
    if shape == "list":
        return pa.list_(kind), st.lists(st.none() | values, max_size=4)
    pairs = st.dictionaries(st.text(max_size=4), st.none() | values, max_size=4)
    return pa.map_(pa.string(), kind), pairs.map(lambda found: sorted(found.items(), key=_bytes))


def _bytes(item: tuple[str, Any]) -> bytes:
    return item[0].encode()


@st.composite
def tables(draw: st.DrawFn) -> tuple[TableSchema, pa.RecordBatch]:
    names = draw(st.lists(NAMES.filter(lambda n: n != "id"), max_size=4, unique=True))
    chosen = [draw(columns()) for _ in names]
    count = draw(st.integers(0, 6))
    fields = [pa.field(name, kind) for name, (kind, _) in zip(names, chosen, strict=True)]
    schema = TableSchema.of([pa.field("id", pa.int64()), *fields], ["id"])
    arrays = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), kind)
        for kind, values in chosen
    ]
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(count), pa.int64()), *arrays], schema=schema.arrow
    )
    return schema, rows


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(tables())
def test_any_table_reads_back_from_any_format(table: tuple[TableSchema, pa.RecordBatch]) -> None:
    schema, rows = table
    changes = changes_of(schema, rows)
    for chosen in EVERY_FORMAT:
        data, count = write(chosen.write_rows, schema, [rows])
        assert count == len(rows)
        found = list(chosen.read_rows(io.BytesIO(data), schema))
        if len(rows):
            assert_same(read(iter(found), schema.arrow), rows)
        else:
            assert found == []
        data, _ = write(chosen.write_changes, schema, [changes])
        assert_same(read(chosen.read_changes(io.BytesIO(data), schema), schema.changes), changes)


def test_formats_are_found_by_id_and_compression() -> None:
    extensions = [chosen.extension for chosen in EVERY_FORMAT]
    assert extensions == [".jsonl", ".parquet", ".pb", ".typed.pb", ".jsonl.gz", ".jsonl.zst"]
    assert [chosen.id for chosen in EVERY_FORMAT[-2:]] == ["jsonl", "jsonl"]
    for name, compression in (("csv", "none"), ("parquet", "gzip"), ("jsonl", "brotli")):
        with pytest.raises(InvalidError, match=f"{name}.*{compression}"):
            format_of(name, compression)


def test_one_run_writes_every_format_from_the_same_batches() -> None:
    rows = orders(500)
    tables = [
        read(
            chosen.read_rows(io.BytesIO(write(chosen.write_rows, ORDERS, [rows])[0]), ORDERS),
            ORDERS.arrow,
        )
        for chosen in EVERY_FORMAT
    ]
    for table in tables:
        assert_same(table, rows)


def test_gzip_files_carry_no_time_and_no_name() -> None:
    data, _ = write(format_of("jsonl", "gzip").write_rows, ORDERS, [orders(1)])
    assert data[3:8] == b"\x00\x00\x00\x00\x00"
