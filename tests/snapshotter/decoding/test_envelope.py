"""The rules of the envelope, one by one."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding import DEAD_LETTER, Decoded, EnvelopeDecoder, parse_ddl
from streamfold.testing.change_decoder_kit import records

PEOPLE = parse_ddl("id BIGINT NOT NULL, name STRING, score INT, price DECIMAL(6,2)", ["id"])
DECODER = EnvelopeDecoder(("id",))


def decode(*changes: Any, schema: TableSchema | None = PEOPLE, **options: Any) -> Decoded:
    decoder = EnvelopeDecoder(("id",), **options)
    bodies = [c if isinstance(c, bytes) else json.dumps(c).encode() for c in changes]
    return decoder.decode(records(bodies), schema)


def brief(found: Decoded) -> list[tuple[Any, ...]]:
    rows = found.changes.to_pylist()
    return [(r["seq_num"], r["op"], (r["key"] or {}).get("id"), r["after"]) for r in rows]


def row(number: int, name: str | None = None) -> dict[str, Any]:
    return {"id": number, "name": name, "score": None, "price": None}


def test_every_letter_is_an_op() -> None:
    found = decode(
        {"op": "c", "after": {"id": 1, "name": "a"}},
        {"op": "u", "after": {"id": 1, "name": "b"}},
        {"op": "r", "after": {"id": 2}},
        {"op": "d", "key": {"id": 1}},
        {"op": "t"},
    )
    assert brief(found) == [
        (0, "insert", 1, row(1, "a")),
        (1, "update", 1, row(1, "b")),
        (2, "read", 2, row(2)),
        (3, "delete", 1, None),
        (4, "truncate", None, None),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": "c"}, "no row after"),
        ({"op": "u", "key": {"id": 1}}, "no row after"),
        ({"op": "d"}, "without a row"),
        ({"op": "d", "key": {"id": 1}, "after": {"id": 1}}, "row after it"),
        ({"op": "t", "key": {"id": 1}}, "names a row"),
        ({"op": "x", "after": {"id": 1}}, "op"),
        ({"after": {"id": 1}}, "op"),
        ({"op": "c", "after": {"name": "a"}}, "key field"),
        ({"op": "c", "after": {"id": None}}, "key field"),
        ({"op": "c", "after": [1]}, "object"),
        ({"op": "c", "afterr": {"id": 1}, "after": {"id": 1}}, "afterr"),
        ({"op": "c", "key": {"id": 2}, "after": {"id": 1}}, "key"),
        ({"op": "u", "key": {"id": 2}, "before": {"id": 1}, "after": {"id": 2}}, "key"),
        ({"op": "d", "key": {"id": 1, "name": "a"}}, "key has fields"),
        ({"op": "d", "key": 1}, "object"),
    ],
)
def test_a_change_that_breaks_a_rule_is_a_dead_letter(change: Any, reason: str) -> None:
    found = decode(change, {"op": "c", "after": {"id": 5}})
    letters = found.dead_letters.to_pylist()
    assert [letter["seq_num"] for letter in letters] == [0]
    assert reason in letters[0]["reason"]
    assert letters[0]["body"] == json.dumps(change).encode()
    assert brief(found) == [(1, "insert", 5, row(5))]


def test_a_changed_key_is_a_delete_of_the_old_one_and_an_insert_of_the_new_one() -> None:
    found = decode(
        {"op": "c", "after": {"id": 9}},
        {"op": "u", "key": {"id": 1}, "after": {"id": 2, "name": "a"}},
        {"op": "u", "before": {"id": 2, "name": "a"}, "after": {"id": 3, "name": "a"}},
        {"op": "d", "key": {"id": 9}},
    )
    assert brief(found) == [
        (0, "insert", 9, row(9)),
        (1, "delete", 1, None),
        (1, "insert", 2, row(2, "a")),
        (2, "delete", 2, None),
        (2, "insert", 3, row(3, "a")),
        (3, "delete", 9, None),
    ]
    assert found.changes["before"].to_pylist()[3] == row(2, "a")
    assert found.changes["before"].to_pylist()[4] is None


def test_key_fields_that_the_row_leaves_out_come_from_the_key() -> None:
    found = decode({"op": "u", "key": {"id": 4}, "after": {"name": "a"}})
    assert brief(found) == [(0, "update", 4, row(4, "a"))]


def test_unchanged_columns_are_named_and_hold_nothing() -> None:
    found = decode(
        {"op": "u", "after": {"id": 1, "score": 5}, "unchanged": ["name", "price", "id"]}
    )
    assert found.changes["unchanged"].to_pylist() == [["name", "price"]]
    assert brief(found)[0][3] == {"id": 1, "name": None, "score": 5, "price": None}


def test_unchanged_columns_that_the_row_before_shows_are_taken_from_it() -> None:
    found = decode(
        {
            "op": "u",
            "before": {"id": 1, "name": "a"},
            "after": {"id": 1},
            "unchanged": ["name", "price"],
        }
    )
    assert found.changes["unchanged"].to_pylist() == [["price"]]
    assert brief(found)[0][3] == row(1, "a")


def test_a_changed_key_without_the_unchanged_columns_is_a_dead_letter() -> None:
    moved = {"op": "u", "key": {"id": 1}, "after": {"id": 2}, "unchanged": ["name"]}
    found = decode(moved, {"op": "c", "after": {"id": 5}})
    assert brief(found) == [(1, "insert", 5, row(5))]
    assert "key changed" in found.dead_letters["reason"][0].as_py()


def test_transactions_are_text() -> None:
    found = decode(
        {"op": "t", "txn": 7}, {"op": "t", "txn": "b"}, {"op": "t"}, {"op": "t", "txn": None}
    )
    assert found.changes["txn"].to_pylist() == ["7", "b", None, None]


def test_numbers_keep_every_digit() -> None:
    body = b'{"op":"c","after":{"id":9007199254740993,"price":1234.56}}'
    learned = b'{"op":"c","after":{"id":1,"price":0.10,"new":1}}'  # read value by value
    found = decode(body, learned)
    prices = [change[3]["price"] for change in brief(found)]
    assert prices == [Decimal("1234.56"), Decimal("0.10")]
    assert brief(found)[0][2] == 9007199254740993


@pytest.mark.parametrize(
    ("ddl", "value", "kind"),
    [
        ("score INT", 2**40, pa.int64()),
        ("score TINYINT", 200, pa.int16()),
        ("price DECIMAL(4,2)", "123456.789", pa.decimal128(9, 3)),
        ("price DECIMAL(38,2)", "1.123", pa.decimal256(39, 3)),
        ("tags ARRAY<INT>", [2**40], pa.list_(pa.int64())),
        (
            "place STRUCT<x: INT>",
            {"x": 1, "y": "n"},
            pa.struct([("x", pa.int32()), ("y", "string")]),
        ),
    ],
)
def test_types_widen_as_far_as_values_ask(ddl: str, value: Any, kind: pa.DataType) -> None:
    schema = parse_ddl(f"id BIGINT NOT NULL, {ddl}", ["id"])
    name = schema.names[1]
    found = decode({"op": "c", "after": {"id": 1, name: value}}, schema=schema)
    assert found.schema is not None
    assert found.schema.arrow.field(name).type == kind
    assert found.schema == schema.merged(found.schema)


def test_a_null_where_none_was_allowed_makes_the_column_nullable() -> None:
    schema = parse_ddl("id BIGINT NOT NULL, name STRING NOT NULL", ["id"])
    kept = decode({"op": "u", "after": {"id": 1}, "unchanged": ["name"]}, schema=schema)
    assert kept.schema == schema
    found = decode({"op": "c", "after": {"id": 1}}, schema=schema)
    assert found.schema is not None
    assert found.schema.arrow.field("name").nullable


def test_columns_are_learned_from_what_they_hold_and_nothing_is_guessed_from_text() -> None:
    values = {
        "id": 1, "flag": True, "many": 2**63, "ratio": 0.5, "day": "2026-01-31", "tags": ["a"],
        "place": {"x": 1.5}, "nothing": None, "empty": [],
    }  # fmt: skip
    found = decode({"op": "c", "after": values}, schema=None)
    assert found.schema is not None
    assert dict(zip(found.schema.names, found.schema.arrow.types, strict=True)) == {
        "id": pa.int64(), "flag": pa.bool_(), "many": pa.uint64(), "ratio": pa.float64(),
        "day": pa.string(), "tags": pa.list_(pa.field("item", pa.string())),
        "place": pa.struct([("x", pa.float64())]), "nothing": pa.null(),
        "empty": pa.list_(pa.null()),
    }  # fmt: skip


def test_a_truncate_needs_no_schema() -> None:
    found = decode({"op": "t"}, schema=None)
    assert found.schema is None
    assert found.changes["op"].to_pylist() == ["truncate"]


def test_every_column_that_does_not_fit_is_named() -> None:
    with pytest.raises(SchemaIncompatibleError) as failure:
        decode(
            {"op": "c", "after": {"id": 1, "name": "a"}},
            {"op": "c", "after": {"id": 2, "name": 5}},
            {"op": "u", "after": {"id": 3, "score": "many", "price": [1]}},
        )
    for part in ("record 1", "name", "score", "price", "dead letters"):
        assert part in failure.value.message


def test_records_that_do_not_fit_become_dead_letters_where_that_is_wanted() -> None:
    found = decode(
        {"op": "c", "after": {"id": 1, "name": "a"}},
        {"op": "c", "after": {"id": 2, "name": 5}},
        {"op": "c", "after": {"id": 3, "new": 1}},
        {"op": "c", "after": {"id": 4, "new": "one"}},
        mismatch=DEAD_LETTER,
    )
    assert found.changes["seq_num"].to_pylist() == [0, 2]
    assert found.dead_letters["seq_num"].to_pylist() == [1, 3]
    assert "name" in found.dead_letters["reason"][0].as_py()


def test_numbers_that_no_column_holds_do_not_fill_the_memory() -> None:
    found = decode(b'{"op":"c","after":{"id":1,"price":1e999999999}}')
    assert found.dead_letters["seq_num"].to_pylist() == [0]
    with pytest.raises(SchemaIncompatibleError, match="score"):
        decode(b'{"op":"c","after":{"id":1,"score":1e300}}')


@pytest.mark.parametrize("depth", [40, 900, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_values_nested_too_deep_are_dead_letters(
    depth: int, opening: bytes, closing: bytes
) -> None:
    deep = opening * depth + b"1" + closing * depth
    body = b'{"op":"c","after":{"id":1,"new":' + deep + b"}}"
    found = decode(body, {"op": "c", "after": {"id": 2}})
    assert found.dead_letters["seq_num"].to_pylist() == [0]
    assert found.schema == PEOPLE


def test_a_column_without_a_name_does_not_fit() -> None:
    with pytest.raises(SchemaIncompatibleError, match="not columns"):
        decode({"op": "c", "after": {"id": 1, "": 5}})
    found = decode({"op": "c", "after": {"id": 1, "o": {"": 1}}}, mismatch=DEAD_LETTER)
    assert found.dead_letters["seq_num"].to_pylist() == [0]


def test_a_dead_letter_does_not_make_a_column_nullable() -> None:
    schema = parse_ddl("id BIGINT NOT NULL, name STRING NOT NULL", ["id"])
    found = decode({"op": "c", "after": {"id": None}}, schema=schema)
    assert found.schema == schema


def test_a_slice_of_a_batch_is_decoded_like_a_batch() -> None:
    bodies = [json.dumps({"op": "c", "after": {"id": n}}).encode() for n in range(4)]
    command = [{"name": b"", "value": b"fence"}]
    batch = records(bodies, headers=[command, [], command, []])
    for start in range(4):
        found = DECODER.decode(batch.slice(start), PEOPLE)
        assert found.changes["seq_num"].to_pylist() == [n for n in (1, 3) if n >= start]


def test_a_schema_of_another_key_is_refused() -> None:
    with pytest.raises(Exception, match="key fields"):
        decode({"op": "t"}, schema=parse_ddl("id INT, other INT NOT NULL", ["other"]))


WIDE = parse_ddl(
    "id BIGINT NOT NULL, i SMALLINT, f DOUBLE, s STRING, b BOOLEAN, p DECIMAL(20,4), t TIMESTAMP, "
    "n TIMESTAMP_NTZ, d DATE, raw BINARY, l ARRAY<STRING>, o STRUCT<x: BIGINT, y: STRING>",
    ["id"],
)
ROWS = st.fixed_dictionaries(
    {"id": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "i": st.none() | st.integers(-(2**15), 2**15 - 1),
        "f": st.floats(allow_nan=False, allow_infinity=False),
        "s": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        "b": st.booleans(),
        "p": st.decimals(-(10**15), 10**15, places=4).map(str),
        "t": st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        "n": st.datetimes().map(lambda moment: moment.isoformat()),
        "d": st.dates().map(lambda day: day.isoformat()),
        "raw": st.sampled_from(["", "AA==", "aGVsbG8="]),
        "l": st.none() | st.lists(st.none() | st.text("ab")),
        "o": st.none()
        | st.fixed_dictionaries({}, optional={"x": st.integers(0, 9), "y": st.none()}),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=12))
def test_the_quick_way_and_the_careful_way_give_the_same_columns(
    rows: list[dict[str, Any]],
) -> None:
    changes = [{"op": "c", "after": row} for row in rows]
    quick = decode(*changes, schema=WIDE).changes
    # One new column, and everything is read value by value.
    careful = decode(*changes, {"op": "c", "after": {"id": 1, "new": 1}}, schema=WIDE).changes
    assert quick["key"].to_pylist() == careful["key"].to_pylist()[:-1]
    for name in WIDE.names:
        left, right = (t["after"].combine_chunks().field(name) for t in (quick, careful))
        assert left.equals(right.slice(0, len(rows))), name


@pytest.mark.parametrize("schema", [None, parse_ddl("id BIGINT NOT NULL", ["id"])])
@pytest.mark.parametrize(
    ("empty", "kind", "later", "grown"),
    [
        (None, pa.null(), 5, pa.int64()),
        (None, pa.null(), "text", pa.string()),
        (None, pa.null(), [1], pa.list_(pa.int64())),
        ({}, pa.null(), {"a": True}, pa.struct([("a", pa.bool_())])),
        ([], pa.list_(pa.null()), [["x"]], pa.list_(pa.list_(pa.string()))),
        ({"a": None}, pa.struct([("a", pa.null())]), {"a": 1}, pa.struct([("a", pa.int64())])),
    ],
    ids=str,
)
def test_a_column_that_was_seen_exists_and_takes_the_type_of_its_first_value(
    schema: TableSchema | None, empty: Any, kind: pa.DataType, later: Any, grown: pa.DataType
) -> None:
    found = decode({"op": "c", "after": {"id": 1, "seen": empty}}, schema=schema)
    assert found.schema is not None
    assert found.schema.arrow.field("seen").type == kind
    # An object without members counts as null until it shows one.
    assert brief(found) == [
        (0, "insert", 1, {"id": 1, "seen": empty or ([] if empty == [] else None)})
    ]
    more = decode(
        {"op": "c", "after": {"id": 2, "seen": later}},
        {"op": "c", "after": {"id": 3, "seen": empty}},
        schema=found.schema,
    )
    assert more.schema is not None
    assert more.schema.arrow.field("seen").type == grown
    assert more.changes["after"].to_pylist()[0] == {"id": 2, "seen": later}
    assert found.schema.merged(more.schema) == more.schema


def test_a_key_that_was_only_seen_as_null_makes_no_table() -> None:
    found = decode({"op": "c", "after": {"id": None, "name": "x"}}, schema=None)
    assert (found.schema, len(found.changes), len(found.dead_letters)) == (None, 0, 1)


def test_declared_columns_have_their_types_whatever_the_first_values_are() -> None:
    columns = [
        {"name": "id", "type": "BIGINT", "nullable": False, "source": "bigint"},
        {"name": "price", "type": "DECIMAL(6,2)"},
        {"name": "at", "type": "TIMESTAMP", "source": "timestamp with time zone"},
        {"name": "share", "type": "DOUBLE"},
    ]
    found = decode(
        {"op": "s", "key": ["id"], "columns": columns},
        {"op": "r", "after": {"id": 1, "price": "1.50", "at": None, "share": "NaN"}},
        {"op": "r", "after": {"id": 2, "price": None, "at": "9223372036854775807", "share": 1}},
        schema=None,
    )
    assert found.ignored == 1
    assert found.schema is not None
    types = {field.name: field.type for field in found.schema.arrow}
    assert types == {
        "id": pa.int64(),
        "price": pa.decimal128(6, 2),
        "at": pa.timestamp("us", "UTC"),
        "share": pa.float64(),
    }
    first, second = (
        change.as_py() for change in found.changes["after"].combine_chunks().field("price")
    )
    assert (first, second) == (Decimal("1.50"), None)
    infinite = found.changes["after"].combine_chunks().field("at")[1]
    assert infinite.value == 2**63 - 1


def test_a_declaration_within_a_transaction_does_not_end_it() -> None:
    transaction = {"id": "7"}
    found = decode(
        {"op": "c", "after": {"id": 1}, "txn": transaction},
        {"op": "s", "columns": [{"name": "id", "type": "BIGINT"}]},
    )
    assert (found.tail.id, found.tail.since) == ("7", 0)


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ({"op": "s"}, "must have columns"),
        ({"op": "s", "columns": [], "after": {"id": 1}}, "and no row"),
        ({"op": "s", "columns": [{"name": "id", "type": "NUMBER"}]}, "NUMBER is not a type"),
        ({"op": "s", "columns": [{"name": "id"}]}, "type"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_a_dead_letter(
    declaration: dict[str, Any], reason: str
) -> None:
    (letter,) = decode(declaration).dead_letters["reason"].to_pylist()
    assert reason in letter
