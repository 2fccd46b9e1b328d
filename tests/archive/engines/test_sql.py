"""SQL over an archived table: exact values, bounded memory, no access to anything else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import streamfold.archive
from streamfold.archive import Archive, ArchiveWriter, TableSchema
from streamfold.archive.engines.sql import SqlSession, open_sql
from streamfold.archive.engines.table_copy import copy_table
from streamfold.archive.formats import JsonlFormat, ParquetFormat
from streamfold.errors import InvalidError
from tests.archive.read.test_follower import collect
from tests.archive.reading import folder_at, reopened, write_history
from tests.archive.tables import SCHEMA, changes, open_writer, rows


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def result(session: SqlSession, statement: str) -> list[dict[str, Any]]:
    return [row async for batch in session.run(statement) for row in batch.to_pylist()]


async def one_base(path: Path, schema: TableSchema, rows: list[dict[str, Any]]) -> Archive:
    writer = await open_writer(folder_at(path), schema=schema, formats=[ParquetFormat()])
    batch = pa.RecordBatch.from_pylist(rows, schema=schema.arrow)
    await writer.write_base([batch], "1", reason="first")
    return await streamfold.archive.open(path)


async def test_statements_cannot_reach_files_settings_or_extensions(tmp_path: Path) -> None:
    await write_history(tmp_path / "users")
    secret = tmp_path / "secret.csv"
    secret.write_text("hidden")
    local = pa.table({"x": [1]})
    refused = [
        f"select * from read_text('{secret}')",
        f"select * from '{secret}'",
        "select * from glob('/*')",
        "select * from local",
        f"copy users to '{secret}.copy'",
        f"attach '{secret}.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "create table copied as from users",
        "delete from users",
        "select 1; select 2",
        "",
        "select",
    ]
    async with open_sql(await reopened(tmp_path / "users")) as session:
        for statement in refused:
            with pytest.raises(InvalidError) as error:
                await result(session, statement)
            assert error.value.code == "statement_failed"
        assert await result(session, "select count(*) as n from public.users") == [{"n": 3}]
    assert local.num_rows == 1
    assert names_in(tmp_path) == ["secret.csv", "users"]


async def test_a_statement_spills_to_disk_instead_of_exceeding_its_memory(tmp_path: Path) -> None:
    await write_history(tmp_path / "users")
    spool = tmp_path / "spool"
    spool.mkdir()
    statement = (
        "select count(*) as n from (select distinct i || repeat('x', 40) as k"
        " from range(1_000_000) t(i) order by k)"
    )
    archive = await reopened(tmp_path / "users")
    async with open_sql(archive, memory=48 << 20, spool=spool) as session:
        assert await result(session, statement) == [{"n": 1_000_000}]
    async with open_sql(archive, memory=1 << 20, spool=spool) as session:
        with pytest.raises(InvalidError, match=r"(?i)memory"):
            await result(session, statement)
    async with open_sql(archive, memory=48 << 20, spilled=1 << 20, spool=spool) as session:
        with pytest.raises(InvalidError, match="max_temp_directory_size"):
            await result(session, statement)
    assert names_in(spool) == []


async def test_cancellation_interrupts_a_statement(tmp_path: Path) -> None:
    await write_history(tmp_path / "users")
    async with open_sql(await reopened(tmp_path / "users")) as session:
        endless = "select sum(a.i * b.i) from range(1_000_000) a(i), range(10_000_000) b(i)"
        task = asyncio.create_task(result(session, endless))
        done, _ = await asyncio.wait({task}, timeout=0.3)
        assert not done
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await result(session, "select 1 as x") == [{"x": 1}]


async def test_values_of_every_type_stay_exact(tmp_path: Path) -> None:
    types = pa.schema(
        [
            ("id", pa.uint64()),
            ("at", pa.timestamp("ns", "UTC")),
            ("clock", pa.time64("ns")),
            ("price", pa.decimal256(38, 10)),
            ("tags", pa.map_(pa.string(), pa.list_(pa.int8()))),
            ("blob", pa.binary()),
            ("unset", pa.null()),
        ]
    )
    row = {"id": 2**64 - 1, "at": 1, "clock": 1, "tags": [("a", [1])], "blob": b"\0"}
    archive = await one_base(tmp_path, TableSchema.of(types, ["id"]), [row])
    async with open_sql(archive) as session:
        [_, found] = [batch async for batch in session.run("from users")]
    table = await archive.table()
    assert pa.table(found.columns, table.schema.names).cast(table.schema).equals(table)


async def test_a_column_that_duckdb_cannot_hold_is_named(tmp_path: Path) -> None:
    types = pa.schema([("id", pa.int64()), ("wide", pa.decimal256(50, 2))])
    archive = await one_base(tmp_path, TableSchema.of(types, ["id"]), [{"id": 1}])
    with pytest.raises(InvalidError, match=r"column 'wide' has type decimal256\(50, 2\)"):
        async with open_sql(archive):
            pass
    async with open_sql(archive, columns=["id"]) as session:
        assert await result(session, "from users") == [{"id": 1}]


@pytest.mark.parametrize(
    "schema", ["temp", "system", "memory", "main", "pg_catalog", "Information_Schema"]
)
async def test_a_schema_may_have_a_name_that_duckdb_uses_itself(
    tmp_path: Path, schema: str
) -> None:
    writer = await ArchiveWriter.open(
        f"{schema}.users", SCHEMA, [folder_at(tmp_path)], formats=[JsonlFormat()], writer_id="w"
    )
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    archive = await streamfold.archive.open(tmp_path)
    async with open_sql(archive) as session:
        assert await result(session, "from users") == [{"id": 1, "name": "a"}]
        if schema in ("temp", "system", "memory"):
            assert await result(session, f"select id from memory.{schema}.users") == [{"id": 1}]
    if schema in ("temp", "system", "main"):
        await copy_table(archive, "duckdb", tmp_path / "copy.db")
        with duckdb.connect(str(tmp_path / "copy.db")) as connection:
            assert connection.sql(f"from copy.{schema}.users").fetchall() == [(1, "a")]


async def test_a_session_names_the_position_of_its_rows_when_files_were_collected(
    tmp_path: Path,
) -> None:
    writer = await open_writer(folder_at(tmp_path / "users"))
    await writer.write_base(rows({1: "a"}), "1", reason="first")
    archive = await streamfold.archive.open(tmp_path / "users")
    await writer.rebase(rows({1: "a", 2: "b"}), changes(("INSERT", 2, "b")), "2", reason="x")
    await collect(tmp_path / "users")
    async with open_sql(archive) as session:
        assert await result(session, "select count(*) as n from users") == [{"n": 2}]
        assert session.position == "2"
