"""Read-ahead is bounded, and readers that lose it miss nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from streamfold.model.records import Record
from streamfold.store import ReadRequest, StreamStore, from_seq_num, open_store
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.settings import StoreSettings
from tests.store.conftest import BASIN, STREAM

MIB = 1 << 20
#: Nothing is recent: all that is read comes from storage.
COLD = StoreSettings(recent_bytes=0)
READERS = 30


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[StreamStore]:
    """A store with records of very different sizes, none of them in memory."""
    async with open_store(tmp_path.as_uri(), COLD) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for number in range(48):
            size = 900_000 if number % 8 == 7 else 10
            await store.append(BASIN, STREAM, [Record(b"%d " % number + bytes(size))])
        yield store


async def test_readers_that_lose_their_scans_to_others_read_everything_in_order(
    cold: StreamStore,
) -> None:
    async with AsyncExitStack() as stack:
        request = ReadRequest(from_seq_num(0))
        sessions = [
            await stack.enter_async_context(cold.follow(BASIN, STREAM, request))
            for _ in range(READERS)
        ]
        read: list[list[bytes]] = [[] for _ in sessions]
        while any(len(bodies) < 48 for bodies in read):
            for session, bodies in zip(sessions, read, strict=True):
                batch = await session.next()
                assert batch is not None
                bodies += [record.body.split()[0] for record in batch.records()]
    assert read == [[b"%d" % number for number in range(48)]] * READERS


async def test_readers_at_the_same_time_read_everything_in_order(cold: StreamStore) -> None:
    async def read() -> list[int]:
        found: list[int] = []
        async with cold.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
            while len(found) < 48:
                batch = await session.next()
                assert batch is not None
                found += [record.seq_num for record in batch.records()]
        return found

    assert await asyncio.gather(*(read() for _ in range(READERS))) == [[*range(48)]] * READERS


async def test_a_page_of_a_scan_is_small_although_large_rows_follow_small_ones(
    tmp_path: Path,
) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    for number in range(600):
        await commit_rows(engine, [(b"%04d" % number, b"small")])
    for number in range(600, 664):
        await commit_rows(engine, [(b"%04d" % number, bytes(MIB))])
    sizes, keys = [], []
    async with aclosing(engine.scan(b"0", b"9")) as pages:
        async for page in pages:
            sizes.append(sum(len(value) for _, value in page))
            keys += [key for key, _ in page]
    await engine.close()
    assert max(sizes) <= 2 * MIB
    assert keys == [b"%04d" % number for number in range(664)]
