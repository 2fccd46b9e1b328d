"""Debezium's records, as its connectors write them."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamfold.snapshotter.decoding import DebeziumDecoder, Decoded, parse_ddl
from streamfold.testing.change_decoder_kit import records

GOLDEN = Path(__file__).parents[1] / "golden"
PEOPLE = parse_ddl(
    "id INT NOT NULL, name STRING, price DECIMAL(10,2), born DATE, made TIMESTAMP_NTZ, woke TIME, "
    "seen TIMESTAMP, photo BINARY",
    ["id"],
)
DECODER = DebeziumDecoder(("id",))
ADA = {
    "id": 1,
    "name": "Ada",
    "price": Decimal("12.50"),
    "born": dt.date(1815, 12, 10),
    "made": dt.datetime(2025, 12, 31, 12, 0),
    "woke": dt.time(7, 0),
    "seen": dt.datetime(2026, 1, 31, 12, 0, tzinfo=dt.UTC),
    "photo": b"photo",
}


def samples() -> list[tuple[str, bytes]]:
    lines = (GOLDEN / "debezium.jsonl").read_text().splitlines()
    return [(s["name"], json.dumps(s["record"]).encode()) for s in map(json.loads, lines)]


def with_schema() -> Any:
    return json.loads((GOLDEN / "debezium_with_schema.json").read_text())


@pytest.fixture(scope="module")
def found() -> Decoded:
    return DECODER.decode(records([body for _, body in samples()]), PEOPLE)


def changes_of(found: Decoded, name: str) -> list[dict[str, Any]]:
    seq_num = [sample for sample, _ in samples()].index(name)
    return [c for c in found.changes.to_pylist() if c["seq_num"] == seq_num]


def test_rows_come_typed_and_without_what_the_source_says_about_itself(found: Decoded) -> None:
    (change,) = changes_of(found, "insert of Postgres, no schema")
    assert (change["op"], change["key"], change["after"]) == ("insert", {"id": 1}, ADA)
    assert found.schema == PEOPLE


def test_the_first_copy_is_read(found: Decoded) -> None:
    (change,) = changes_of(found, "first copy")
    assert change["op"] == "read"


def test_values_that_were_not_sent_are_unchanged(found: Decoded) -> None:
    (change,) = changes_of(found, "update with values that the database did not send")
    assert change["unchanged"] == ["photo", "price"]
    assert change["after"] == ADA | {"name": "Ada L.", "photo": None, "price": None}


def test_values_that_were_not_sent_are_taken_from_the_row_before(found: Decoded) -> None:
    (change,) = changes_of(found, "update with the whole row before it")
    assert change["unchanged"] == []
    assert (change["after"]["price"], change["after"]["name"]) == (Decimal("3.00"), "Rob")


def test_a_delete_names_its_row(found: Decoded) -> None:
    (change,) = changes_of(found, "delete with the key alone")
    assert (change["op"], change["key"], change["after"]) == ("delete", {"id": 2}, None)


def test_a_truncate_is_one(found: Decoded) -> None:
    (change,) = changes_of(found, "truncate")
    assert (change["op"], change["key"]) == ("truncate", None)


def test_a_key_change_is_two_changes(found: Decoded) -> None:
    changes = changes_of(found, "key change in one record")
    assert [(c["op"], c["key"]) for c in changes] == [("delete", {"id": 1}), ("insert", {"id": 5})]


def test_transactions_are_those_of_the_connector_or_of_the_database(found: Decoded) -> None:
    (update,) = changes_of(found, "update with values that the database did not send")
    (delete,) = changes_of(found, "delete with the key alone")
    assert (update["txn"], delete["txn"]) == ("772:24023130", "774")


def test_tombstones_markers_and_messages_are_ignored_and_the_rest_is_not(found: Decoded) -> None:
    assert found.ignored == 3
    (letter,) = found.dead_letters.to_pylist()
    assert letter["body"] == dict(samples())["a change of the schema"]
    assert "op" in letter["reason"]


@pytest.mark.parametrize("body", [b"", b"null", b" null ", b'{"schema":null,"payload":null}'])
def test_every_form_of_a_tombstone_is_ignored(body: bytes) -> None:
    found = DECODER.decode(records([body]), PEOPLE)
    assert (found.ignored, len(found.changes), len(found.dead_letters)) == (1, 0, 0)


def test_a_schema_beside_the_payload_teaches_the_exact_types() -> None:
    found = DECODER.decode(records([json.dumps(with_schema()).encode()]), None)
    assert found.schema is not None
    assert dict(zip(found.schema.names, found.schema.arrow.types, strict=True)) == {
        "id": pa.int32(),
        "name": pa.string(),
        "price": pa.decimal128(10, 2),
        "born": pa.date32(),
        "made": pa.timestamp("us"),
        "woke": pa.time64("us"),
        "seen": pa.timestamp("us", "UTC"),
        "ratio": pa.float32(),
        "photo": pa.binary(),
    }
    (change,) = found.changes.to_pylist()
    made, woke = dt.datetime(2025, 12, 31, 12, 0, 0, 123000), dt.time(7, 0, 0, 1)
    assert change["after"] == ADA | {"ratio": 0.5, "made": made, "woke": woke}


def test_the_same_payload_with_and_without_schema_is_the_same_change() -> None:
    wrapped = with_schema()
    columns = wrapped["schema"]["fields"][1]["fields"]
    columns[:] = [column for column in columns if column["field"] != "ratio"]
    del wrapped["payload"]["after"]["ratio"]
    bare = dict(wrapped["payload"])
    bare["after"] = bare["after"] | {"price": "12.50", "made": 1767182400123000}
    bodies = [json.dumps(body).encode() for body in (wrapped, bare)]
    left, right = (DECODER.decode(records([body]), PEOPLE).changes for body in bodies)
    assert left == right


@pytest.mark.parametrize(("unit", "factor"), [("ms", 1000), ("us", 1)])
def test_times_count_in_the_unit_that_is_configured(unit: str, factor: int) -> None:
    schema = parse_ddl("id INT NOT NULL, made TIMESTAMP_NTZ, woke TIME", ["id"])
    micros = 1767182400000000
    after = {"id": 1, "made": micros // factor, "woke": 25200000000 // factor}
    body = json.dumps({"op": "c", "after": after}).encode()
    decoder = DebeziumDecoder(("id",), time_unit=unit)
    careful = json.dumps({"op": "c", "after": after | {"id": 2, "new": 1}}).encode()
    for bodies in ([body], [body, careful]):
        change = decoder.decode(records(bodies), schema).changes.to_pylist()[0]
        assert change["after"]["made"] == dt.datetime(2025, 12, 31, 12, 0)
        assert change["after"]["woke"] == dt.time(7, 0)


@pytest.mark.parametrize("column", ["woke", "made"])
def test_a_time_that_its_column_would_round_is_refused(column: str) -> None:
    decoder = DebeziumDecoder(("id",), "dead_letter", time_unit="ns")
    bodies = [
        json.dumps({"op": "c", "after": {"id": number, column: value}}).encode()
        for number, value in enumerate((7_000_000_001_000, 7_000_000_001_001))
    ]
    found = decoder.decode(records(bodies), PEOPLE)
    assert [change["after"]["id"] for change in found.changes.to_pylist()] == [0]
    [letter] = found.dead_letters.to_pylist()
    assert "7000000001001 ns is not a whole number of us" in letter["reason"]


def test_what_numbers_mean_may_change_in_the_middle_of_a_batch() -> None:
    millis, micros = with_schema(), with_schema()
    columns = micros["schema"]["fields"][1]["fields"]
    columns[4]["name"] = "io.debezium.time.MicroTimestamp"
    micros["payload"]["after"] |= {"made": 1767182400123000, "more": 1}
    columns.append({"type": "int16", "field": "more"})
    bodies = [json.dumps(body).encode() for body in (millis, micros, millis)]
    found = DECODER.decode(records(bodies), None)
    made = {change["after"]["made"] for change in found.changes.to_pylist()}
    assert made == {dt.datetime(2025, 12, 31, 12, 0, 0, 123000)}
    assert [change["after"]["more"] for change in found.changes.to_pylist()] == [None, 1, None]


def test_lists_that_were_not_sent_are_unchanged() -> None:
    schema = parse_ddl("id INT NOT NULL, tags ARRAY<STRING>", ["id"])
    body = json.dumps({"op": "u", "after": {"id": 1, "tags": ["__debezium_unavailable_value"]}})
    (change,) = DECODER.decode(records([body.encode()]), schema).changes.to_pylist()
    assert (change["unchanged"], change["after"]["tags"]) == (["tags"], None)


def test_decimals_without_a_scale_of_their_own_are_read() -> None:
    price = {"scale": 3, "value": "BOI="}
    body = json.dumps({"op": "c", "after": {"id": 1, "price": price}}).encode()
    schema = parse_ddl("id INT NOT NULL, price DECIMAL(10,3)", ["id"])
    (change,) = DECODER.decode(records([body]), schema).changes.to_pylist()
    assert change["after"]["price"] == Decimal("1.250")


def declaring(columns: list[dict[str, Any]], after: dict[str, Any]) -> bytes:
    """A record as the connector for PostgreSQL writes it, with its schema."""
    images = [
        {"type": "struct", "optional": True, "name": f"db.public.t.{name}", "field": image}
        | {"fields": columns}
        for image, name in (("before", "Value"), ("after", "Value"))
    ]
    operation = {"type": "string", "optional": False, "field": "op"}
    schema = {"type": "struct", "name": "db.public.t.Envelope", "fields": [*images, operation]}
    payload = {"before": None, "after": after, "op": "c", "ts_ms": 1, "source": {"txId": 7}}
    return json.dumps({"schema": schema, "payload": payload}).encode()


VARIABLE = {
    "type": "struct",
    "name": "io.debezium.data.VariableScaleDecimal",
    "fields": [{"type": "int32", "field": "scale"}, {"type": "bytes", "field": "value"}],
}
DECLARED: dict[str, tuple[dict[str, Any], pa.DataType]] = {
    "whole": ({"type": "int64"}, pa.int64()),
    "text": ({"type": "string"}, pa.string()),
    "yes": ({"type": "boolean"}, pa.bool_()),
    "cents": (
        {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}
        | {"parameters": {"scale": "2", "connect.decimal.precision": "12"}},
        pa.decimal128(12, 2),
    ),
    "loose": (VARIABLE, pa.decimal128(38, 18)),
    "day": ({"type": "int32", "name": "io.debezium.time.Date"}, pa.date32()),
    "at": ({"type": "int64", "name": "io.debezium.time.MicroTimestamp"}, pa.timestamp("us")),
    "tags": ({"type": "array", "items": {"type": "string"}}, pa.list_(pa.string())),
    "point": (
        {"type": "struct", "fields": [{"type": "double", "field": "x"}]},
        pa.struct([("x", pa.float64())]),
    ),
    "pairs": (
        {"type": "map", "keys": {"type": "string"}, "values": {"type": "string"}},
        pa.map_(pa.string(), pa.string()),
    ),
    "unheard": ({"type": "novelty"}, pa.null()),
}


def test_a_declared_column_has_its_declared_type_though_every_value_is_null() -> None:
    columns = [{"type": "int32", "optional": False, "field": "id"}]
    columns += [kind | {"optional": True, "field": name} for name, (kind, _) in DECLARED.items()]
    after = {"id": 1} | dict.fromkeys(DECLARED)
    found = DECODER.decode(records([declaring(columns, after)]), None)
    assert found.schema is not None
    types = dict(zip(found.schema.names, found.schema.arrow.types, strict=True))
    assert types == {"id": pa.int32()} | {name: kind for name, (_, kind) in DECLARED.items()}
    assert found.changes["after"].to_pylist() == [after]


def test_a_declared_column_that_comes_in_later_is_added_though_it_is_null() -> None:
    columns = [{"type": "int32", "field": "id"}, {"type": "int64", "field": "more"}]
    schema = parse_ddl("id INT NOT NULL", ["id"])
    found = DECODER.decode(records([declaring(columns, {"id": 1, "more": None})]), schema)
    assert found.schema == parse_ddl("id INT NOT NULL, more BIGINT", ["id"])


def test_a_decimal_that_brings_its_scale_is_a_decimal_and_widens_where_it_must() -> None:
    columns: list[dict[str, Any]] = [
        {"type": "int32", "field": "id"},
        VARIABLE | {"field": "loose"},
    ]
    small = {"scale": 3, "value": "BOI="}  # 1.250
    fine = {"scale": 24, "value": "AQ=="}
    bodies = [declaring(columns, {"id": n, "loose": v}) for n, v in enumerate((small, fine, None))]
    found = DECODER.decode(records(bodies), None)
    assert found.schema is not None
    assert found.schema.arrow.field("loose").type == pa.decimal256(44, 24)
    values = [change["after"]["loose"] for change in found.changes.to_pylist()]
    assert values == [Decimal("1.250"), Decimal("1E-24"), None]


def test_a_record_that_cannot_be_decoded_stops_no_table_though_its_values_do_not_fit_either() -> (
    None
):
    good = b'{"op": "c", "after": {"id": 2, "name": "Bob"}}'
    bad = b'{"op": "u", "before": {"id": 1, "na\x91e": "Ada"}, "after": {"id": 1, "born": "soon"}}'
    decoded = DECODER.decode(records([bad, good]), PEOPLE)
    assert decoded.dead_letters["seq_num"].to_pylist() == [0]
    assert decoded.changes["seq_num"].to_pylist() == [1]
