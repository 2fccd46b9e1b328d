"""Archives of other writers: the published fields and nothing else."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive import ArtifactCorruptError, TableSchema
from streamfold.archive.formats import ProtobufFormat
from streamfold.errors import InvalidError
from tests.archive.tables import SCHEMA
from tests.archive.tables import changes as typed_changes
from tests.archive.tables import rows as typed_rows

BASE, MIDDLE, HEAD = "0/1A2B000", "0/1A2B300", "0/1A2B400"
ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1_000_000, "name": None}]
FIRST_DIFF = [
    {"action": "UPDATE", "key": "1", "old": {"id": 1, "name": "a"}, "new": {"id": 1, "name": "A"}},
    {"action": "DELETE", "key": "1000000"},
]
SECOND_DIFF = [{"action": "INSERT", "key": "3", "new": {"id": 3, "name": "c", "more": 0.5}}]


def lines(objects: list[Any]) -> bytes:
    return b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in objects)


def artifact(
    folder: Path, data: bytes, start: str | None, end: str, count: int, extension: str = ".jsonl"
) -> dict[str, Any]:
    names = [position.replace("/", "_") for position in (start, end) if position]
    kind = "diff" if start else "snapshot"
    path = folder / "epoch=1" / f"{kind}-{'-'.join(names)}{extension}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    format_id = {".jsonl": "jsonl", ".pb": "protobuf"}[extension]
    uri = f"s3://a-bucket-that-is-not-here/users/{path.parent.name}/{path.name}"
    found = {
        "kind": kind,
        "epoch": 1,
        "from_position": start,
        "to_position": end,
        "created_at": "2026-06-03T12:00:00Z",
        "row_count" if start is None else "change_count": count,
        "formats": {format_id: {"uri": uri, "size_bytes": len(data)}},
    }
    return {name: value for name, value in found.items() if value != 0}


def publish(folder: Path, artifacts: list[dict[str, Any]], **more: Any) -> None:
    manifest = {
        "manifest_version": 1,
        "table": "public.users",
        "epoch": 1,
        "updated_at": "2026-06-03T18:04:05.123456789Z",
        "head_position": artifacts[-1]["to_position"],
        "artifacts": artifacts,
        **more,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    publish(
        tmp_path,
        [
            artifact(tmp_path, lines(ROWS), None, BASE, 3),
            artifact(tmp_path, lines(FIRST_DIFF), BASE, MIDDLE, 2),
            artifact(tmp_path, lines(SECOND_DIFF), MIDDLE, HEAD, 1),
        ],
    )
    return tmp_path


def sorted_rows(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: int(row["id"]))


async def test_the_minimal_manifest_is_enough_wherever_its_uris_point(folder: Path) -> None:
    archive = await streamfold.archive.open(folder)
    assert archive.schema is None
    assert archive.key_fields == ("id",)
    assert sorted_rows(await archive.table(position=BASE)) == ROWS
    assert sorted_rows(await archive.table(position="0/1A2B3FF")) == [
        {"id": 1, "name": "A"},
        {"id": 2, "name": "b"},
    ]
    assert sorted_rows(await archive.table()) == [
        {"id": 1, "name": "A", "more": None},
        {"id": 2, "name": "b", "more": None},
        {"id": 3, "name": "c", "more": 0.5},
    ]
    assert (await archive.table(columns=["name"])).column_names == ["name"]
    with pytest.raises(InvalidError, match="do not exist"):
        await archive.table(columns=["other"])


async def test_given_a_schema_types_are_the_ones_given(folder: Path) -> None:
    schema = TableSchema.of(
        pa.schema([("id", pa.int32()), ("name", pa.string()), ("more", pa.float32())]), ["id"]
    )
    archive = await streamfold.archive.open(folder, schema=schema)
    table = await archive.table()
    assert table.schema.equals(schema.arrow)
    assert [row["name"] for row in sorted_rows(table)] == ["A", "b", "c"]
    keys = [key async for item in archive.changes(BASE) for key in item.batch["key"].to_pylist()]
    assert keys == [{"id": 1}, {"id": 1_000_000}, {"id": 3}]


async def test_changes_have_typed_keys_even_without_a_schema(folder: Path) -> None:
    archive = await streamfold.archive.open(folder)
    found = [item async for item in archive.changes(BASE)]
    assert [item.to_position for item in found] == [MIDDLE, HEAD]
    assert [i.batch["key"].to_pylist() for i in found] == [
        [{"id": 1}, {"id": 1_000_000}],
        [{"id": 3}],
    ]


async def test_verification_compares_sizes_and_counts(folder: Path) -> None:
    archive = await streamfold.archive.open(folder)
    found = await archive.verify()
    assert (found.ok, found.files, found.rows, found.unhashed) == (True, 3, 6, 3)
    path = folder / "epoch=1" / "diff-0_1A2B300-0_1A2B400.jsonl"
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0,5"))
    [problem] = (await archive.verify()).problems
    assert "not JSON" in str(problem.problem)
    path.unlink()
    [problem] = (await archive.verify()).problems
    assert "is not in" in str(problem.problem)


async def test_a_count_that_is_not_the_file_s_is_corruption(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"change_count": 2', '"change_count": 3'))
    with pytest.raises(ArtifactCorruptError, match="holds 2 rows, the manifest says 3"):
        await (await streamfold.archive.open(folder)).table()


async def test_an_empty_base_and_a_truncate_need_no_columns(tmp_path: Path) -> None:
    insert = {"action": "INSERT", "key": "x", "new": {"code": "x"}}
    publish(
        tmp_path,
        [
            artifact(tmp_path, b"", None, BASE, 0),
            artifact(tmp_path, lines([{"action": "DELETE", "key": "y"}]), BASE, MIDDLE, 1),
            artifact(tmp_path, lines([{"action": "TRUNCATE"}, insert]), MIDDLE, HEAD, 2),
        ],
        columns=[{"Name": "code", "Type": "text", "PrimaryKey": True, "PrimaryKeyOrdinal": 1}],
    )
    archive = await streamfold.archive.open(tmp_path)
    assert archive.key_fields == ("code",)
    assert len(await archive.table(position=BASE)) == 0
    assert len(await archive.table(position=MIDDLE)) == 0
    assert (await archive.table()).to_pylist() == [{"code": "x"}]


async def test_key_fields_that_are_not_columns_are_reported(folder: Path) -> None:
    archive = await streamfold.archive.open(folder, key_fields=["no", "column"])
    with pytest.raises(InvalidError, match=r"'no' .* give --key .*'id', 'name'"):
        await archive.table()
    with pytest.raises(InvalidError, match="give --key"):
        await archive.verify()


async def test_published_protobuf_is_rebuilt_with_and_without_a_schema(tmp_path: Path) -> None:
    class Sink(list[bytes]):
        def write(self, data: bytes) -> None:
            self.append(bytes(data))

    base, diff, written = Sink(), Sink(), ProtobufFormat()
    written.write_rows(base, SCHEMA, typed_rows({1: "a", 2: "b"}))  # type: ignore[arg-type]
    changed = typed_changes(("DELETE", 1, None), ("UPDATE", 2, "B"))
    written.write_changes(diff, SCHEMA, changed)  # type: ignore[arg-type]
    publish(
        tmp_path,
        [
            artifact(tmp_path, b"".join(base), None, BASE, 2, ".pb"),
            artifact(tmp_path, b"".join(diff), BASE, HEAD, 2, ".pb"),
        ],
    )
    untyped = await (await streamfold.archive.open(tmp_path)).table()
    assert untyped.to_pylist() == [{"id": 2.0, "name": "B"}]
    typed = await (await streamfold.archive.open(tmp_path, schema=SCHEMA)).table()
    assert typed.to_pylist() == [{"id": 2, "name": "B"}]
    assert typed.schema.field("id").type == pa.int64()


async def test_files_that_are_elsewhere_in_the_same_storage_are_found_by_their_uri(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (folder / "epoch=1").rename(elsewhere / "epoch=1")
    path = folder / "manifest.json"
    there = elsewhere.as_uri()
    path.write_text(path.read_text().replace("s3://a-bucket-that-is-not-here/users", there))
    archive = await streamfold.archive.open(folder)
    assert len(await archive.table()) == 3


COLUMNS = {
    "id": "int8", "price": "numeric", "cents": "numeric(12,2)", "ok": "bool", "ratio": "float8",
    "name": "character varying(20)", "raw": "bytea", "day": "date", "at": "timestamp with time zone",
    "local": "timestamp", "clock": "time", "never": "int4", "doc": "jsonb",
}  # fmt: skip
#: The same row as the published writer's baseline has it, and as its stream has it.
TYPED = {
    "id": 7, "price": 12.5, "cents": 3, "ok": True, "ratio": 0.5, "name": "Ada", "raw": "aGk=",
    "day": "2026-06-03T00:00:00Z", "at": "2026-06-03T12:00:00.5Z", "local": "2026-06-03T12:00:00Z",
    "clock": "07:30:00", "never": None, "doc": {"a": [1]},
}  # fmt: skip
AS_TEXT = TYPED | {
    "id": "8", "price": "1234567890123456789.125", "cents": "3.00", "ok": "t", "ratio": "0.5",
    "raw": "\\x6869", "day": "2026-06-03", "at": "2026-06-03 12:00:00.5+00",
    "local": "2026-06-03 12:00:00", "clock": "07:30:00",
}  # fmt: skip


async def test_types_that_a_foreign_manifest_declares_are_used(tmp_path: Path) -> None:
    diff = [{"action": "INSERT", "key": "8", "new": AS_TEXT}]
    columns = [{"Name": n, "Type": t, "PrimaryKey": n == "id"} for n, t in COLUMNS.items()]
    publish(
        tmp_path,
        [
            artifact(tmp_path, lines([TYPED]), None, BASE, 1),
            artifact(tmp_path, lines(diff), BASE, HEAD, 1),
        ],
        columns=columns,
    )
    archive = await streamfold.archive.open(tmp_path)
    table = await archive.table()
    moment = datetime(2026, 6, 3, 12, 0, 0, 500_000, UTC)
    same = {
        "cents": Decimal("3.00"), "ok": True, "ratio": 0.5, "name": "Ada", "raw": b"hi",
        "day": date(2026, 6, 3), "at": moment, "local": datetime(2026, 6, 3, 12),
        "clock": time(7, 30), "never": None, "doc": {"a": [1]},
    }  # fmt: skip
    assert sorted_rows(table) == [
        {"id": 7, "price": Decimal("12.500"), **same},
        {"id": 8, "price": Decimal("1234567890123456789.125"), **same},
    ]
    assert table.schema.field("id").type == pa.int64()
    assert table.schema.field("price").type == pa.decimal128(22, 3)
    assert table.schema.field("cents").type == pa.decimal128(12, 2)
    assert table.schema.field("never").type == pa.int32()
    assert (await archive.verify()).ok


async def test_a_value_that_is_not_of_its_declared_type_is_reported_with_both(
    tmp_path: Path,
) -> None:
    publish(
        tmp_path,
        [artifact(tmp_path, lines([{"id": 1, "price": "cheap"}]), None, BASE, 1)],
        columns=[{"Name": "price", "Type": "numeric"}],
    )
    with pytest.raises(ArtifactCorruptError, match="'price' is declared as numeric"):
        await (await streamfold.archive.open(tmp_path)).table()
