"""Restarts and failed appends lose nothing and cost no copy."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

import psycopg2
import pytest
from s2_sdk import S2

from streamfold.errors import RetryLaterError
from streamfold.follow.clients.client import EncodedBatch, EncodedClient
from streamfold.follow.clients.s2 import S2Client
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.postgres.pgoutput import parse_lsn
from streamfold.ingest.table_stream import BasinStreams
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream, wait_for_first
from tests.ingest.postgres import (
    database_name,
    execute,
    following,
    restart,
    temporary_postgres,
)

TABLES = ("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")


def options(database: str, *tables: str) -> IngestOptions:
    # Longer than the second between two confirmations, as the default is.
    return IngestOptions(tables, slot=database_name(database), heartbeat=2.0)


def write_elsewhere(database: str) -> int:
    """Write log that has no change of `t`; returns its end."""
    statement = "INSERT INTO other SELECT coalesce(max(id), 0) + 1 FROM other"
    ((end,),) = execute(database, statement, "SELECT pg_current_wal_lsn()::text")
    return parse_lsn(end)


def wait_for_slot(database: str, slot: str, position: int) -> int:
    """Wait until the slot is confirmed up to a position; returns where it is then."""
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"
    while True:
        ((confirmed,),) = execute(database, query)
        if parse_lsn(confirmed) >= position:
            return parse_lsn(confirmed)
        time.sleep(0.02)


async def noted_position(s2: S2, chosen: IngestOptions) -> int:
    control = stream(s2, chosen.control_stream)
    tail = await control.check_tail()
    (last,) = await control.peek(tail.seq_num - 1, 1)
    return parse_lsn(dict(last.headers)[b"lsn"].decode())


async def check_follows(database: str, s2: S2, chosen: IngestOptions, row: int) -> None:
    """Start an ingester again; a new row arrives, and nothing was copied again."""
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        execute(database, f"INSERT INTO t VALUES ({row})")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (row,) in table.rows)
    assert "t" not in {body["op"] for body in rebuilt.bodies}


class FailingClient(S2Client):
    """Refuses one append with changes when a test asks for it."""

    failing = False

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        self._refuse()
        return await super().append_encoded(
            batches, match_seq_num=match_seq_num, fencing_token=fencing_token
        )

    def _refuse(self) -> None:
        if self.failing:
            self.failing = False
            raise RetryLaterError("the test refuses this append: append again")


class FailingStreams(BasinStreams):
    """Streams of a basin that can refuse an append."""

    def __init__(self, s2: S2) -> None:
        super().__init__(s2.basin(BASIN))
        self._s2 = s2
        self.clients: dict[str, FailingClient] = {}

    async def ensure(self, name: str) -> EncodedClient:
        await super().ensure(name)
        self.clients[name] = FailingClient(self._s2.basin(BASIN).stream(name))
        return self.clients[name]


class HeldClient(S2Client):
    """Holds appends with changes when a test asks for it, until the test sets their event."""

    held: asyncio.Queue[asyncio.Event] | None = None

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        if self.held is not None:
            release = asyncio.Event()
            self.held.put_nowait(release)
            await release.wait()
        return await super().append_encoded(
            batches, match_seq_num=match_seq_num, fencing_token=fencing_token
        )


class HeldStreams(BasinStreams):
    """Streams of a basin that can hold appends."""

    def __init__(self, s2: S2) -> None:
        super().__init__(s2.basin(BASIN))
        self._s2 = s2
        self.clients: dict[str, HeldClient] = {}

    async def ensure(self, name: str) -> EncodedClient:
        await super().ensure(name)
        self.clients[name] = HeldClient(self._s2.basin(BASIN).stream(name))
        return self.clients[name]


class DroppingClient(S2Client):
    """Drops a cancellation that comes with the answer to an append, as the SDK does on Python 3.11."""

    appended: asyncio.Event | None = None

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        end = await super().append_encoded(
            batches, match_seq_num=match_seq_num, fencing_token=fencing_token
        )
        if self.appended is not None:
            self.appended.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return end


class DroppingStreams(BasinStreams):
    """Streams of a basin that can drop a cancellation."""

    def __init__(self, s2: S2) -> None:
        super().__init__(s2.basin(BASIN))
        self._s2 = s2
        self.clients: dict[str, DroppingClient] = {}

    async def ensure(self, name: str) -> EncodedClient:
        await super().ensure(name)
        self.clients[name] = DroppingClient(self._s2.basin(BASIN).stream(name))
        return self.clients[name]


def wait_for_silence(database: str, seconds: float) -> None:
    """Wait until PostgreSQL had no answer for so long, and therefore asks for one."""
    query = f"SELECT 1 FROM pg_stat_replication WHERE reply_time < now() - interval '{seconds} s'"
    while not execute(database, query):
        time.sleep(0.02)


def moves_within(database: str, slot: str, position: int, seconds: float) -> bool:
    """Return whether the slot is confirmed up to a position within the time."""
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"
    deadline, found = time.monotonic() + seconds, False
    while not found and time.monotonic() < deadline:
        ((confirmed,),) = execute(database, query)
        found = parse_lsn(confirmed) >= position
    return found


async def test_an_answer_within_an_older_transaction_confirms_no_commit_that_is_not_appended(
    database: str, s2: S2
) -> None:
    execute(database, TABLES[0], "CREATE TABLE large (id int PRIMARY KEY, a text)")
    chosen, streams = options(database, "t", "large"), HeldStreams(s2)
    hasty = f"{database}&options=-c%20wal_sender_timeout%3D12s"  # PostgreSQL asks after half of it
    end = "SELECT pg_current_wal_lsn()::text"
    with closing(psycopg2.connect(database)) as older:
        async with ingesting(hasty, s2, chosen, streams=streams) as running:
            await running.followed()
            # Its changes are in the log before all commits, and more than what is read ahead.
            rows = "SELECT n, repeat('x', 1000) FROM generate_series(1, 9000) n"
            older.cursor().execute(f"INSERT INTO large {rows}")
            ((first,),) = execute(database, "INSERT INTO t VALUES (1)", end)
            await asyncio.to_thread(wait_for_slot, database, chosen.slot, parse_lsn(first))
            held = streams.clients["public.t"].held = asyncio.Queue()
            execute(database, "INSERT INTO t VALUES (2)")
            append = await held.get()
            ((third,),) = execute(database, "INSERT INTO t VALUES (3)", end)
            older.commit()
            await asyncio.to_thread(wait_for_silence, database, 7.0)
            append.set()
            await held.get()  # the append with row 3, which never ends
            moved = await asyncio.to_thread(
                moves_within, database, chosen.slot, parse_lsn(third), 1.0
            )
    assert not moved
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (3,) in table.rows)
    assert rebuilt.table("id") == [(1,), (2,), (3,)]


# PostgreSQL asks for answers after half of it, which must be less than a second.
@pytest.mark.parametrize("silence", ["0", "1800ms"])
async def test_log_of_other_tables_is_noted_before_it_is_confirmed(
    database: str, s2: S2, silence: str
) -> None:
    execute(database, *TABLES)
    chosen = options(database, "t")
    asking = f"{database}&options=-c%20wal_sender_timeout%3D{silence}"
    async with ingesting(asking, s2, chosen) as running:
        await running.followed()
        for _ in range(2):
            end = write_elsewhere(database)
            confirmed = await asyncio.to_thread(wait_for_slot, database, chosen.slot, end)
            assert await noted_position(s2, chosen) >= confirmed
    await check_follows(database, s2, chosen, 1)


async def test_published_tables_that_are_not_followed_cost_no_copy_after_a_restart(
    database: str, s2: S2
) -> None:
    publication = "CREATE PUBLICATION streamfold FOR ALL TABLES WITH (publish_via_partition_root)"
    execute(database, *TABLES, publication)
    chosen = replace(options(database, "t"), heartbeat=60.0)
    async with ingesting(database, s2, chosen) as running:
        await running.followed()
    # Read together, so that one batch ends with a commit that has no record.
    execute(database, "INSERT INTO t VALUES (1)")
    write_elsewhere(database)
    async with ingesting(database, s2, chosen) as running:
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (1,) in table.rows)
        ((commit, _),) = rebuilt.positions
        await asyncio.to_thread(wait_for_slot, database, chosen.slot, parse_lsn(commit))
    await check_follows(database, s2, chosen, 2)


async def test_streams_are_trimmed_as_their_readers_allow_and_never_to_the_last_record(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES, "INSERT INTO t SELECT generate_series(1, 50)")
    chosen = replace(options(database, "t"), heartbeat=0.1)
    points = {"public.t": 20}
    async with ingesting(database, s2, chosen, trim_points=points) as running:
        await running.followed()
        await wait_for_first(stream(s2, "public.t"), lambda first: first.seq_num == 20)
        points["public.t"] = 1 << 40
        execute(database, "INSERT INTO t VALUES (51)")
        await wait_for_first(stream(s2, "public.t"), lambda first: b'"id":51' in first.body)
    await check_follows(database, s2, chosen, 52)


async def test_a_failed_append_after_log_of_other_tables_is_repeated(database: str, s2: S2) -> None:
    execute(database, *TABLES)
    chosen, streams = options(database, "t"), FailingStreams(s2)
    async with ingesting(database, s2, chosen, streams=streams) as running:
        await running.followed()
        end = write_elsewhere(database)
        await asyncio.to_thread(wait_for_slot, database, chosen.slot, end)
        streams.clients["public.t"].failing = True
        execute(database, "INSERT INTO t VALUES (1)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda table: (1,) in table.rows)
        assert running.ingest.progress.failures >= 1
    assert len(rebuilt.positions) == 1


async def test_a_table_that_is_not_followed_any_more_costs_the_others_no_copy(
    database: str, s2: S2
) -> None:
    execute(database, *TABLES)
    both = replace(options(database, "t", "other"), heartbeat=60.0)
    async with ingesting(database, s2, both) as running:
        await running.followed()
        write_elsewhere(database)
        async with following(stream(s2, "public.other"), ["id"]) as until:
            rebuilt = await until(lambda table: (1,) in table.rows)
        ((commit, _),) = rebuilt.positions
        await asyncio.to_thread(wait_for_slot, database, both.slot, parse_lsn(commit))
    await check_follows(database, s2, replace(both, tables=("t",)), 1)


@pytest.mark.parametrize("one_stream", ["", "all"], ids=["a stream for each", "one stream"])
async def test_added_columns_are_declared_again_after_a_failed_append(
    database: str, s2: S2, one_stream: str
) -> None:
    execute(database, *TABLES)
    chosen = replace(options(database, "t"), one_stream=one_stream)
    name, streams = one_stream or "public.t", FailingStreams(s2)
    async with ingesting(database, s2, chosen, streams=streams) as running:
        await running.followed()
        streams.clients[name].failing = True
        execute(
            database,
            "ALTER TABLE t ADD COLUMN price numeric(8, 2)",
            "INSERT INTO t VALUES (1, 2.50)",
        )
        async with following(stream(s2, name), ["id"]) as until:
            rebuilt = await until(lambda table: (1,) in table.rows)
        assert running.ingest.progress.failures >= 1
        execute(database, "INSERT INTO t VALUES (2, 3)")
        async with following(stream(s2, name), ["id"]) as until:
            rebuilt = await until(lambda table: (2,) in table.rows)
    declared = [b"price" in raw for raw in rebuilt.raw if b'"op":"s"' in raw]
    assert [body["op"] for body in rebuilt.bodies][-3:] == ["s", "c", "c"]
    assert declared[-1]
    assert declared.count(True) == 1


async def test_an_orderly_restart_of_postgres_costs_no_copy(s2: S2) -> None:
    """While it stops, PostgreSQL asks for an answer, and psycopg2 gives it."""
    with temporary_postgres() as uri:
        execute(uri, *TABLES)
        chosen = replace(options(uri, "t"), heartbeat=60.0)
        async with ingesting(uri, s2, chosen) as running:
            await running.followed()
            write_elsewhere(uri)
            await asyncio.to_thread(restart, uri, signal.SIGINT)
            execute(uri, "INSERT INTO t VALUES (1)")
            async with following(stream(s2, "public.t"), ["id"]) as until:
                await until(lambda table: (1,) in table.rows)
            assert running.ingest.progress.sessions > 1
        await check_follows(uri, s2, chosen, 2)


async def test_a_cancellation_that_a_client_drops_ends_the_ingester(database: str, s2: S2) -> None:
    execute(database, *TABLES)
    chosen, streams = options(database, "t"), DroppingStreams(s2)
    async with ingesting(database, s2, chosen, streams=streams) as running:
        await running.followed()
        control = streams.clients[chosen.control_stream]
        noted = control.appended = asyncio.Event()
        write_elsewhere(database)
        await noted.wait()
        control.appended = None
    assert running.task.cancelled()
