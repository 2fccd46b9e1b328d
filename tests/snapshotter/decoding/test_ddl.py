from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.snapshotter.decoding import parse_ddl

UTC = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("BOOLEAN", pa.bool_()), ("tinyint", pa.int8()), ("SmallInt", pa.int16()), ("INT", pa.int32()),
        ("BIGINT", pa.int64()), ("FLOAT", pa.float32()), ("DOUBLE", pa.float64()),
        ("STRING", pa.string()), ("VARCHAR(20)", pa.string()), ("BINARY", pa.binary()),
        ("DATE", pa.date32()),
        ("TIME", pa.time64("us")), ("TIMESTAMP", UTC), ("TIMESTAMP_NTZ", pa.timestamp("us")),
        ("DECIMAL", pa.decimal128(10, 0)), ("DECIMAL(5)", pa.decimal128(5, 0)),
        ("NUMERIC(12, 2)", pa.decimal128(12, 2)), ("DECIMAL(50,2)", pa.decimal256(50, 2)),
        ("ARRAY<INT>", pa.list_(pa.field("item", pa.int32()))),
        ("MAP<STRING, DATE>", pa.map_(pa.string(), pa.date32())),
        ("STRUCT<x: INT, `y z` ARRAY<STRING> NOT NULL>", pa.struct([
            pa.field("x", pa.int32()),
            pa.field("y z", pa.list_(pa.field("item", pa.string())), nullable=False),
        ])),
    ],
)  # fmt: skip
def test_types_are_those_of_spark(text: str, kind: pa.DataType) -> None:
    schema = parse_ddl(f"id BIGINT NOT NULL, it {text}", ["id"])
    assert schema.arrow.field("it").type == kind
    assert schema.arrow.field("it").nullable
    assert not schema.arrow.field("id").nullable


def test_names_in_quotes_may_hold_anything() -> None:
    assert parse_ddl('`a``b` INT, "c ""d" INT, `NOT` INT, date DATE').names == [
        "a`b",
        'c "d',
        "NOT",
        "date",
    ]


def test_a_key_is_never_null() -> None:
    assert not parse_ddl("id INT", ["id"]).arrow.field("id").nullable


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("", "''", "name of a column"),
        ("id", "'id'", "expected a type"),
        ("id BIGNT", "'id BIGNT'", "BIGNT is not a type"),
        ("id INT name STRING", "'id INT'", "comma or the end"),
        ("id INT,", "'id INT,'", "name of a column"),
        ("id INT NOT", "'id INT NOT'", "expected NULL"),
        ("id DECIMAL(2,3)", "DECIMAL", "not possible"),
        ("id DECIMAL(99)", "DECIMAL", "not possible"),
        ("id DECIMAL(x)", "DECIMAL", "whole number"),
        ("id ARRAY<INT", "ARRAY", "expected >"),
        ("id ARRAY INT", "ARRAY", "expected <"),
        ("id INT; DROP", "'id INT'", "';' has no meaning"),
        ("id " + "ARRAY<" * 40 + "INT" + ">" * 40, "nested", ""),
        ("id FLOAT", "key field", "float"),
        ("id INT, id INT", "repeated", ""),
        ("id MAP<INT, INT>", "keys", ""),
    ],
)
def test_anything_else_is_refused_with_its_position(text: str, position: str, what: str) -> None:
    with pytest.raises(InvalidError) as failure:
        parse_ddl(text, ["id"])
    assert position in failure.value.message
    assert what in failure.value.message


@settings(deadline=None)
@given(st.text('ab INTARYSUC<>(),:`"1;', max_size=40))
def test_any_text_is_a_schema_or_refused(text: str) -> None:
    try:
        parse_ddl(text)
    except InvalidError:
        return
