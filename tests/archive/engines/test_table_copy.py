"""Copies of an archived table for Delta Lake, Iceberg and DuckDB, read back by the engines."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.table import StaticTable

import streamfold.archive
from streamfold.archive import Archive, ArtifactCorruptError, TableSchema
from streamfold.archive.engines import table_copy
from streamfold.archive.engines.column_types import EngineColumns, EngineTypes
from streamfold.archive.engines.sql import open_sql
from streamfold.archive.engines.table_copy import KINDS, copy_table
from streamfold.archive.formats import JsonlFormat
from streamfold.errors import InvalidError
from tests.archive.read.test_follower import collect
from tests.archive.reading import folder_at
from tests.archive.tables import changes, open_writer, rows

Row = dict[str, Any]

#: Types that all three engines hold.
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int8()),
        ("tiny", pa.uint8()),
        ("huge", pa.uint64()),
        ("ratio", pa.float64()),
        ("price", pa.decimal256(38, 4)),
        ("name", pa.string()),
        ("data", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "Europe/Berlin")),
        ("local", pa.timestamp("us")),
        ("flag", pa.bool_()),
        ("marks", pa.list_(pa.int32())),
        ("tags", pa.map_(pa.string(), pa.int64())),
        ("shape", pa.struct([("x", pa.int16()), ("text", pa.string())])),
    ]
)
SCHEMA = TableSchema.of(COLUMNS, ["id"])
FULL: Row = {
    "id": 1,
    "small": -128,
    "tiny": 255,
    "huge": 2**64 - 1,
    "ratio": 0.1,
    "price": Decimal("9999999999999999999999999999999999.9999"),
    "name": "Zoë \x00 雪",
    "data": b"\x00\xff",
    "day": date(1969, 12, 31),
    "at": datetime(2024, 2, 29, 23, 59, 59, 999999, UTC),
    "local": datetime(1969, 7, 20, 20, 17, 40, 1),
    "flag": True,
    "marks": [1, None, -(2**31)],
    "tags": [("a", 1), ("b", None)],
    "shape": {"x": -32768, "text": None},
}
EMPTY: Row = dict.fromkeys(COLUMNS.names)
ROWS: list[Row] = [
    FULL,
    {**EMPTY, "id": 2},
    {**EMPTY, "id": 3, "ratio": float("inf"), "marks": [], "name": ""},
]


async def write_archive(path: Path) -> Archive:
    """Write an archive in which `ROWS` are the fold of a base and a diff."""
    writer = await open_writer(folder_at(path), schema=SCHEMA, formats=[JsonlFormat()])
    base = [{**EMPTY, "id": 1}, ROWS[1], {**EMPTY, "id": 9}]
    await writer.write_base([pa.RecordBatch.from_pylist(base, SCHEMA.arrow)], "1", reason="first")
    changes = [
        {"action": "UPDATE", "key": {"id": 1}, "before": None, "after": FULL},
        {"action": "INSERT", "key": {"id": 3}, "before": None, "after": ROWS[2]},
        {"action": "DELETE", "key": {"id": 9}, "before": None, "after": None},
    ]
    await writer.write_diff([pa.RecordBatch.from_pylist(changes, SCHEMA.changes)], "1", "2")
    return await streamfold.archive.open(path)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_id(found: pa.Table | pl.DataFrame) -> list[Row]:
    if isinstance(found, pl.DataFrame):
        rows = [{**row, "tags": entries(row["tags"])} for row in found.to_dicts()]
    else:
        rows = found.to_pylist()
    return sorted(rows, key=lambda row: int(row["id"]))


def entries(found: Row | None) -> list[tuple[str, Any]] | None:
    """Return a map of polars as Arrow shows it."""
    return None if found is None else list(found.items())


async def test_a_delta_table_is_read_by_deltalake_polars_and_duckdb(tmp_path: Path) -> None:
    archive, target = await write_archive(tmp_path / "users"), tmp_path / "delta"
    copied = await copy_table(archive, "delta", target)
    assert (copied.position, copied.rows) == ("2", 3)
    table = DeltaTable(target)
    assert table.history()[0]["streamfold.position"] == "2"
    assert by_id(table.to_pyarrow_table()) == ROWS
    assert by_id(pl.read_delta(str(target))) == ROWS
    rows = table.to_pyarrow_dataset()
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        assert by_id(connection.sql("from rows").to_arrow_table()) == ROWS


async def test_an_iceberg_table_is_read_by_pyiceberg_polars_and_duckdb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    archive, target = await write_archive(tmp_path / "users"), tmp_path / "ice berg"
    await copy_table(archive, "iceberg", target)
    table = StaticTable.from_metadata(str(target))
    assert by_id(table.scan().to_arrow()) == ROWS
    [snapshot] = table.metadata.snapshots
    assert snapshot.summary is not None
    assert snapshot.summary["streamfold.position"] == "2"
    assert by_id(pl.scan_iceberg(table).collect()) == ROWS
    connection = table.scan().to_duckdb("rows")
    assert by_id(connection.sql("from rows").to_arrow_table()) == ROWS
    connection.close()


async def test_a_database_of_duckdb_holds_the_table_under_its_name(tmp_path: Path) -> None:
    archive, target = await write_archive(tmp_path / "users"), tmp_path / "users.duckdb"
    await copy_table(archive, "duckdb", target)
    with duckdb.connect(str(target), read_only=True) as connection:
        assert by_id(connection.sql("from public.users").to_arrow_table()) == ROWS
        [[comment]] = connection.sql("select comment from duckdb_tables()").fetchall()
    assert comment == "streamfold.position: 2"
    assert names_in(tmp_path) == ["users", "users.duckdb"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_is_made_at_a_position_and_of_some_columns(tmp_path: Path, kind: str) -> None:
    archive = await write_archive(tmp_path / "users")
    copied = await copy_table(
        archive, kind, tmp_path / "copy", position="1", columns=["id", "name"]
    )
    assert (copied.position, copied.rows) == ("1", 3)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("delta", pa.time64("us")),
        ("delta", pa.timestamp("ns")),
        ("delta", pa.decimal256(39, 0)),
        ("delta", pa.null()),
        ("iceberg", pa.time64("ns")),
        ("iceberg", pa.timestamp("ns", "UTC")),
        ("iceberg", pa.list_(pa.decimal256(39, 0))),
        ("duckdb", pa.struct([("x", pa.decimal256(39, 0))])),
        ("duckdb", pa.null()),
    ],
)
async def test_a_column_without_an_exact_type_is_refused_by_name(
    tmp_path: Path, kind: str, refused: pa.DataType
) -> None:
    schema = TableSchema.of(pa.schema([("id", pa.int64()), ("odd", refused)]), ["id"])
    writer = await open_writer(folder_at(tmp_path / "users"), schema=schema)
    await writer.write_base([], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    with pytest.raises(InvalidError, match=r"column 'odd' .* --column"):
        await copy_table(archive, kind, tmp_path / "copy")
    assert names_in(tmp_path) == ["users"]


@pytest.mark.parametrize("names", [("id", "full name"), ("id", "ID")])
async def test_delta_refuses_names_that_its_readers_do_not_take(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    schema = TableSchema.of(pa.schema([(name, pa.int64()) for name in names]), ["id"])
    writer = await open_writer(folder_at(tmp_path / "users"), schema=schema)
    await writer.write_base([], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    with pytest.raises(InvalidError, match=names[1]):
        await copy_table(archive, "delta", tmp_path / "copy")
    await copy_table(archive, "duckdb", tmp_path / "copy", columns=["id"])


async def test_names_that_duckdb_does_not_tell_apart_are_refused(tmp_path: Path) -> None:
    names = ["id", "ID", "Name", "é", "É"]
    schema = TableSchema.of(pa.schema([(name, pa.int64()) for name in names]), ["id"])
    writer = await open_writer(folder_at(tmp_path / "users"), schema=schema)
    await writer.write_base([], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    with pytest.raises(InvalidError, match=r"'ID'.* case of letters.* --column"):
        await copy_table(archive, "duckdb", tmp_path / "copy")
    with pytest.raises(InvalidError, match=r"'ID'.* case of letters.* --column"):
        async with open_sql(archive):
            pass
    await copy_table(archive, "duckdb", tmp_path / "copy", columns=names[1:])
    with duckdb.connect(str(tmp_path / "copy")) as connection:
        assert connection.sql("from public.users").columns == names[1:]


@pytest.mark.parametrize("kind", KINDS)
async def test_days_and_instants_outside_the_years_of_python_are_copied(
    tmp_path: Path, kind: str
) -> None:
    day, at = pa.date32(), pa.timestamp("us", "UTC")
    columns = [("id", pa.int64()), ("day", day), ("at", at), ("in", pa.struct([("day", day)]))]
    schema = TableSchema.of(pa.schema(columns), ["id"])
    # As `infinity` and `-infinity` of PostgreSQL are archived, and the years 0 and 10000.
    days = pa.array([2**31 - 1, -(2**31), -719_163, 2_932_897], pa.int32()).cast(day)
    moments = pa.array([2**63 - 1, -(2**63), -1, 253_402_300_800_000_000]).cast(at)
    inner = pa.StructArray.from_arrays([days], fields=list(schema.arrow.field("in").type))
    given = pa.RecordBatch.from_arrays([[1, 2, 3, 4], days, moments, inner], schema=schema.arrow)
    writer = await open_writer(folder_at(tmp_path / "users"), schema=schema)
    await writer.write_base([given], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    await copy_table(archive, kind, tmp_path / "copy")
    if kind == "delta":
        found = DeltaTable(tmp_path / "copy").to_pyarrow_table()
    elif kind == "iceberg":
        found = StaticTable.from_metadata(str(tmp_path / "copy")).scan().to_arrow()
    else:
        with duckdb.connect(str(tmp_path / "copy")) as connection:
            found = connection.sql("from public.users").to_arrow_table()
    found = found.cast(schema.arrow).sort_by("id")
    assert found.equals(pa.Table.from_batches([given]))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failed_copy_leaves_nothing_behind(tmp_path: Path, kind: str) -> None:
    archive = await write_archive(tmp_path / "users")
    [file] = (tmp_path / "users/epoch=1").glob("snapshot-*")
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ArtifactCorruptError):
        await copy_table(archive, kind, tmp_path / "copy")
    assert names_in(tmp_path) == ["users"]


async def test_a_table_without_rows_is_copied(tmp_path: Path) -> None:
    writer = await open_writer(folder_at(tmp_path / "users"), schema=SCHEMA)
    await writer.write_base([], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    for kind in KINDS:
        assert (await copy_table(archive, kind, tmp_path / kind)).rows == 0
    assert len(StaticTable.from_metadata(str(tmp_path / "iceberg")).scan().to_arrow()) == 0
    assert len(DeltaTable(tmp_path / "delta").to_pyarrow_table()) == 0


async def test_a_large_iceberg_table_has_several_files_and_one_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_copy, "FILE_BYTES", 1)
    schema = TableSchema.of(pa.schema([("id", pa.int64())]), ["id"])
    writer = await open_writer(folder_at(tmp_path / "users"), schema=schema)
    ids = pa.RecordBatch.from_pydict({"id": range(200_000)}, schema=schema.arrow)
    await writer.write_base([ids], "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    await copy_table(archive, "iceberg", tmp_path / "copy")
    table = StaticTable.from_metadata(str(tmp_path / "copy"))
    assert len(table.metadata.snapshots) == 1
    assert len(list(table.scan().plan_files())) > 1
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(200_000))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_never_replaces_what_exists(tmp_path: Path, kind: str) -> None:
    archive = await write_archive(tmp_path / "users")
    (tmp_path / "copy").write_text("mine")
    with pytest.raises(InvalidError, match="exists already"):
        await copy_table(archive, kind, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_appears_at_the_target_meanwhile_is_left_alone(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = await write_archive(tmp_path / "users")
    mine = tmp_path / "copy" if kind == "duckdb" else tmp_path / "copy/data/mine"

    class Slow(EngineColumns):
        @classmethod
        def of(cls, schema: pa.Schema, engine: EngineTypes) -> EngineColumns:
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text("mine")
            return EngineColumns.of(schema, engine)

    monkeypatch.setattr(table_copy, "EngineColumns", Slow)
    with pytest.raises(InvalidError, match="exists already"):
        await copy_table(archive, kind, tmp_path / "copy")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_copy_names_the_position_of_its_rows_when_files_were_collected(
    tmp_path: Path, kind: str
) -> None:
    writer = await open_writer(folder_at(tmp_path / "users"))
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    await writer.rebase(rows({1: "a", 2: "b"}), changes(("INSERT", 2, "b")), "2", reason="x")
    await collect(tmp_path / "users")
    copied = await copy_table(archive, kind, tmp_path / "copy")
    assert (copied.position, copied.rows) == ("2", 2)
