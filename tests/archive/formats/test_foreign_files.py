"""Files that others wrote, as the published format has them, with and without a schema."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats import (
    Format,
    JsonlFormat,
    ParquetFormat,
    ProtobufFormat,
    TypedProtobufFormat,
)
from streamfold.archive.formats.protobuf.published import DiffChange, SnapshotRow
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.records.protobuf import varint
from streamfold.testing.format_samples import ORDERS, changes_of, orders, table_of

USERS = TableSchema.of(
    [pa.field("active", pa.bool_()), pa.field("id", pa.int64()), pa.field("name", pa.string())],
    ["id"],
)
ROWS: list[dict[str, Any]] = [
    {"active": True, "id": 9007199254740992, "name": "a"},
    {"active": None, "id": 1_000_000, "name": "<b>"},
]
CHANGES: list[dict[str, Any]] = [
    {"action": "INSERT", "key": "5", "new": {"active": False, "id": 5, "name": "e"}},
    {"action": "TRUNCATE", "key": "<nil>"},
    {"action": "UPDATE", "key": "6", "old": {"id": 6}, "new": {"id": 6, "name": "f"}},
    {"action": "DELETE", "key": "7"},
]


def as_jsonl(objects: list[dict[str, Any]]) -> io.BytesIO:
    """As Go's encoder writes it: names sorted, <, > and & escaped; and a blank line."""
    lines = [json.dumps(item, sort_keys=True, separators=(",", ":")) for item in objects]
    text = "\n\n".join(lines).replace("<", "\\u003c").replace(">", "\\u003e")
    return io.BytesIO(text.encode())


def as_messages(kind: Any, objects: list[dict[str, Any]]) -> io.BytesIO:
    out = io.BytesIO()
    for item in objects:
        message = kind()
        for name, value in item.items():
            if isinstance(value, dict):
                getattr(message, name).update(value)
            else:
                setattr(message, name, value)
        raw = message.SerializeToString()
        out.write(varint(len(raw)) + raw)
    return out


def published_rows() -> Iterator[Any]:
    yield pytest.param(JsonlFormat(), as_jsonl(ROWS), id="jsonl")
    messages = as_messages(SnapshotRow, [{"row": row} for row in ROWS])
    yield pytest.param(ProtobufFormat(), messages, id="protobuf")


def published_changes() -> Iterator[Any]:
    yield pytest.param(JsonlFormat(), as_jsonl(CHANGES), id="jsonl")
    yield pytest.param(ProtobufFormat(), as_messages(DiffChange, CHANGES), id="protobuf")


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(("format", "source"), list(published_rows()))
def test_published_rows_read_under_a_schema(format: Format, source: io.BytesIO) -> None:  # noqa: A002
    assert rows_of(format.read_rows(source, USERS)) == ROWS


@pytest.mark.parametrize(("format", "source"), list(published_rows()))
def test_published_rows_read_without_a_schema(format: Format, source: io.BytesIO) -> None:  # noqa: A002
    found = rows_of(format.read_rows(source, None, ["id", "name", "active"]))
    assert found == ROWS
    kind = int if format.id == "jsonl" else float
    assert all(type(row["id"]) is kind for row in found)


@pytest.mark.parametrize(("format", "source"), list(published_changes()))
def test_published_changes_read_in_their_order(format: Format, source: io.BytesIO) -> None:  # noqa: A002
    insert, truncate, update, delete = rows_of(format.read_changes(source, USERS))
    assert (insert["key"], insert["after"]["name"]) == ({"id": 5}, "e")
    assert truncate == {"action": "TRUNCATE", "key": None, "before": None, "after": None}
    assert (update["before"]["name"], update["after"]["name"]) == (None, "f")
    assert (delete["key"], delete["before"]["id"]) == ({"id": 7}, 7)


@pytest.mark.parametrize(("format", "source"), list(published_changes()))
def test_published_changes_read_without_a_schema(format: Format, source: io.BytesIO) -> None:  # noqa: A002
    found = rows_of(format.read_changes(source, None))
    assert [row["action"] for row in found] == [change["action"] for change in CHANGES]
    assert [row["key"] for row in found] == [{"key": "5"}, None, {"key": "6"}, {"key": "7"}]
    assert found[0]["after"]["id"] == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [("9007199254740993", 9007199254740993), (b"-1", -1), (b"3.0", 3), (b"1e3", 1000)],
)
def test_integers_of_writers_without_integers_are_read(value: str | bytes, expected: int) -> None:
    text = value.decode() if isinstance(value, bytes) else f'"{value}"'
    source = io.BytesIO(f'{{"id":{text}}}\n'.encode())
    assert rows_of(JsonlFormat().read_rows(source, USERS))[0]["id"] == expected


@pytest.mark.parametrize(
    "line",
    [
        '{"id":1.5}',
        '{"id":"x"}',
        '{"id":true}',
        '{"id":1e300}',
        '{"id":9223372036854775808}',
        '{"id":null}',
        '{"name":"no id"}',
        '{"id":1,"unknown":1}',
        '{"id":1,"name":5}',
        '{"id":1,"active":"yes"}',
        '{"id":1,"name":{}}',
        '{"id":1',
        "[1]",
        "null",  # upstream defect 23
        "  null",
        '{"id":1}\nnull\n{"id":2}',
        '"text"',
        '{"id":1,"name":"\\ud800"}',
        pytest.param('{"id":1,"name":' + "[" * 5_000 + "]" * 5_000 + "}", id="nested deeply"),
    ],
)
def test_a_line_that_is_not_of_the_schema_is_refused(line: str) -> None:
    with pytest.raises(ArtifactCorruptError):
        list(JsonlFormat().read_rows(io.BytesIO(line.encode() + b"\n"), USERS))


def test_text_that_is_not_utf8_is_refused() -> None:
    for source in (b'{"id":1,"name":"\xff"}\n', b'{"id":1,"\xff":1}\n'):
        for schema in (USERS, None):
            with pytest.raises(ArtifactCorruptError):
                list(JsonlFormat().read_rows(io.BytesIO(source), schema))


def test_types_are_inferred_over_the_whole_file() -> None:
    lines = b"\n".join(
        [
            b'{"a":1,"t":"2024-01-01T00:00:00Z"}',
            b'{"a":null,"b":[1]}',
            b'{"a":2.5,"c":{"x":9007199254740993}}',
        ]
    )
    found = rows_of(JsonlFormat().read_rows(io.BytesIO(lines), None))
    assert [row["a"] for row in found] == [1.0, None, 2.5]
    assert found[0]["t"] == "2024-01-01T00:00:00Z"
    assert found[1]["b"] == [1]
    assert found[2]["c"] == {"x": 9007199254740993}


def test_values_that_no_type_holds_are_refused_rather_than_rounded() -> None:
    for lines in (
        b'{"a":1}\n{"a":"x"}\n',
        b'{"a":18446744073709551616}\n',
        b'{"a":[1]}\n{"a":1}\n',
    ):
        with pytest.raises(ArtifactCorruptError, match="schema"):
            list(JsonlFormat().read_rows(io.BytesIO(lines), None))


def test_unknown_actions_are_refused() -> None:
    for schema in (USERS, None):
        with pytest.raises(ArtifactCorruptError, match="UPSERT"):
            list(JsonlFormat().read_changes(as_jsonl([{"action": "UPSERT", "key": "1"}]), schema))


@pytest.mark.parametrize("format", [ParquetFormat(), TypedProtobufFormat()], ids=lambda f: f.id)
def test_files_that_say_their_schema_need_none(format: Format) -> None:  # noqa: A002
    kind = pa.timestamp("ns", "Europe/Paris")  # a zone that Parquet itself has no word for
    schema, rows = table_of(kind, [0, 1])
    sink = io.BytesIO()
    format.write_rows(sink, schema, [rows])
    (batch,) = format.read_rows(sink, None)
    assert batch.schema == schema.arrow
    assert batch.equals(rows)
    sink = io.BytesIO()
    format.write_changes(sink, schema, [changes_of(schema, rows)])
    (batch,) = format.read_changes(sink, None)
    assert batch.schema == schema.changes
    assert batch.equals(changes_of(schema, rows))


def test_parquet_of_other_writers_is_read() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2], "name": pa.array(["a", None], pa.large_string())}), sink)
    assert rows_of(ParquetFormat().read_rows(sink, None)) == [
        {"id": 1, "name": "a"},
        {"id": 2, "name": None},
    ]
    assert rows_of(ParquetFormat().read_rows(sink, USERS, ["id"])) == [{"id": 1}, {"id": 2}]
    with pytest.raises(InvalidError, match="schema"):
        list(ParquetFormat().read_changes(sink, None))
    with pytest.raises(ArtifactCorruptError, match=r"lacks the columns .*'action'"):
        list(ParquetFormat().read_changes(sink, USERS))


def test_the_two_kinds_of_protobuf_are_never_mistaken_for_each_other() -> None:
    plain, typed = io.BytesIO(), io.BytesIO()
    ProtobufFormat().write_rows(plain, ORDERS, [orders(10)])
    TypedProtobufFormat().write_rows(typed, ORDERS, [orders(10)])
    for schema in (ORDERS, None):
        with pytest.raises(ArtifactCorruptError):
            list(ProtobufFormat().read_rows(typed, schema))
        with pytest.raises(ArtifactCorruptError):
            list(TypedProtobufFormat().read_rows(plain, schema))


def test_a_base_is_not_a_diff() -> None:
    for format in (JsonlFormat(), ProtobufFormat(), TypedProtobufFormat(), ParquetFormat()):  # noqa: A001
        sink = io.BytesIO()
        format.write_rows(sink, ORDERS, [orders(10)])
        with pytest.raises(ArtifactCorruptError):
            list(format.read_changes(sink, ORDERS))
