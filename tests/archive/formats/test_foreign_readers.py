"""Files of ours, read by programs that know nothing of Streamfold."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from streamfold.archive.formats import (
    FileCompression,
    Format,
    JsonlFormat,
    ParquetFormat,
    ProtobufFormat,
    TypedProtobufFormat,
)
from streamfold.archive.formats.protobuf.published import DiffChange, SnapshotRow
from streamfold.archive.schema import TableSchema
from streamfold.testing.format_samples import ORDERS, changes_of, orders

ROWS = orders(1000)
CHANGES = changes_of(ORDERS, orders(9))


def file_of(format: Format, folder: Path, changes: bool = False) -> Path:  # noqa: A002
    path = folder / f"file{format.extension}"
    with path.open("wb") as sink:
        if changes:
            format.write_changes(sink, ORDERS, [CHANGES])
        else:
            format.write_rows(sink, ORDERS, [ROWS])
    return path


def test_duckdb_reads_parquet(tmp_path: Path) -> None:
    path = file_of(ParquetFormat(), tmp_path)
    with duckdb.connect() as db:
        db.execute("set timezone = 'UTC'")
        rows = db.execute(f"select number, total, tags from '{path}' order by number").fetchall()
    assert rows == [(r["number"], r["total"], r["tags"]) for r in ROWS.to_pylist()]


def test_duckdb_reads_a_diff_in_parquet(tmp_path: Path) -> None:
    path = file_of(ParquetFormat(), tmp_path, changes=True)
    query = f"select action, key.number, before.total, after.total from '{path}'"
    with duckdb.connect() as db:
        found = db.execute(query).fetchall()
    assert found[0] == ("TRUNCATE", None, None, None)
    assert [row[:2] for row in found[1:4]] == [("INSERT", 0), ("UPDATE", 1), ("DELETE", 2)]
    assert found[2][2] == found[2][3] == CHANGES.to_pylist()[2]["after"]["total"]


def test_polars_reads_parquet(tmp_path: Path) -> None:
    frame = pl.read_parquet(file_of(ParquetFormat(), tmp_path))
    assert frame.rows(named=True) == ROWS.to_pylist()
    changes = pl.read_parquet(file_of(ParquetFormat(), tmp_path, changes=True))
    assert changes["action"].to_list() == CHANGES["action"].to_pylist()
    assert changes["key"].to_list()[1:] == CHANGES["key"].to_pylist()[1:]


def test_parquet_has_statistics_for_skipping(tmp_path: Path) -> None:
    with duckdb.connect() as db:
        path = file_of(ParquetFormat(), tmp_path)
        query = (
            "select stats_min, stats_max, compression from parquet_metadata(?) "
            "where path_in_schema = 'number'"
        )
        assert db.execute(query, [str(path)]).fetchall() == [("0", "999", "ZSTD")]


def test_parquet_names_its_schema(tmp_path: Path) -> None:
    for changes in (False, True):
        found = pq.read_metadata(file_of(ParquetFormat(), tmp_path, changes)).metadata
        assert json.loads(found[b"streamfold.schema"]) == ORDERS.to_json()
        assert found == {
            b"streamfold.schema": ORDERS.canonical_json,
            b"streamfold.schema_id": ORDERS.id.encode(),
        }


@pytest.mark.parametrize("compression", FileCompression)
def test_duckdb_and_polars_read_jsonl(tmp_path: Path, compression: FileCompression) -> None:
    path = file_of(JsonlFormat(compression), tmp_path)
    with duckdb.connect() as db:
        numbers = db.execute(f"select number, note from read_json('{path}')").fetchall()
    assert numbers == list(zip(ROWS["number"].to_pylist(), ROWS["note"].to_pylist(), strict=True))
    raw = path.read_bytes()
    if compression is FileCompression.GZIP:
        raw = gzip.decompress(raw)
    elif compression is FileCompression.ZSTD:
        raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    assert pl.read_ndjson(raw)["number"].to_list() == ROWS["number"].to_pylist()


def test_plain_python_reads_jsonl(tmp_path: Path) -> None:
    with file_of(JsonlFormat(), tmp_path).open(encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(line) for line in lines]
    expected = ROWS.to_pylist()
    assert [list(row) for row in rows] == [ORDERS.names] * len(rows)
    for row, right in zip(rows, expected, strict=True):
        assert row["note"] == right["note"]
        assert row["tags"] == right["tags"]
        assert row["total"] is None or Decimal(row["total"]) == right["total"]
        assert row["placed"] == right["placed"].strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def test_plain_python_reads_a_diff_in_jsonl(tmp_path: Path) -> None:
    text = file_of(JsonlFormat(), tmp_path, changes=True).read_text("utf-8")
    changes = [json.loads(line) for line in text.splitlines()]
    assert changes[0] == {"action": "TRUNCATE"}
    insert, update, delete = changes[1:4]
    assert list(insert) == ["action", "key", "new"]
    assert list(update) == ["action", "key", "old", "new"]
    assert list(delete) == ["action", "key", "old"]
    assert json.loads(insert["key"]) == [insert["new"]["shop"], insert["new"]["number"]]


def test_a_key_of_one_field_is_its_text_in_jsonl() -> None:
    schema = TableSchema.of([pa.field("id", pa.int64())], ["id"])
    change = {"action": "INSERT", "key": {"id": 1_000_000}, "after": {"id": 1_000_000}}
    sink = io.BytesIO()
    JsonlFormat().write_changes(
        sink, schema, [pa.RecordBatch.from_pylist([change], schema=schema.changes)]
    )
    assert sink.getvalue() == b'{"action":"INSERT","key":"1000000","new":{"id":1000000}}\n'


def messages(data: bytes) -> list[bytes]:
    """What a length-delimited file holds, split by hand."""
    found, at = [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            size |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        found.append(data[at : at + size])
        at += size
    assert at == len(data)
    return found


def test_readers_of_the_published_messages_read_protobuf(tmp_path: Path) -> None:
    data = file_of(ProtobufFormat(), tmp_path).read_bytes()
    rows = [SnapshotRow.FromString(message).row for message in messages(data)]
    assert [int(row["number"]) for row in rows] == ROWS["number"].to_pylist()
    assert [row["note"] for row in rows] == ROWS["note"].to_pylist()
    data = file_of(ProtobufFormat(), tmp_path, changes=True).read_bytes()
    changes = [DiffChange.FromString(message) for message in messages(data)]
    assert [change.action for change in changes] == CHANGES["action"].to_pylist()
    assert [c.HasField("old") for c in changes[:4]] == [False, False, True, True]
    assert [c.HasField("new") for c in changes[:4]] == [False, True, True, False]


def declared_messages() -> Any:
    """The message Frame as streamfold_archive.proto declares it, without a compiler."""
    proto = resources.files("streamfold.archive.formats") / "streamfold_archive.proto"
    text = re.sub(r"//.*", "", proto.read_text("utf-8"))
    file = descriptor_pb2.FileDescriptorProto(
        name="x.proto", package="streamfold.archive.v1", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, body in re.findall(r"message (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", text):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body):
            declared = message.field.add(name=field, number=int(number))
            declared.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind[0].isupper():
                declared.type = kinds.TYPE_MESSAGE
                declared.type_name = f".streamfold.archive.v1.{kind}"
            else:
                declared.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("streamfold.archive.v1.Frame")
    )


def test_generated_protobuf_code_reads_typed_files(tmp_path: Path) -> None:
    frame = declared_messages()
    data = file_of(TypedProtobufFormat(), tmp_path).read_bytes()
    first, batch, last = [frame.FromString(message) for message in messages(data)]
    assert json.loads(first.header.schema) == ORDERS.to_json()
    assert (first.header.version, first.header.kind) == (1, "rows")
    assert batch.crc32 == zlib.crc32(batch.batch.SerializeToString(deterministic=True))
    assert last.end.rows == batch.batch.rows == len(ROWS)
    shop, number, placed, total, note, tags = batch.batch.columns
    assert list(number.longs) == ROWS["number"].to_pylist()
    assert list(placed.longs) == ROWS["placed"].cast(pa.int64()).to_pylist()
    assert shop.data.decode() == "".join(ROWS["shop"].to_pylist())
    assert list(note.lengths) == [len(text or "") for text in ROWS["note"].to_pylist()]
    unscaled = int.from_bytes(total.data[16:32], "little", signed=True)
    assert Decimal(unscaled).scaleb(-2) == ROWS["total"][1].as_py()
    assert list(tags.lengths) == [len(value or ()) for value in ROWS["tags"].to_pylist()]
    valid = [note.validity[row // 8] >> row % 8 & 1 for row in range(len(ROWS))]
    assert valid == [text is not None for text in ROWS["note"].to_pylist()]
