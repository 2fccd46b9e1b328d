"""Records older than the stream's retention are not returned, whatever the background has done."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import AsyncIterator

import pytest

from streamfold.errors import PositionTrimmedError, SnapshotNotFoundError, StreamDeletingError
from streamfold.model.configs import INFINITE, StreamConfigLayer, StreamReconfiguration
from streamfold.model.records import trim_record
from streamfold.store import ReadRequest, StoreSettings, from_seq_num, from_tail, from_timestamp
from streamfold.store.store import StreamStore, open_store
from tests.store.catalog.test_snapshots import publication
from tests.store.conftest import BASIN, Bench, Clock, at_rest, bodies
from tests.store.durable_streams import append, create, fork_of, read
from tests.store.log.test_trim_grace import next_seq_nums
from tests.store.many_streams import watch

HOUR = StreamConfigLayer(retention=3600)


@pytest.fixture(params=[64 << 20, 0], ids=["from-memory", "from-storage"])
async def store(bench: Bench, request: pytest.FixtureRequest) -> AsyncIterator[StreamStore]:
    """A store whose background never comes round."""
    settings = StoreSettings(upkeep_interval=1e6, recent_bytes=request.param)
    async with bench.store(settings) as opened:
        await opened.create_basin(BASIN)
        await opened.create_stream(BASIN, "hour", HOUR)
        await at_rest(opened)
        yield opened


@pytest.fixture
async def resting(store: StreamStore) -> AsyncIterator[StreamStore]:
    """The same without any pass: the first one may come late, and delete what is too old by then."""
    async with (await store._supervisor.mounted()).upkeep._turn():
        yield store


async def write_for(store: StreamStore, clock: Clock, minutes: int) -> None:
    """One record per minute; the clock stands at the last one."""
    for minute in range(minutes):
        if minute:
            clock.pass_seconds(60)
        await store.append(BASIN, "hour", bodies(f"{minute}"))


async def first_of(store: StreamStore, request: ReadRequest) -> int:
    batch = await store.read(BASIN, "hour", request)
    return batch.first_seq_num if batch.count else -1


async def test_every_read_starts_at_the_first_record_that_is_young_enough(
    store: StreamStore, clock: Clock
) -> None:
    await write_for(store, clock, 50)
    clock.pass_seconds(11 * 60 + 1)  # the record of minute 0 is 3601 s old
    for start in (from_seq_num(0), from_timestamp(0), from_tail(1000)):
        assert await first_of(store, ReadRequest(start)) == 1
    clock.pass_seconds(20 * 60)
    assert await first_of(store, ReadRequest(from_seq_num(5))) == 21
    clock.pass_seconds(3600)
    assert await first_of(store, ReadRequest(from_seq_num(0))) == -1
    await store.append(BASIN, "hour", bodies("new"))
    assert await first_of(store, ReadRequest(from_seq_num(0))) == 50


async def test_a_record_of_exactly_the_age_is_returned(store: StreamStore, clock: Clock) -> None:
    await store.append(BASIN, "hour", bodies("a"))
    clock.pass_seconds(3600)
    assert await first_of(store, ReadRequest(from_seq_num(0))) == 0
    clock.now += 1
    assert await first_of(store, ReadRequest(from_seq_num(0))) == -1


@pytest.mark.parametrize("seed", range(3))
async def test_a_busy_stream_forgets_one_record_after_the_other(
    store: StreamStore, clock: Clock, seed: int
) -> None:
    """More of them than are looked up together, with pauses between their arrivals."""
    dice, arrivals = random.Random(seed), []
    for _ in range(700):
        clock.now += dice.choice([0, 1, 5, 1000])
        arrivals.append(clock.now)
        await store.append(BASIN, "hour", bodies("x"))
    clock.now = arrivals[0] + 3600_000
    while clock.now <= arrivals[-1] + 3600_000:
        young = bisect_left(arrivals, clock.now - 3600_000)
        assert await first_of(store, ReadRequest(from_seq_num(0), count=1)) == young, seed
        clock.now += dice.choice([1, 1, 7, 500, 20_000])
    assert await first_of(store, ReadRequest(from_seq_num(0), count=1)) == -1


async def test_a_reader_of_a_busy_stream_looks_up_each_chunk_about_once(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(StoreSettings(upkeep_interval=1e6)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, "hour", HOUR)
        for _ in range(400):
            clock.pass_seconds(1)
            await store.append(BASIN, "hour", bodies("x"))
        clock.pass_seconds(3600 - 400)
        await at_rest(store)
        watched = watch(bench)
        for _ in range(390):
            clock.pass_seconds(1)
            reads = [first_of(store, ReadRequest(from_tail(1))) for _ in range(5)]
            assert await asyncio.gather(*reads) == [399] * 5
    assert watched.chunks < 5 * 2 * 400  # five readers; a search for each chunk reads 18,915


async def test_a_follower_that_catches_up_late_gets_only_what_is_young_enough(
    store: StreamStore, clock: Clock
) -> None:
    await write_for(store, clock, 50)
    request = ReadRequest(from_seq_num(0))
    async with store.follow(BASIN, "hour", request) as session:
        clock.pass_seconds(30 * 60 + 1)
        assert await next_seq_nums(session, 30) == list(range(20, 50))
        await session.next()  # the heartbeat at the tail
        await store.append(BASIN, "hour", bodies("late"))
        clock.pass_seconds(3601)
        await store.append(BASIN, "hour", bodies("fresh"))
        assert await next_seq_nums(session, 1) == [51]


async def test_age_wins_over_the_grace_of_a_trim(bench: Bench, clock: Clock) -> None:
    async with bench.store(StoreSettings(upkeep_interval=1e6, trim_grace=60.0)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, "hour", StreamConfigLayer(retention=10))
        await store.append(BASIN, "hour", [*bodies("a", "b"), trim_record(1)])
        assert await first_of(store, ReadRequest(from_seq_num(0))) == 0
        clock.pass_seconds(11)
        assert await first_of(store, ReadRequest(from_seq_num(0))) == -1


async def test_a_longer_retention_brings_back_what_is_still_stored(
    resting: StreamStore, clock: Clock
) -> None:
    await write_for(resting, clock, 10)
    clock.pass_seconds(3600)
    assert await first_of(resting, ReadRequest(from_seq_num(0))) == 9
    await resting.reconfigure_stream(BASIN, "hour", StreamReconfiguration(retention=7200))
    assert await first_of(resting, ReadRequest(from_seq_num(0))) == 0
    await resting.reconfigure_stream(BASIN, "hour", StreamReconfiguration(retention=60))
    assert await first_of(resting, ReadRequest(from_seq_num(0))) == -1


async def test_durable_streams_report_and_refuse_what_is_too_old(
    store: StreamStore, clock: Clock
) -> None:
    await create(store, "s", b"0")
    await store.reconfigure_stream(BASIN, "s", StreamReconfiguration(retention=3600))
    clock.pass_seconds(1800)
    await append(store, "s", b"1")
    await store.stream(BASIN, "s").snapshots.publish(publication(1))
    clock.pass_seconds(1801)
    assert (await store.stream(BASIN, "s").status()).first == 1
    with pytest.raises(PositionTrimmedError):
        await read(store, "s", 0)
    assert await read(store, "s", 1) == [b"1"]
    assert await store.stream(BASIN, "s").snapshots.find(1) is not None
    clock.pass_seconds(1800)
    with pytest.raises(SnapshotNotFoundError):  # nothing can be followed from there
        await store.stream(BASIN, "s").snapshots.find(1)


async def test_a_fork_forgets_what_it_inherited_by_its_own_retention(
    store: StreamStore, clock: Clock
) -> None:
    await create(store, "source", b"0")
    clock.pass_seconds(1800)
    await append(store, "source", b"1")
    await create(store, "fork", b"own", fork=fork_of("source", 2))
    await store.reconfigure_stream(BASIN, "fork", StreamReconfiguration(retention=3600))
    clock.pass_seconds(1801)
    assert (await store.stream(BASIN, "fork").status()).first == 1
    assert await read(store, "fork", 1) == [b"1", b"own"]
    assert await read(store, "source", 0) == [b"0", b"1"]
    await store.upkeep()
    assert await read(store, "fork", 1) == [b"1", b"own"]
    with pytest.raises(PositionTrimmedError):
        await read(store, "fork", 0)


async def test_a_fork_does_not_revive_what_is_too_old_in_its_source(
    resting: StreamStore, clock: Clock
) -> None:
    await create(resting, "source", b"0")
    await resting.reconfigure_stream(BASIN, "source", StreamReconfiguration(retention=3600))
    clock.pass_seconds(3000)
    await append(resting, "source", b"1")
    clock.pass_seconds(1000)
    status, _ = await create(resting, "fork", fork=fork_of("source", 2))
    assert (status.first, status.tail) == (1, 2)
    await resting.reconfigure_stream(BASIN, "source", StreamReconfiguration(retention=INFINITE))
    assert await read(resting, "source", 0) == [b"0", b"1"]
    with pytest.raises(PositionTrimmedError):
        await read(resting, "fork", 0)


@pytest.mark.parametrize("emptied", ["never-written", "expired", "trimmed", "reconfigured"])
async def test_an_empty_stream_is_deleted_when_its_time_comes_not_at_the_next_round(
    emptied: str,
) -> None:
    """The background sleeps for an hour otherwise; the clock is real, the ages a second."""
    age = StreamConfigLayer(
        retention=1 if emptied == "expired" else INFINITE, delete_on_empty_secs=1
    )
    later = StreamReconfiguration(delete_on_empty_secs=1)
    settings = StoreSettings(upkeep_interval=3600, trim_grace=0.1)
    async with open_store("memory:", settings) as store:
        await store.create_basin(BASIN)
        await store.upkeep()
        await store.create_stream(
            BASIN, "s", StreamConfigLayer() if emptied == "reconfigured" else age
        )
        if emptied in ("expired", "trimmed"):
            await store.append(BASIN, "s", bodies("a"))
        if emptied == "trimmed":
            await store.append(BASIN, "s", [trim_record(2)])
        if emptied == "reconfigured":
            await store.reconfigure_stream(BASIN, "s", later)
        async with (
            asyncio.timeout(60),
            store.follow(BASIN, "s", ReadRequest(from_tail())) as session,
        ):
            with pytest.raises(StreamDeletingError):  # followers get the error when it happens
                await next_seq_nums(session, 1000)
