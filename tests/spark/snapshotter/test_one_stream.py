"""Tables of a real PostgreSQL through one stream into an archive each, equal at a common LSN."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.ingester import IngestOptions, PostgresIngest
from streamfold.ingest.postgres.pgoutput import parse_lsn
from streamfold.ingest.table_stream import BasinStreams
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.jobs import table_jobs
from streamfold.snapshotter.spark.table_job import TableJob
from tests.ingest.postgres import execute, temporary_postgres
from tests.sdk import sdk_client
from tests.spark.server import BASIN, TOKEN, Server
from tests.spark.snapshotter.stepping import Table
from tests.spark.snapshotter.tables import manifest_of, state_of
from tests.spark.snapshotter.waiting import TIMEOUT

STREAM = "one-stream"
TABLES = ("orders", "items")


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with temporary_postgres() as uri:
        yield uri


def ingest(database: str, server: Server, *statements: str) -> str:
    """Ingest both tables while statements run; returns the LSN after them, which the stream has."""

    async def run() -> str:
        async with sdk_client(server.url, TOKEN) as client:
            changed = asyncio.Event()
            options = IngestOptions(TABLES, one_stream=STREAM, heartbeat=0.2)
            streams = BasinStreams(client.basin(BASIN))
            ingester = PostgresIngest(Database(database), streams, options, on_progress=changed.set)
            task = asyncio.create_task(ingester.run())
            try:
                async with asyncio.timeout(TIMEOUT):
                    while ingester.progress.state != "following":
                        changed.clear()
                        await changed.wait()
                    execute(database, *statements)
                    ((lsn,),) = execute(database, "SELECT pg_current_wal_lsn()::text")
                    while parse_lsn(ingester.progress.confirmed) < parse_lsn(lsn):
                        changed.clear()
                        await changed.wait()
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            return str(lsn)

    return asyncio.run(run())


def jobs(server: Server, folder: Path) -> dict[str, TableJob]:
    """What a configuration with both tables gives."""
    tables = [
        {
            "source": {
                "server": server.url, "basin": BASIN, "stream": STREAM,
                "table": table, "schema": "public",
            },
            "destinations": [{"type": "local", "path": str(folder)}],
        }
        for table in TABLES
    ]  # fmt: skip
    made = table_jobs(read_configuration({"tables": tables}), {"S2_ACCESS_TOKEN": TOKEN})
    return {job.table.removeprefix("public."): job for job in made}


def test_tables_of_one_stream_are_equal_to_the_database_at_a_common_position(
    server: Server, database: str, tmp_path: Path
) -> None:
    execute(
        database,
        "CREATE TABLE orders (id int PRIMARY KEY, item text)",
        "CREATE TABLE items (id int PRIMARY KEY, price numeric(8, 2))",
        "INSERT INTO orders SELECT n, 'first' FROM generate_series(1, 300) n",
        "INSERT INTO items SELECT n, n / 4.0 FROM generate_series(1, 200) n",
    )
    rounds: list[tuple[str, dict[str, list[Any]]]] = []
    with DriverLoop() as loop:
        for number in (1, 2):
            lsn = ingest(
                database,
                server,
                f"UPDATE orders SET item = 'round {number}' WHERE id % 10 = {number}",
                f"DELETE FROM items WHERE id % 10 = {number}",
                f"UPDATE items SET id = id + 1000 WHERE id = {number * 10}",
            )
            columns = {"orders": "id, item", "items": "id, price"}
            rows = {
                t: execute(database, f"SELECT {columns[t]} FROM {t} ORDER BY id") for t in TABLES
            }
            rounds.append((lsn, rows))
            for job in jobs(server, tmp_path).values():
                Table(job, loop).flush()
    for lsn, expected in rounds:
        for table in TABLES:
            found = state_of(tmp_path / table, at_source=lsn)
            rebuilt = [tuple(row.values()) for _, row in sorted(found.items())]
            assert rebuilt == expected[table], (table, lsn)
    types = {c["Name"]: c["Type"] for c in manifest_of(tmp_path / "items").columns or []}
    assert types == {"id": "int32", "price": "decimal128(8, 2)"}
