"""How long trimmed records remain readable and stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamfold.errors import PositionTrimmedError
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record, trim_record
from streamfold.store import ReadRequest, StoreSettings, from_seq_num, from_tail
from streamfold.store.read.reader import Reader
from streamfold.store.store import StreamStore
from tests.store.catalog.test_snapshots import publication
from tests.store.conftest import BASIN, STREAM, Bench, Clock, at_rest, bodies
from tests.store.durable_streams import append, create, fork_of, read
from tests.store.upkeep.test_upkeep import first_seq_num, stored_chunks

GRACE = 10.0
#: Batches as bodies, and where a trim command at their end trims to; None = no trim.
batches = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 40)), max_size=12)


@pytest.fixture(params=[64 << 20, 0], ids=["from-memory", "from-storage"])
async def store(bench: Bench, request: pytest.FixtureRequest) -> AsyncIterator[StreamStore]:
    settings = StoreSettings(trim_grace=GRACE, recent_bytes=request.param)
    async with bench.store(settings) as opened:
        await opened.create_basin(BASIN)
        await opened.create_stream(BASIN, STREAM)
        await at_rest(opened)
        yield opened


async def next_seq_nums(session: Reader, count: int) -> list[int]:
    got: list[int] = []
    async with asyncio.timeout(60):
        while len(got) < count:
            batch = await session.next()
            assert batch is not None
            got += [int(record.seq_num) for record in batch.records()]
    return got


async def test_a_follower_at_the_tail_gets_the_records_that_come_with_their_trim(
    store: StreamStore,
) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_tail())) as session:
        await session.next()  # the heartbeat at the tail
        await store.append(BASIN, STREAM, [*bodies("a", "b"), trim_record(2)])
        assert await next_seq_nums(session, 3) == [0, 1, 2]


async def test_a_reader_that_opens_within_the_grace_gets_what_was_trimmed_and_not_after_it(
    store: StreamStore, clock: Clock
) -> None:
    await store.append(BASIN, STREAM, [*bodies("a", "b"), trim_record(2)])
    clock.pass_seconds(GRACE - 0.1)
    await store.upkeep()
    assert await first_seq_num(store, STREAM) == 0
    clock.pass_seconds(0.1)
    assert await first_seq_num(store, STREAM) == 2
    clock.pass_seconds(-60)  # what was taken back once does not return
    assert await first_seq_num(store, STREAM) == 2


async def test_storage_keeps_trimmed_records_for_the_grace_and_no_longer(
    store: StreamStore, clock: Clock, bench: Bench
) -> None:
    for _ in range(3):
        await store.append(BASIN, STREAM, bodies("a"))
    await store.append(BASIN, STREAM, [trim_record(3)])
    await store.upkeep()
    assert await stored_chunks(bench) == 4
    clock.pass_seconds(GRACE)
    await store.upkeep()
    assert await stored_chunks(bench) == 1


async def test_the_background_deletes_when_the_grace_is_over_without_being_asked(
    bench: Bench,
) -> None:
    clock = bench.clock
    async with bench.store(StoreSettings(trim_grace=0.3, upkeep_interval=3600)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, [*bodies("a", "b"), trim_record(3)])
        clock.pass_seconds(1)
        async with asyncio.timeout(60):
            while await stored_chunks(bench):  # noqa: ASYNC110 - storage has no event
                await asyncio.sleep(0.05)


async def test_a_restart_within_the_grace_applies_the_trim(bench: Bench) -> None:
    async with bench.store(StoreSettings(trim_grace=GRACE)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, [*bodies("a", "b"), trim_record(2)])
    async with bench.store(StoreSettings(trim_grace=GRACE)) as store:
        assert await first_seq_num(store, STREAM) == 2


async def test_trims_one_after_the_other_take_effect_each_in_its_time(
    store: StreamStore, clock: Clock
) -> None:
    for number in range(1, 6):
        await store.append(BASIN, STREAM, [Record(b"x"), trim_record(2 * number)])
        clock.pass_seconds(3)
    assert await first_seq_num(store, STREAM) == 4
    clock.pass_seconds(3)
    assert await first_seq_num(store, STREAM) == 6


async def test_a_stream_within_a_grace_is_not_deleted_as_empty(
    store: StreamStore, clock: Clock
) -> None:
    await store.create_stream(BASIN, "brief", StreamConfigLayer(delete_on_empty_secs=1))
    await store.append(BASIN, "brief", [*bodies("a"), trim_record(2)])
    clock.pass_seconds(2)
    await store.upkeep()
    assert await first_seq_num(store, "brief") == 0


async def test_a_trim_that_a_snapshot_stands_for_is_in_effect_at_once(store: StreamStore) -> None:
    await create(store, "s", b"0")
    for number in range(1, 4):
        await append(store, "s", b"%d" % number)
    await store.stream(BASIN, "s").snapshots.publish(publication(3))
    await store.append(BASIN, "s", [trim_record(1)])
    assert await read(store, "s", 0) == [b"0", b"1", b"2", b"3", (1).to_bytes(8, "big")]
    await store.stream(BASIN, "s").snapshots.retain(2, whole_appends=True)
    with pytest.raises(PositionTrimmedError):
        await read(store, "s", 1)
    assert (await store.stream(BASIN, "s").status()).first == 2


async def test_a_position_within_a_grace_is_reported_as_trimmed_and_cannot_be_forked(
    store: StreamStore,
) -> None:
    await create(store, "a", b"0")
    await append(store, "a", b"1")
    await store.append(BASIN, "a", [trim_record(1)])
    assert (await store.stream(BASIN, "a").status()).first == 1
    assert (await read(store, "a", 0))[:2] == [b"0", b"1"]
    with pytest.raises(PositionTrimmedError):
        await create(store, "b", fork=fork_of("a", 0))


@given(batches)
async def test_an_open_follower_gets_every_acknowledged_record_whatever_is_trimmed(
    written: list[tuple[int, int | None]],
) -> None:
    async with Bench(Clock()).store(StoreSettings(trim_grace=GRACE, recent_bytes=650)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
            tail = 0
            for count, trim in written:
                records = [Record(b"x" * 20)] * count
                records += [] if trim is None else [trim_record(trim)]
                tail = (await store.append(BASIN, STREAM, records)).end.seq_num
                if count == 1:
                    await store.upkeep()
            assert await next_seq_nums(session, tail) == list(range(tail))


async def test_a_trimmed_source_keeps_what_readers_of_its_fork_get_within_the_grace(
    store: StreamStore, clock: Clock, bench: Bench
) -> None:
    for number in range(6):
        await append(store, STREAM, b"%d" % number)
    await create(store, "fork", fork=fork_of(STREAM))
    await store.append(BASIN, STREAM, [trim_record(6)])
    clock.pass_seconds(GRACE)
    await store.append(BASIN, "fork", [trim_record(6)])
    await store.upkeep()
    assert len(await read(store, "fork")) == 7
    clock.pass_seconds(GRACE)
    await store.upkeep()
    assert await first_seq_num(store, "fork") == 6
    assert await stored_chunks(bench) == 2
