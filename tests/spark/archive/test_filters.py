"""Filters keep the same rows as SQL, and skip files that cannot match."""

from __future__ import annotations

import io
import json
import operator
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from streamfold.archive import ArtifactCorruptError, Part
from streamfold.spark import OptionError
from streamfold.spark.archive.filters import Condition, matching, parse_conditions
from streamfold.spark.archive.planning import WHOLE, RowGroupShare, may_match, read_row_groups
from streamfold.spark.archive.relation import arrow_schema, spark_schema

from .conftest import Written
from .reading import PlainRead, expected
from .reading import values as shown
from .tables import BUCKETS, SCHEMA, Row, row

COLUMNS = arrow_schema(spark_schema(SCHEMA.arrow))
#: How SQL compares, for values that are not null.
_PLAIN: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
    "starts with": lambda a, b: a.startswith(b),
}


def passes(test: Condition, row: Row) -> bool:
    """What SQL would say, row by row."""
    value = row[test.column]
    if test.test in ("is null", "is not null"):
        return (value is None) == (test.test == "is null")
    return value is not None and _PLAIN[test.test](value, test.value)


FILTERS: list[list[Any]] = [
    ["id", "=", 7],
    ["id", "in", [3, 7, 10**9]],
    ["id", ">", 50],
    ["flag", "=", True],
    ["flag", "!=", True],
    ["i8", "<", -3],
    ["u8", ">=", 200],
    ["u64", "=", 2**64 - 1],
    ["price", "<=", 0],
    ["small", ">", 1.5],
    ["small", "in", ["1.5", 2]],
    ["name", "=", "Ä"],
    ["name", "!=", "apple"],
    ["name", "not in", ["apple", "𝄞"]],
    ["name", ">", "apricot"],
    ["name", "starts with", "ap"],
    ["raw", "=", ""],
    ["raw", ">=", "gA=="],
    ["day", "<", "1999-12-31"],
    ["seen", ">", "2040-01-01T00:00:00+01:00"],
    ["local", "<=", "2040-01-01T00:00:00"],
    ["exact", ">", 0],
    ["time", "<", 43_200 * 10**9],
    ["points", "is null"],
    ["f64", "is not null"],
    ["name", "in", []],
]
CONDITIONS = parse_conditions(json.dumps(FILTERS), COLUMNS)


def test_rows_pass_as_sql_says(written: Written) -> None:
    folder, history = written(buckets=BUCKETS, form="parquet")
    table = PlainRead(folder).table()
    rows = table.to_pylist()
    for condition in CONDITIONS:
        kept = [matching(batch, [condition]) for batch in table.to_batches()]
        found = {n for batch in kept for n in batch["id"].to_pylist()}
        assert found == {row["id"] for row in rows if passes(condition, row)}, condition
    chance = random.Random(3)
    for _ in range(3):
        some = chance.sample(range(len(FILTERS)), 2)
        wanted = {r["id"] for r in rows if all(passes(CONDITIONS[n], r) for n in some)}
        read = PlainRead(folder, filters=json.dumps([FILTERS[n] for n in some]))
        assert shown(read.table()) == expected({n: history.state[n] for n in wanted}), some
    by_name = PlainRead(folder, columns="id", filters='[["name", "=", "apple"]]').table()
    assert by_name.column_names == ["id"]
    assert sorted(by_name["id"].to_pylist()) == sorted(
        key for key, row in history.state.items() if row["name"] == "apple"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id = 5", "must be JSON such as"),
        ('{"id": 5}', "must be JSON such as"),
        ('[["id", "~", 5]]', "the tests are =, !=,"),
        ('[["id", "="]]', "must be JSON such as"),
        ('[["id", "=", null]]', "must be JSON such as"),
        ('[["id", "in", 5]]', "must be JSON such as"),
        ('[[["id", "=", 5]]]', "must be JSON such as"),
        ('[["nothing", "=", 5]]', "names 'nothing', which is not one of"),
        ('[["f64", ">", 1]]', "use where"),
        ('[["tags", "=", "x"]]', "use where"),
        ('[["i8", "=", 1000]]', "the column is int8"),
        ('[["id", "in", [1, null]]]', "use is null"),
        ('[["id", "=", true]]', "has another type"),
        ('[["id", "=", "5"]]', "the column is int64"),
        ('[["flag", "<", true]]', "has no order"),
        ('[["day", "=", "today"]]', "the column is date32"),
        ('[["seen", "=", "2026-01-01T00:00:00"]]', "must be written with a zone"),
        ('[["local", "=", "2026-01-01T00:00:00Z"]]', "must be written without a zone"),
        ('[["price", "<", 0.001]]', "the column is decimal"),
        ('[["id", "starts with", "1"]]', "is not text"),
    ],
)
def test_what_cannot_be_compared_exactly_is_refused(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_conditions(text, COLUMNS)


def _parquet(table: pa.Table, rows: int) -> tuple[Part, io.BytesIO]:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows, write_page_checksum=True, use_dictionary=False)
    return Part(path="p", uri="p", size_bytes=sink.tell(), rows=len(table)), sink


def test_row_groups_that_cannot_match_are_not_read() -> None:
    table = pa.table({"id": range(100), "text": [f"t{n:03d}" for n in range(100)]})
    part, file = _parquet(table, 10)
    chunk = pq.ParquetFile(file).metadata.row_group(3).column(0)
    content = bytearray(file.getvalue())
    # The last byte of its last page: a reader finds another checksum.
    content[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 255
    damaged = io.BytesIO(content)

    def read(*filters: list[Any], share: RowGroupShare = WHOLE) -> list[int]:
        conditions = parse_conditions(json.dumps(filters), table.schema)
        batches = read_row_groups(part, damaged, table.schema, conditions, share)
        return [n for batch in batches for n in batch["id"].to_pylist()]

    assert read(["id", "=", 57]) == list(range(50, 60))
    assert read(["id", "in", [12, 95]]) == [*range(10, 20), *range(90, 100)]
    assert read(["id", ">", 80], ["text", "<", "t085"]) == list(range(80, 90))
    assert read(["text", "starts with", "t07"]) == list(range(70, 80))
    assert read(["id", "<=", 9], ["text", "is not null"]) == list(range(10))
    assert read(["id", "is null"]) == []
    assert read(share=RowGroupShare(0, 4)) == list(range(20))
    assert read(share=RowGroupShare(3, 4)) == list(range(70, 100))
    with pytest.raises(ArtifactCorruptError, match="'p'"):
        read(["id", "=", 30])


def test_a_column_may_have_the_name_of_a_path_into_a_struct() -> None:
    table = pa.table({"s": [{"x": 1, "y": 2}], "s.x": ["k"]})
    part, file = _parquet(table, 10)
    for name, value in (("s.x", "k"), ("s", {"x": 1, "y": 2})):
        columns = pa.schema([table.schema.field(name)])
        [found] = read_row_groups(part, file, columns, [], RowGroupShare(0, 1))
        assert found.to_pylist() == [{name: value}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.timestamp("us", "UTC"), "2020-01-01T00:00:00Z"),
        (pa.timestamp("us"), "2020-01-01T00:00:00"),
        (pa.date32(), "2020-01-01"),
    ],
)
def test_statistics_may_lie_outside_the_years_of_python(kind: pa.DataType, value: str) -> None:
    width = pa.int32() if pa.types.is_date(kind) else pa.int64()
    most = (1 << width.bit_width - 1) - 1
    for numbers in ([-most, 0], [0, most], [-most, most]):
        table = pa.table({"at": pa.array(numbers, width).cast(kind)})
        part, file = _parquet(table, 10)
        for test in ("=", "<", ">="):
            conditions = parse_conditions(json.dumps([["at", test, value]]), table.schema)
            found = read_row_groups(part, file, table.schema, conditions)
            assert sum(map(len, found)) == 2


def test_a_decimal_that_is_text_in_spark_is_filtered_as_text() -> None:
    table = pa.table({"price": pa.array([Decimal("1.00"), Decimal("2.00")], pa.decimal256(50, 2))})
    part, file = _parquet(table, 10)
    tested = arrow_schema(spark_schema(table.schema))
    for entry in (["price", "=", "1.00"], ["price", "in", ["2.00"]], ["price", ">", "1.00"]):
        conditions = parse_conditions(json.dumps([entry]), tested)
        assert sum(map(len, read_row_groups(part, file, table.schema, conditions))) == 2
        # The file of an older base, in which the column had fewer digits.
        older = table.cast(pa.schema([("price", pa.decimal128(10, 2))]))
        assert sum(map(len, read_row_groups(*_parquet(older, 10), older.schema, conditions))) == 2


def test_statistics_never_hide_a_row_that_passes() -> None:
    chance = random.Random(8)
    for number in range(30):
        rows = [row(chance.randrange(300), chance) for _ in range(1 + number % 3)]
        batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA.arrow)
        _, file = _parquet(pa.Table.from_batches([batch]), 100)
        group = pq.ParquetFile(file).metadata.row_group(0)
        converted = pa.RecordBatch.from_arrays(
            [
                c if pa.types.is_nested(f.type) else pc.cast(c, f.type)
                for c, f in zip(batch.columns, COLUMNS, strict=True)
            ],
            names=COLUMNS.names,
        )
        for condition in CONDITIONS:
            if len(matching(converted, [condition])):
                assert may_match(group, [condition], SCHEMA.arrow), (number, condition, rows)
