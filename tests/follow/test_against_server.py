"""The same against `streamfold serve` in a process of its own, through the unmodified SDK."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from s2_sdk import S2Stream, StreamConfig

from streamfold.blob import open_blob_store
from streamfold.follow import (
    HistoryTrimmedError,
    Outcome,
    Placement,
    Policy,
    SnapshotStore,
    external,
    follow,
    in_stream,
)
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.clients.s2 import S2Client
from streamfold.follow.restore.plan import make_plan
from tests.follow.ledger import SMALL, Ledger, fold, initial
from tests.interop.serving import serving
from tests.ports import free_port
from tests.s3 import S3Server
from tests.sdk import sdk_client

BASIN, STREAM = "follow-basin", "deltas"
QUIET = ("--host", "127.0.0.1", "--no-access-log", "--trim-grace", "0.2")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server for all tests, each of which has a stream of its own."""
    with serving(*QUIET) as exports:
        yield exports["S2_ACCOUNT_ENDPOINT"]


@pytest.fixture
async def stream(endpoint: str) -> AsyncIterator[S2Stream]:
    async with sdk_client(endpoint) as s2:
        await s2.ensure_basin(BASIN)
        basin, name = s2.basin(BASIN), uuid.uuid4().hex
        await basin.create_stream(name)
        yield basin.stream(name)


@pytest.fixture
async def brief_stream(endpoint: str) -> AsyncIterator[S2Stream]:
    """A stream that keeps its records for a second."""
    async with sdk_client(endpoint) as s2:
        await s2.ensure_basin(BASIN)
        basin, name = s2.basin(BASIN), uuid.uuid4().hex
        await basin.create_stream(name, config=StreamConfig(retention_policy=1))
        yield basin.stream(name)


async def until_trimmed(client: S2Client, first: int) -> None:
    async with asyncio.timeout(120):
        while (await client.peek(0, 1))[0].seq_num < first:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def until_empty(client: S2Client) -> None:
    async with asyncio.timeout(120):
        while await client.peek(0, 1):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)


async def until_saved(store: SnapshotStore, cursor: int) -> None:
    while True:
        newest = await store.newest()
        if newest is not None and newest.cursor >= cursor:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("sizes", [None, SMALL], ids=["record", "framed"])
async def test_snapshots_in_the_stream_and_readers_before_and_after_the_trim(
    stream: S2Stream, sizes: Any
) -> None:
    client = S2Client(stream)
    ledger = Ledger(client)
    await ledger.add(100)
    async with ledger.follow() as early:
        async with ledger.taker(in_stream(), sizes=sizes) as taker:
            taken = await taker.take()
        assert taken.placement is (Placement.RECORD if sizes is None else Placement.FRAMED)
        await early.catch_up()  # where the trim comes first, it jumps to the snapshot here
        await until_trimmed(client, taken.cursor)
        await ledger.add(10)
        assert await ledger.restored() == ledger.expected
        seen: list[str] = []
        while len(seen) < 10:
            change = await anext(early)
            seen += [] if change.restored else [change.body.decode()]
        assert seen == ledger.expected[-10:]
        assert early.value["seen"] == ledger.expected


async def test_a_stream_whose_beginning_expired_says_why_and_how_to_keep_records(
    brief_stream: S2Stream,
) -> None:
    client = S2Client(brief_stream)
    ledger = Ledger(client)
    await ledger.add(5)
    await until_empty(client)
    plan = str(await make_plan(client, in_stream()))
    assert "records before 5 are gone, trimmed or older than the stream's retention" in plan
    assert "--retention-policy infinite" in plan
    with pytest.raises(HistoryTrimmedError) as failure:
        await ledger.restored()
    for part in ("before 5", "7 days", "older than", "--retention-policy infinite"):
        assert part in failure.value.message


class ExpiringClient(S2Client):
    """Starts to read when no record is left."""

    def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        return self._read_later(seq_num)

    async def _read_later(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        await until_empty(self)
        async with aclosing(super().read(seq_num)) as session:
            async for batch in session:
                yield batch


@pytest.mark.parametrize("following", [False, True], ids=["restore", "catch-up"])
async def test_records_that_expire_before_they_are_read_are_not_waited_for(
    brief_stream: S2Stream, following: bool
) -> None:
    ledger = Ledger(ExpiringClient(brief_stream))
    async with asyncio.timeout(240):
        if not following:
            await ledger.add(5)
            with pytest.raises(HistoryTrimmedError):
                await ledger.restored()
            return
        async with ledger.follow() as state:
            await ledger.add(5)
            with pytest.raises(HistoryTrimmedError):
                await state.catch_up()


async def test_two_snapshotters_run_while_writers_append(
    stream: S2Stream, s3_server: S3Server
) -> None:
    blobs = open_blob_store(f"s3://{s3_server.bucket}/race", **s3_server.options())
    outside = external(blobs)
    ledger = Ledger(S2Client(stream))
    policy = Policy(records=40, bytes=None, replay=None)
    async with (
        ledger.taker(outside, policy=policy) as one,
        ledger.taker(outside, policy=policy) as other,
    ):
        tasks = [asyncio.create_task(each.run()) for each in (one, other)]
        for _ in range(20):
            await ledger.add(10)
        assert outside.store is not None
        async with asyncio.timeout(120):
            await until_saved(outside.store, 160)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await one.take()).outcome in Outcome  # the other may have saved it meanwhile
    async with ledger.follow(outside) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.records < 40


async def test_a_follower_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    port = str(free_port())
    options = (*QUIET, "--port", port, "--local-root", str(tmp_path / "store"))
    endpoint = f"http://127.0.0.1:{port}"
    async with sdk_client(endpoint) as s2:
        ledger = Ledger(S2Client(s2.basin(BASIN).stream(STREAM)))
        with serving(*options):
            await s2.ensure_basin(BASIN)
            await s2.basin(BASIN).ensure_stream(STREAM)
            await ledger.add(5)
            follower = follow(s2.basin(BASIN).stream(STREAM), fold=fold, initial=initial)
            state = await follower.__aenter__()
            waiting = asyncio.create_task(anext(state))
        assert not waiting.done()
        with serving(*options):
            await ledger.add(1)
            async with asyncio.timeout(120):
                assert (await waiting).body == b"5"
            assert state.value["seen"] == ledger.expected
            await follower.__aexit__(None, None, None)
