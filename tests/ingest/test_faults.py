"""Networks that break, slots and publications that vanish: handled, or an error with the way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import psycopg2.errors
import pytest
from s2_sdk import S2, Endpoints, Timeout

from streamfold.errors import NotFoundError, OutcomeUnknownError
from streamfold.follow.clients.client import EncodedBatch
from streamfold.follow.clients.s2 import S2Client
from streamfold.ingest import RowTooLargeError, SlotLostError, SourceUnusableError
from streamfold.ingest.postgres import ingester
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.copy_source import DatabaseSnapshot, exported_snapshot
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.table_stream import TableStream
from streamfold.model.records import Record
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.network import proxy_to_postgres, proxy_to_server
from tests.ingest.postgres import PATIENCE, database_name, execute, following

MANY = "INSERT INTO t SELECT n, repeat('x', 200) FROM generate_series({}, {}) n"


def options(database: str, *tables: str) -> IngestOptions:
    return IngestOptions(tables, slot=database_name(database), heartbeat=0.2)


def drop_used_slot(database: str, slot: str) -> None:
    """Drop a slot whose user connects again and again."""
    while True:
        try:
            execute(
                database,
                "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots "
                f"WHERE slot_name = '{slot}'",
                f"SELECT pg_drop_replication_slot('{slot}')",
            )
        except psycopg2.errors.ObjectInUse:
            continue
        return


async def test_a_network_cut_to_postgres_costs_no_change(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)", MANY.format(1, 20_000))
    with proxy_to_postgres(database) as (proxy, uri):
        proxy.cut_after(1 << 20)  # within the copy
        async with ingesting(uri, s2, options(database, "t")) as running:
            await running.followed()
            assert proxy.was_cut.is_set()
            for number in range(3):
                first = 20_001 + number * 2000
                proxy.cut_after(50_000 + number)  # within the transaction
                execute(database, MANY.format(first, first + 1999))
                assert await asyncio.to_thread(proxy.was_cut.wait, PATIENCE)
            execute(database, "UPDATE t SET a = 'end' WHERE id = 1")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                rebuilt = await until(lambda table: table.rows.get((1,), {}).get("a") == "end")
            assert running.ingest.progress.sessions > 3
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
    assert len(rebuilt.positions) == len(set(rebuilt.positions)) == 6001


async def test_a_network_cut_to_the_server_costs_no_change(
    database: str, s2: S2, endpoint: str
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)", MANY.format(1, 20_000))
    with proxy_to_server(endpoint) as (proxy, address):
        endpoints = Endpoints(account=address, basin=address)
        async with (
            S2("ignored", endpoints=endpoints) as through,
            ingesting(database, through, options(database, "t")) as running,
        ):
            await running.until(lambda progress: progress.state == "copying")
            for number in range(4):
                await asyncio.to_thread(proxy.cut)
                first = 20_001 + number * 2000
                execute(database, MANY.format(first, first + 1999))
                await running.followed()
            execute(database, "UPDATE t SET a = 'end' WHERE id = 1")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                rebuilt = await until(lambda table: table.rows.get((1,), {}).get("a") == "end")
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")
    assert len(rebuilt.positions) == len(set(rebuilt.positions))


@pytest.mark.parametrize("state", ["copying", "following"])
async def test_a_connection_on_which_the_server_falls_silent_is_replaced(
    database: str, s2: S2, endpoint: str, state: str
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)", MANY.format(1, 2000))
    with proxy_to_server(endpoint) as (proxy, address):
        endpoints, soon = Endpoints(account=address, basin=address), timedelta(seconds=4)
        timeout = Timeout(request=soon, connection=soon)
        async with (
            S2("ignored", endpoints=endpoints, timeout=timeout) as through,
            ingesting(database, through, options(database, "t")) as running,
        ):
            await running.until(lambda progress: progress.state == state)
            proxy.silence()
            before = proxy.connections
            execute(database, MANY.format(2001, 2010))
            async with following(stream(s2, "public.t"), ["id"]) as until:
                rebuilt = await until(lambda table: (2010,) in table.rows)
            assert proxy.connections > before
            # The next attempt, or one of the next if a slow machine answers late.
            assert running.ingest.progress.failures <= 10
    assert len(rebuilt.positions) == len(set(rebuilt.positions))
    assert rebuilt.table("id", "a") == execute(database, "SELECT id, a FROM t ORDER BY id")


async def test_an_append_session_that_the_sdk_does_not_end_is_given_up_with_its_connection(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def waiting(*_: object, **__: object) -> AsyncIterator[None]:
        await asyncio.Event().wait()  # as the SDK does for room in a full socket
        yield

    with proxy_to_server(endpoint) as (proxy, address):
        endpoints, soon = Endpoints(account=address, basin=address), timedelta(seconds=5)
        async with S2("ignored", endpoints=endpoints, timeout=Timeout(request=soon)) as through:
            used = through.basin(BASIN).stream("any")
            client = S2Client(used)
            with pytest.raises(NotFoundError):
                await client.check_tail()
            monkeypatch.setattr(type(used._client), "streaming_request", waiting)
            appending = TableStream(client, "").append_encoded(
                [EncodedBatch.of([Record(b"x")])] * 2
            )
            with pytest.raises(OutcomeUnknownError, match="no acknowledgement in time"):
                await asyncio.wait_for(appending, PATIENCE)
            before = proxy.connections
            with pytest.raises(NotFoundError):
                await client.check_tail()
            assert proxy.connections == before + 1


async def test_a_connection_on_which_postgres_falls_silent_is_replaced(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    chosen = replace(options(database, "t"), heartbeat=60.0, silence=4.0)
    with proxy_to_postgres(database) as (proxy, uri):
        async with ingesting(uri, s2, chosen) as running:
            await running.followed()
            execute(database, "INSERT INTO t VALUES (2)")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                await until(lambda table: (2,) in table.rows)
                proxy.silence()
                execute(database, "INSERT INTO t VALUES (3)")
                await running.until(lambda progress: progress.state == "retrying")
                assert "it sent nothing for" in running.ingest.progress.last_error
                # PostgreSQL notices too, in the end, and frees the slot.
                proxy.cut()
                rebuilt = await until(lambda table: (3,) in table.rows)
    assert len(rebuilt.positions) == 2


async def test_a_quiet_database_is_not_taken_for_a_silent_one(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    chosen = replace(options(database, "t"), heartbeat=60.0, silence=6.0)
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running.task), 15)
        assert running.ingest.progress.sessions == 1


async def test_a_slot_that_is_dropped_while_it_is_followed_is_an_error(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    chosen = options(database, "t")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        await asyncio.to_thread(drop_used_slot, database, chosen.slot)
        failure = await running.failure()
    assert isinstance(failure, SlotLostError)
    assert "does not exist" in failure.message
    assert "--recopy" in failure.message


@pytest.mark.parametrize("rows", [0, 1], ids=["without changes", "with a change"])
async def test_a_dropped_publication_is_made_again_and_its_tables_are_copied_again(
    database: str, s2: S2, rows: int
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()
        execute(database, "DROP PUBLICATION streamfold")
        execute(database, f"INSERT INTO t SELECT 1 + n FROM generate_series(1, {rows}) n")
        await running.until(lambda progress: progress.sessions > 1)
        await running.followed()
        execute(database, "INSERT INTO t VALUES (9)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (9,) in table.rows)
    assert rebuilt.table("id") == execute(database, "SELECT id FROM t ORDER BY id")


async def test_changes_that_a_publication_left_out_for_a_while_are_not_missed(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()
        execute(
            database,
            "ALTER PUBLICATION streamfold SET (publish = 'insert')",
            "DELETE FROM t WHERE id = 1",
            "ALTER PUBLICATION streamfold SET (publish = 'insert, update, delete, truncate')",
        )
        await running.until(lambda progress: progress.sessions > 1)
        await running.followed()
        execute(database, "INSERT INTO t VALUES (9)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (9,) in table.rows)
    assert rebuilt.table("id") == [(2,), (9,)]


async def test_a_column_that_is_retyped_within_a_transaction_is_followed(
    database: str, s2: S2
) -> None:
    execute(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, a int)",
        "INSERT INTO t VALUES (1, 1), (2, 2)",
    )
    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()
        execute(
            database,
            "BEGIN",
            "INSERT INTO t VALUES (3, 3)",
            "UPDATE t SET a = 22 WHERE id = 2",
            "ALTER TABLE t ALTER COLUMN a TYPE text USING 'text ' || a",
            "INSERT INTO t VALUES (4, 'four')",
            "DELETE FROM t WHERE id = 1",
            "COMMIT",
            "INSERT INTO t VALUES (9, 'end')",
        )
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (9,) in table.rows)
    assert rebuilt.table("id", "a") == [(2, "text 22"), (3, "text 3"), (4, "four"), (9, "end")]


HUGE = "INSERT INTO t VALUES (7, 1, repeat('x', 20 << 20))"
WAYS_OUT = {
    "shorter": ("UPDATE t SET a = 'short' WHERE id = 7",),
    "not published": (
        "ALTER PUBLICATION streamfold DROP TABLE t",
        "ALTER PUBLICATION streamfold ADD TABLE t (id, n)",
    ),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
async def test_a_value_of_many_megabytes_is_an_error_whose_ways_out_work(
    database: str, s2: S2, way_out: str
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, n int, a text)",
            "INSERT INTO t VALUES (1, 1, 'a')")  # fmt: skip
    chosen = options(database, "t")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        execute(database, HUGE, "INSERT INTO t VALUES (8, 2, 'after')")
        failure = await running.failure()
    assert isinstance(failure, RowTooLargeError)
    for part in (
        'row {"id":7} of table public.t',
        "1048576",
        "column 'a'",
        "--recopy",
        "DROP TABLE",
    ):
        assert part in failure.message
    execute(database, *WAYS_OUT[way_out])
    chosen = replace(chosen, recopy=way_out == "shorter")
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        execute(database, "INSERT INTO t VALUES (9, 3, 'end')")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (9,) in table.rows)
    assert rebuilt.table("id", "n") == [(1, 1), (7, 1), (8, 2), (9, 3)]


async def test_a_value_of_many_megabytes_in_the_first_copy_is_named(database: str, s2: S2) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, n int, a text)", HUGE)
    async with ingesting(database, s2, options(database, "t")) as running:
        failure = await running.failure()
    assert isinstance(failure, RowTooLargeError)
    assert "shorten the value; or" in failure.message
    execute(database, "UPDATE t SET a = 'short'")
    async with ingesting(database, s2, options(database, "t")) as running:
        await running.followed()


async def test_a_copy_that_never_finds_its_snapshot_ends_with_advice(
    database: str, s2: S2, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def ended(source: Database) -> AsyncIterator[DatabaseSnapshot]:
        async with exported_snapshot(source) as snapshot:
            pass
        yield snapshot  # PostgreSQL knows it no more than another server would

    monkeypatch.setattr(ingester, "exported_snapshot", ended)
    # Sessions that fail late would not count as failures in a row.
    monkeypatch.setattr(ingester, "_STEADY", PATIENCE)
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    async with ingesting(database, s2, options(database, "t")) as running:
        failing = asyncio.ensure_future(running.failure())
        while not failing.done():
            # A slot waits for a note of open transactions in the log, which nobody else writes here.
            await asyncio.wait({failing}, timeout=0.5)
            await asyncio.to_thread(execute, database, "CHECKPOINT")
        failure = failing.result()
    assert isinstance(failure, SourceUnusableError)
    assert "name one host" in failure.message
    assert running.ingest.progress.sessions == 5
