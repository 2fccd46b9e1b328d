from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.testing.format_samples import EVERY_TYPE, ORDERS

ID = pa.field("id", pa.int64())


def schema(*fields: pa.Field, keys: tuple[str, ...] = ("id",)) -> TableSchema:
    return TableSchema.of([ID, *fields], keys)


@pytest.mark.parametrize("sample", EVERY_TYPE)
def test_a_schema_survives_json(sample: str) -> None:
    given = schema(pa.field("value", EVERY_TYPE[sample][0]))
    again = TableSchema.from_json(given.to_json())
    assert again == given
    assert again.id == given.id
    assert again.arrow.equals(given.arrow)


def test_the_id_is_the_same_everywhere_and_never_changes() -> None:
    assert ORDERS.id == "d00cb48eb7bdb4d2bdc4faf7e8c0c10e"


def test_the_id_distinguishes_schemas() -> None:
    others = [
        schema(),
        schema(pa.field("a", pa.int32())),
        schema(pa.field("a", pa.int64())),
        schema(pa.field("a", pa.int32(), nullable=False)),
        schema(pa.field("b", pa.int32())),
        schema(pa.field("a", pa.int32()), keys=()),
        schema(pa.field("a", pa.int32()), keys=("id", "a")),
        schema(pa.field("a", pa.int32()), keys=("a", "id")),
    ]
    assert len({other.id for other in others}) == len(others)


def test_layouts_of_the_same_values_are_one_type() -> None:
    plain = schema(pa.field("a", pa.list_(pa.string())), pa.field("b", pa.binary()))
    other = schema(
        pa.field("a", pa.large_list(pa.field("element", pa.large_string()))),
        pa.field("b", pa.dictionary(pa.int8(), pa.binary_view())),
    )
    assert other == plain
    assert other.id == plain.id


@pytest.mark.parametrize(
    "kind",
    [
        pa.float16(),
        pa.timestamp("ms"),
        pa.date64(),
        pa.time32("s"),
        pa.duration("s"),
        pa.struct([]),
        pa.struct([("a", pa.int8()), ("a", pa.int8())]),
        pa.map_(pa.int64(), pa.int64()),
        pa.list_(pa.float16()),
        pa.decimal128(10, -2),
        pa.decimal128(3, 5),
        pa.decimal256(40, 41),
        pa.timestamp("us", "my zone"),
    ],
    ids=str,
)
def test_a_type_that_not_every_format_keeps_is_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(InvalidError, match="'value'"):
        schema(pa.field("value", kind))


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ([], ()),
        ([ID], ("absent",)),
        ([ID], ("id", "id")),
        ([ID, ID], ("id",)),
        ([pa.field("", pa.int64())], ()),
        ([pa.field("id", pa.float64())], ("id",)),
        ([pa.field("id", pa.list_(pa.int64()))], ("id",)),
    ],
)
def test_columns_and_keys_that_cannot_work_are_refused(
    fields: list[pa.Field], keys: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidError):
        TableSchema.of(fields, keys)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"columns": [], "key_fields": []},
        {"columns": "id", "key_fields": []},
        {"columns": [{"name": "id", "type": "int64"}], "key_fields": ["id"]},
        {"columns": [{"name": "id", "type": "integer", "nullable": False}], "key_fields": []},
        {
            "columns": [{"name": "d", "type": "decimal128(39, 0)", "nullable": True}],
            "key_fields": [],
        },
        {"columns": [{"name": "l", "type": {"list": {}}, "nullable": True}], "key_fields": []},
        {"columns": [{"name": "id", "type": "int64", "nullable": True}], "key_fields": [1]},
    ],
)
def test_json_that_is_not_a_schema_is_refused(value: Any) -> None:
    with pytest.raises(InvalidError):
        TableSchema.from_json(value)


def test_a_type_nested_without_end_is_refused() -> None:
    kind: Any = "int64"
    for _ in range(5000):
        kind = {"list": {"type": kind, "nullable": True}}
    with pytest.raises(InvalidError, match="nested"):
        TableSchema.from_json(
            {"columns": [{"name": "x", "type": kind, "nullable": True}], "key_fields": []}
        )


def test_a_schema_without_keys_has_no_changes() -> None:
    with pytest.raises(InvalidError, match="key fields"):
        _ = schema(keys=()).changes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int8(), pa.int16()),
        (pa.int32(), pa.int64()),
        (pa.uint8(), pa.uint64()),
        (pa.uint32(), pa.int64()),
        (pa.float32(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(12, 2)),
        (pa.decimal128(10, 2), pa.decimal128(12, 4)),
        (pa.decimal128(38, 2), pa.decimal256(50, 2)),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.map_(pa.string(), pa.int32()), pa.map_(pa.string(), pa.int64())),
        (pa.struct([("a", pa.int32())]), pa.struct([("a", pa.int64())])),
    ],
    ids=str,
)
def test_types_widen_and_never_narrow(old: pa.DataType, new: pa.DataType) -> None:
    narrow, wide = schema(pa.field("v", old)), schema(pa.field("v", new))
    assert narrow.merged(wide) == wide
    assert wide.merged(narrow) == wide


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int64(), pa.string()),
        (pa.int64(), pa.float64()),
        (pa.uint64(), pa.int64()),
        (pa.int32(), pa.uint64()),
        (pa.decimal128(10, 2), pa.decimal128(10, 4)),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.string(), pa.binary()),
        (pa.list_(pa.int64()), pa.int64()),
        (pa.list_(pa.int64()), pa.list_(pa.string())),
        (pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())),
    ],
    ids=str,
)
def test_other_changes_of_a_type_are_refused_with_both_types(
    old: pa.DataType, new: pa.DataType
) -> None:
    with pytest.raises(SchemaIncompatibleError, match="'v") as caught:
        schema(pa.field("v", old)).merged(schema(pa.field("v", new)))
    assert caught.value.column.startswith("v")


def test_added_columns_come_last_and_dropped_ones_stay() -> None:
    old = schema(pa.field("a", pa.string(), nullable=False), pa.field("b", pa.string()))
    new = schema(pa.field("c", pa.string()), pa.field("b", pa.string()))
    merged = old.merged(new)
    assert merged.names == ["id", "a", "b", "c"]
    assert merged.arrow.field("a").nullable
    assert merged.merged(new) == merged


def test_structs_evolve_as_tables_do() -> None:
    old = schema(pa.field("s", pa.struct([pa.field("a", pa.int32(), nullable=False)])))
    new = schema(pa.field("s", pa.struct([pa.field("b", pa.int32())])))
    merged = old.merged(new).arrow.field("s").type
    assert merged == pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.int32())])
    required = schema(pa.field("s", pa.struct([pa.field("b", pa.int32(), nullable=False)])))
    with pytest.raises(SchemaIncompatibleError, match=r"s\.b"):
        old.merged(required)


def test_an_added_column_without_nulls_is_refused() -> None:
    with pytest.raises(SchemaIncompatibleError, match="nullable"):
        schema().merged(schema(pa.field("a", pa.int64(), nullable=False)))


def test_keys_never_change() -> None:
    two = [ID, pa.field("a", pa.int64())]
    with pytest.raises(SchemaIncompatibleError, match="key"):
        TableSchema.of(two, ["id"]).merged(TableSchema.of(two, ["id", "a"]))
