"""Many followers of one stream: shared work, and separate positions and limits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from streamfold.errors import DecryptionFailedError
from streamfold.model.configs import BasinConfig, Cipher, StreamConfigLayer
from streamfold.model.records import BATCH_RECORDS_MAX, RECORD_OVERHEAD, Record, trim_record
from streamfold.store import ReadRequest, SealingKey, StoreSettings, from_seq_num
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, STREAM, Bench, bodies

SEED = 20_251
FOLLOWERS = 150
#: Body and overhead of each record of the random test.
SIZE = 4 + RECORD_OVERHEAD


@dataclass(frozen=True)
class ReadCase:
    """A read, and how many records it is to get once there are `total`, whose timestamps count up."""

    request: ReadRequest

    def expected(self, total: int) -> range:
        request, end = self.request, total
        first = request.start.value
        if request.count is not None:
            end = min(end, first + request.count)
        if request.bytes is not None:
            end = min(end, first + request.bytes // SIZE)
        if request.until is not None:
            end = min(end, request.until)
        return range(first, max(first, end))


def read_cases(rng: random.Random, total: int) -> list[ReadCase]:
    found = []
    for _ in range(FOLLOWERS):
        kind, start = rng.randrange(5), from_seq_num(rng.randrange(20))
        limit = rng.randrange(1, total)
        request = ReadRequest(
            start,
            count=limit if kind == 1 else None,
            bytes=limit * SIZE if kind == 2 else None,
            until=limit if kind == 3 else None,
            wait=60.0 if kind in (1, 2, 3) else None,
        )
        found.append(ReadCase(request))
    return found


async def collect(store: StreamStore, case: ReadCase, total: int) -> list[int]:
    wanted, got = len(case.expected(total)), list[int]()
    async with store.follow(BASIN, "counted", case.request) as session:
        while len(got) < wanted and (batch := await session.next()) is not None:
            for record in batch.records():
                assert record.body == b"%04d" % record.seq_num
                got.append(int(record.seq_num))
    return got


@pytest.mark.parametrize("recent_bytes", [StoreSettings().recent_bytes, 2000])
async def test_every_follower_of_a_crowd_gets_what_it_asked_for_whatever_others_asked_for(
    bench: Bench, recent_bytes: int
) -> None:
    rng, total = random.Random(SEED), 200
    async with bench.store(StoreSettings(recent_bytes=recent_bytes)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, "counted", StreamConfigLayer(timestamp_uncapped=True))
        asked, appended = read_cases(rng, total), 0
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            reads: list[asyncio.Task[list[int]]] = []
            while appended < total:
                count = min(rng.randrange(1, 8), total - appended)
                numbers = range(appended, appended + count)
                records = [Record(b"%04d" % number, timestamp=number) for number in numbers]
                await store.append(BASIN, "counted", records)
                appended += count
                if appended > 20 and not reads:
                    reads = [group.create_task(collect(store, case, total)) for case in asked]
                await asyncio.sleep(0)  # a turn for followers, so that they are at many positions
        for case, read in zip(asked, reads, strict=True):
            assert read.result() == list(case.expected(total)), (SEED, case)


async def live(session: Reader) -> None:
    """Bring a session to the tail."""
    while (batch := await session.next()) is not None and batch.count:
        pass


async def following(*sessions: Reader) -> list[asyncio.Task[ReadBatch | None]]:
    """The next batch of each session, all of which wait for it."""
    tasks = [asyncio.create_task(session.next()) for session in sessions]
    await asyncio.sleep(0)
    return tasks


async def test_followers_at_the_same_position_get_the_same_batch(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, bodies("a", "b", "c"))
    everything, later = ReadRequest(from_seq_num(0)), ReadRequest(from_seq_num(2))
    async with (
        store.follow(BASIN, STREAM, everything) as one,
        store.follow(BASIN, STREAM, later) as other,
        store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0), count=5, wait=60.0)) as limited,
    ):
        for session in (one, other, limited):
            await live(session)
        waits = await following(one, other, limited)
        await store.append(BASIN, STREAM, bodies("d", "e", "f"))
        first, second, third = await asyncio.gather(*waits)
        assert first is second
        assert first is not None
        assert [record.body for record in first.records()] == [b"d", b"e", b"f"]
        assert third is not None
        assert [record.body for record in third.records()] == [b"d", b"e"]


async def test_what_is_more_than_a_batch_comes_in_several(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
        await live(session)
        for _ in range(3):
            await store.append(BASIN, STREAM, bodies(*["x"] * (BATCH_RECORDS_MAX // 2 + 1)))
        got: list[int] = []
        while sum(got) < 3 * (BATCH_RECORDS_MAX // 2 + 1):
            batch = await session.next()
            assert batch is not None
            assert batch.count <= BATCH_RECORDS_MAX
            got.append(batch.count)


async def test_without_a_grace_what_was_trimmed_meanwhile_is_given_to_no_follower(
    store: StreamStore,
) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
        await live(session)
        await store.append(BASIN, STREAM, bodies("a", "b"))
        await store.append(BASIN, STREAM, [trim_record(2), *bodies("c")])
        batch = await session.next()
        assert batch is not None
        assert (batch.first_seq_num, batch.count) == (2, 2)


@pytest.mark.parametrize("cipher", list(Cipher))
async def test_followers_of_a_sealed_stream_share_nothing(bench: Bench, cipher: Cipher) -> None:
    key, other = SealingKey(b"k" * 32), SealingKey(b"o" * 32)
    everything = ReadRequest(from_seq_num(0))
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(stream_cipher=cipher))
        await store.create_stream(BASIN, STREAM)
        async with (
            store.follow(BASIN, STREAM, everything, key=key) as one,
            store.follow(BASIN, STREAM, everything, key=key) as two,
            store.follow(BASIN, STREAM, everything, key=other) as stranger,
        ):
            for session in (one, two, stranger):
                await live(session)
            waits = await following(one, two, stranger)
            await store.append(BASIN, STREAM, bodies("secret"), key=key)
            first, second = await waits[0], await waits[1]
            assert first is not None
            assert second is not None
            assert first.payload() == second.payload()
            assert not {id(part) for part in first.parts} & {id(part) for part in second.parts}
            with pytest.raises(DecryptionFailedError):
                await waits[2]
