"""A large transaction passes through an ingester that holds only part of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from s2_sdk import S2

from streamfold.ingest.postgres import following
from streamfold.ingest.postgres.ingester import IngestOptions
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import database_name, execute
from tests.ingest.processes import Serving, end, kill, line_with, start
from tests.proving import PROVING
from tests.sdk import sdk_client

MIB = 1 << 20
#: Bytes of one transaction, and of a row.
SIZE = (1024 if PROVING else 64) * MIB
ROW = 16 << 10
#: Bytes by which an ingester may grow: a few batches, as they are read, encoded and sent.
GROWTH_MAX = 48 * MIB


async def test_a_large_transaction_is_not_held_in_memory(database: str, tmp_path: Path) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a text)",
        "ALTER TABLE t ALTER COLUMN a SET STORAGE EXTERNAL",
    )
    serving, rows = Serving(tmp_path), SIZE // ROW
    server = await serving.start()
    process = await start(
        *("ingest", "postgres", "--dsn", database, "--table", "t", "--basin", BASIN),
        *("--slot", database_name(database), "--endpoint", serving.endpoint, "--json"),
    )
    try:
        await line_with(process, b"following")
        usual = psutil.Process(process.pid).memory_info().rss
        insert = f"INSERT INTO t SELECT n, repeat('x', {ROW}) FROM generate_series(1, {rows}) n"
        await asyncio.to_thread(execute, database, insert)
        async with sdk_client(serving.endpoint) as s2, asyncio.timeout(550):
            target, grown = stream(s2, "public.t"), 0
            # Fencing, the declaration and the end of the copy are before the rows.
            while (tail := (await target.check_tail()).seq_num) < rows + 3:
                assert process.returncode is None
                grown = max(grown, psutil.Process(process.pid).memory_info().rss - usual)
                await asyncio.sleep(0.1)
            (last,) = await target.peek(tail - 1, 1)
    finally:
        await end(process)
        await kill(server)
    assert 0 < grown < GROWTH_MAX
    assert (b"index", b"%d" % (rows - 1)) in [tuple(header) for header in last.headers]
    assert last.body.endswith(b',"last":true}}')


async def test_a_transaction_of_large_rows_does_not_wait_for_each_filling_of_a_socket(
    database: str, s2: S2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_GATHER", 3.0)  # a socket holds a fraction of a MiB
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)")
    options = IngestOptions(("t",), slot=database_name(database))
    async with ingesting(database, s2, options) as running:
        await running.followed()
        # With a pause for each filling, they would take longer than `until` waits.
        rows = "SELECT n, repeat('x', 1900) FROM generate_series(1, 20000) n"
        await asyncio.to_thread(execute, database, f"INSERT INTO t {rows}")
        await running.until(lambda progress: progress.tables["public.t"].changes >= 20_000)
