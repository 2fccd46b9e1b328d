"""Ingesters that are interrupted between two steps: the next one leaves no gap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
from s2_sdk import S2

from streamfold.follow.clients.client import Appended, EncodedBatch, EncodedClient
from streamfold.follow.clients.s2 import S2Client
from streamfold.ingest import SlotLostError
from streamfold.ingest.postgres.ingester import IngestOptions
from streamfold.ingest.table_stream import BasinStreams
from streamfold.model.records import Record
from tests.ingest.conftest import BASIN
from tests.ingest.ingesting import ingesting, stream
from tests.ingest.postgres import database_name, execute, following
from tests.ingest.test_restarts import HeldStreams

TABLES = ("t", "other")


class Interruption:
    """Holds back an append, counted over all streams, and those after it, until it is released."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.reached = asyncio.Event()
        self.release = asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            await self.release.wait()


class InterruptedClient(S2Client):
    """A client whose appends an interruption holds back."""

    interruption: Interruption

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        await self.interruption.wait()
        return await super().append(
            records, match_seq_num=match_seq_num, fencing_token=fencing_token
        )

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        await self.interruption.wait()
        return await super().append_encoded(
            batches, match_seq_num=match_seq_num, fencing_token=fencing_token
        )


class InterruptedStreams(BasinStreams):
    """Streams of a basin that stop to append at an interruption."""

    def __init__(self, s2: S2, interruption: Interruption) -> None:
        super().__init__(s2.basin(BASIN))
        self._s2 = s2
        self._interruption = interruption

    async def ensure(self, name: str) -> EncodedClient:
        await super().ensure(name)
        client = InterruptedClient(self._s2.basin(BASIN).stream(name))
        client.interruption = self._interruption
        return client


async def recopy_until(
    database: str, s2: S2, options: IngestOptions, interruption: Interruption
) -> bool:
    """Copy all tables again up to the interruption; returns whether it came before the end."""
    streams = InterruptedStreams(s2, interruption)
    recopy = replace(options, recopy=True)
    async with ingesting(database, s2, recopy, streams=streams) as running:
        reached = asyncio.create_task(interruption.reached.wait())
        followed = asyncio.create_task(running.followed())
        await asyncio.wait({reached, followed}, return_when=asyncio.FIRST_COMPLETED)
        if followed.done():
            followed.result()
        followed.cancel()
        reached.cancel()
        return interruption.reached.is_set()


@pytest.mark.parametrize("one_stream", ["", "all"], ids=["a stream for each", "one stream"])
async def test_a_recopy_that_ends_before_any_of_its_appends_leaves_no_gap(
    database: str, s2: S2, one_stream: str
) -> None:
    execute(database, *(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in TABLES))
    options = IngestOptions(
        TABLES, slot=database_name(database), heartbeat=60.0, one_stream=one_stream
    )
    async with ingesting(database, s2, options) as running:
        await running.followed()
    for number in count():
        # Only a new copy, or the slot before it, has these rows.
        execute(database, *(f"INSERT INTO {table} VALUES ({number})" for table in TABLES))
        interrupted = await recopy_until(database, s2, options, Interruption(number))
        async with ingesting(database, s2, options) as running:
            await running.followed()
            execute(
                database, *(f"INSERT INTO {table} VALUES ({1000 + number})" for table in TABLES)
            )
            for table in TABLES:
                rows = execute(database, f"SELECT id FROM {table} ORDER BY id")
                name = f"public.{table}"
                client = stream(s2, one_stream or name)
                async with following(client, ["id"], name if one_stream else None) as until:
                    rebuilt = await until(lambda found: (1000 + number,) in found.rows)  # noqa: B023
                assert rebuilt.table("id") == rows, f"{table} after append {number}"
        if not interrupted:
            break
    assert number > 5


async def test_a_table_that_an_interrupted_recopy_left_out_is_copied_when_it_comes_back(
    database: str, s2: S2
) -> None:
    execute(database, *(f"CREATE TABLE {table} (id int PRIMARY KEY)" for table in TABLES))
    both = IngestOptions(TABLES, slot=database_name(database), heartbeat=60.0)
    async with ingesting(database, s2, both) as running:
        await running.followed()
    execute(database, "INSERT INTO other VALUES (1)")
    # Up to the first append after the note of the new slot: two fences, a note, a copy that is
    # restarted, and that note come first.
    assert await recopy_until(database, s2, replace(both, tables=("t",)), Interruption(5))
    async with ingesting(database, s2, both) as running:
        await running.followed()
        async with following(stream(s2, "public.other"), ["id"]) as until:
            await until(lambda found: (1,) in found.rows)


class HeldCopies(HeldStreams):
    """Streams whose copies wait for the test."""

    def __init__(self, s2: S2) -> None:
        super().__init__(s2)
        self.held: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def ensure(self, name: str) -> EncodedClient:
        client = await super().ensure(name)
        if name == "public.t":
            self.clients[name].held = self.held
        return client


async def test_a_slot_that_is_made_anew_during_the_copy_is_not_followed(
    database: str, s2: S2
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    options, streams = IngestOptions(("t",), slot=database_name(database)), HeldCopies(s2)
    async with ingesting(database, s2, options, streams=streams) as running:
        release = await streams.held.get()
        streams.clients["public.t"].held = None
        execute(
            database,
            "INSERT INTO t VALUES (2)",
            f"SELECT pg_drop_replication_slot('{options.slot}')",
            f"SELECT pg_create_logical_replication_slot('{options.slot}', 'pgoutput')",
        )
        release.set()
        error = await running.failure()
    assert isinstance(error, SlotLostError)
    assert "after the streams'" in error.message


@pytest.mark.parametrize("number", [0, 3], ids=["before the streams are taken", "before the copy"])
async def test_a_column_that_is_added_before_the_snapshot_of_the_copy_is_copied(
    database: str, s2: S2, number: int
) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    options = IngestOptions(("t",), slot=database_name(database))
    interruption = Interruption(number)
    streams = InterruptedStreams(s2, interruption)
    async with ingesting(database, s2, options, streams=streams) as running:
        await interruption.reached.wait()
        execute(database, "ALTER TABLE t ADD a int", "INSERT INTO t VALUES (2, 5)")
        interruption.release.set()
        await running.followed()
        execute(database, "INSERT INTO t VALUES (3, 6)")
        async with following(stream(s2, "public.t"), ["id"]) as until:
            rebuilt = await until(lambda found: (3,) in found.rows)
    assert rebuilt.rows[(2,)].get("a") == 5
