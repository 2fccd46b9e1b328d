from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import InvalidError, PositionUnwrittenError, StreamDeletingError
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record, trim_record
from streamfold.store.read.requests import (
    ReadBatch,
    ReadRequest,
    from_seq_num,
    from_tail,
    from_timestamp,
)
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, EPOCH, STREAM, Bench, Clock, at, bodies


def seq_nums(batch: ReadBatch) -> list[int]:
    return [int(record.seq_num) for record in batch.records()]


@pytest.fixture
async def filled(store: StreamStore) -> StreamStore:
    """A stream of 30 records in batches of 1 to 7, with timestamps 0, 10, 20, ..."""
    await store.create_stream(BASIN, "filled", StreamConfigLayer(timestamp_uncapped=True))
    start = 0
    for size in (1, 2, 3, 4, 5, 6, 7, 2):
        records = [
            Record(b"%03d" % number, timestamp=number * 10) for number in range(start, start + size)
        ]
        await store.append(BASIN, "filled", records)
        start += size
    assert start == 30
    return store


async def read(store: StreamStore, request: ReadRequest) -> list[int]:
    return seq_nums(await store.read(BASIN, "filled", request))


async def test_a_read_starts_at_a_seq_num_a_time_or_before_the_tail(filled: StreamStore) -> None:
    for seq_num in range(30):
        assert await read(filled, ReadRequest(from_seq_num(seq_num))) == list(range(seq_num, 30))
        at = ReadRequest(from_timestamp(seq_num * 10))
        assert await read(filled, at) == list(range(seq_num, 30))
        just_before = ReadRequest(from_timestamp(max(0, seq_num * 10 - 1)))
        assert await read(filled, just_before) == list(range(seq_num, 30))
        before_tail = ReadRequest(from_tail(30 - seq_num))
        assert await read(filled, before_tail) == list(range(seq_num, 30))
    assert await read(filled, ReadRequest(from_tail(1000))) == list(range(30))


async def test_a_read_from_storage_gives_the_same_as_one_from_memory(bench: Bench) -> None:
    async with bench.store(StoreSettings(recent_bytes=0)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for number in range(50):
            await store.append(BASIN, STREAM, bodies(str(number)))
        batch = await store.read(BASIN, STREAM, ReadRequest(from_seq_num(10)))
        assert seq_nums(batch) == list(range(10, 50))
        assert [record.body for record in batch.records()][:2] == [b"10", b"11"]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 29, 30, 31, 5000])
async def test_count_is_kept_exactly(filled: StreamStore, count: int) -> None:
    expected = list(range(3, 30))[:count]
    assert await read(filled, ReadRequest(from_seq_num(3), count=count)) == expected


@pytest.mark.parametrize("size", [0, 10, 11, 21, 22, 23, 110, 10_000_000])
async def test_bytes_are_never_exceeded(filled: StreamStore, size: int) -> None:
    expected = list(range(3, 30))[: size // 11]  # a record here is metered as 8 + 3
    assert await read(filled, ReadRequest(from_seq_num(3), bytes=size)) == expected


@pytest.mark.parametrize("until", [1, 10, 11, 155, 10_000])
async def test_until_stops_before_the_first_record_of_that_time(
    filled: StreamStore, until: int
) -> None:
    expected = [number for number in range(30) if number * 10 < until]
    assert await read(filled, ReadRequest(from_seq_num(0), until=until)) == expected


async def test_a_read_may_not_ask_for_nothing_or_for_negative_amounts() -> None:
    with pytest.raises(InvalidError, match="until must be larger"):
        ReadRequest(from_timestamp(10), until=10)
    with pytest.raises(InvalidError, match="count -1"):
        ReadRequest(from_seq_num(0), count=-1)
    with pytest.raises(InvalidError, match="64-bit"):
        from_seq_num(2**64)


async def test_a_read_at_or_beyond_the_tail_says_where_the_tail_is(filled: StreamStore) -> None:
    tail = at(30, 290)
    for start in (from_seq_num(30), from_seq_num(31), from_timestamp(291), from_tail(0)):
        with pytest.raises(PositionUnwrittenError) as caught:
            await filled.read(BASIN, "filled", ReadRequest(start))
        assert (caught.value.tail_seq_num, caught.value.tail_timestamp) == (30, 290)
    with pytest.raises(PositionUnwrittenError):
        await filled.read(BASIN, "filled", ReadRequest(from_seq_num(99), clamp=True))
    waiting = ReadRequest(from_seq_num(99), clamp=True, wait=0.001)
    batch = await filled.read(BASIN, "filled", waiting)
    assert (batch.count, batch.tail) == (0, tail)
    with pytest.raises(PositionUnwrittenError):
        await filled.read(BASIN, "filled", ReadRequest(from_seq_num(31), wait=1))


async def test_an_empty_stream_has_nothing_to_read(store: StreamStore) -> None:
    assert await store.check_tail(BASIN, STREAM) == at(0, 0)
    with pytest.raises(PositionUnwrittenError):
        await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0)))


async def test_a_waiting_read_gets_the_first_record_that_comes(store: StreamStore) -> None:
    request = ReadRequest(from_seq_num(0), wait=30)
    waiting = asyncio.create_task(store.read(BASIN, STREAM, request))
    await asyncio.sleep(0)
    await store.append(BASIN, STREAM, bodies("a"))
    batch = await waiting
    assert seq_nums(batch) == [0]
    assert batch.tail == at(1, EPOCH)


async def test_one_read_returns_at_most_a_thousand_records_and_a_mebibyte(
    store: StreamStore,
) -> None:
    for _ in range(3):
        await store.append(BASIN, STREAM, [Record(b"x")] * 700)
    batch = await store.read(BASIN, STREAM, ReadRequest(from_seq_num(0), count=5000))
    assert batch.count == 1000
    await store.create_stream(BASIN, "large")
    for _ in range(3):
        await store.append(BASIN, "large", [Record(b"x" * 500_000)])
    batch = await store.read(BASIN, "large", ReadRequest(from_seq_num(0), bytes=1 << 30))
    assert batch.count == 2
    assert batch.metered <= 1 << 20


async def test_reads_below_the_trim_point_start_at_the_first_record_left(
    filled: StreamStore,
) -> None:
    await filled.append(BASIN, "filled", [trim_record(12)])
    for start in (from_seq_num(0), from_seq_num(12), from_timestamp(0), from_tail(1000)):
        batch = await filled.read(BASIN, "filled", ReadRequest(start))
        assert seq_nums(batch)[0] == 12
    await filled.upkeep()
    for start in (from_seq_num(0), from_timestamp(5), from_timestamp(120)):
        batch = await filled.read(BASIN, "filled", ReadRequest(start))
        assert seq_nums(batch)[0] == 12


async def test_a_session_reads_what_is_stored_then_sends_the_tail_then_follows(
    filled: StreamStore,
) -> None:
    async with filled.follow(BASIN, "filled", ReadRequest(from_seq_num(0))) as session:
        seen: list[int] = []
        while (batch := await session.next()) is not None and batch.count:
            seen += seq_nums(batch)
            assert batch.tail == (at(30, 290) if seen[-1] == 29 else None)
        assert seen == list(range(30))
        assert batch is not None
        assert batch.tail == at(30, 290)
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        await filled.append(BASIN, "filled", bodies("new"))
        live = await following
        assert live is not None
        assert seq_nums(live) == [30]
        assert live.tail is not None
        assert live.tail.seq_num == 31


async def test_a_quiet_session_sends_the_tail_repeatedly(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_tail())) as session:
        for _ in range(3):
            batch = await session.next(heartbeat=0.001)
            assert batch is not None
            assert (batch.count, batch.tail) == (0, at(0, 0))


async def test_a_session_ends_when_its_limits_are_used_up(filled: StreamStore) -> None:
    for request, expected in (
        (ReadRequest(from_seq_num(5), count=4), [5, 6, 7, 8]),
        (ReadRequest(from_seq_num(5), bytes=25), [5, 6]),
        (ReadRequest(from_seq_num(5), until=70), [5, 6]),
        (ReadRequest(from_seq_num(5), count=0), []),
    ):
        async with filled.follow(BASIN, "filled", request) as session:
            seen = [number async for batch in session for number in seq_nums(batch)]
        assert seen == expected


async def test_a_bounded_session_ends_at_the_tail_unless_it_may_wait(filled: StreamStore) -> None:
    async with filled.follow(BASIN, "filled", ReadRequest(from_seq_num(28), count=9)) as session:
        assert [batch.count async for batch in session] == [2]
    request = ReadRequest(from_seq_num(28), count=3, wait=30)
    async with filled.follow(BASIN, "filled", request) as session:
        first = await session.next()
        tail = await session.next()
        assert (first and first.count, tail and tail.count) == (2, 0)
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        await filled.append(BASIN, "filled", bodies("x", "y"))
        live = await following
        assert live is not None
        assert seq_nums(live) == [30]
        assert await session.next() is None


async def test_a_session_that_may_not_wait_longer_ends(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0), wait=0.01)) as session:
        first = await session.next()
        assert first is not None
        assert first.count == 0
        assert await session.next() is None


async def test_many_followers_get_every_record_in_order(store: StreamStore) -> None:
    total = 200

    async def follow() -> list[bytes]:
        seen: list[bytes] = []
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
            async for batch in session:
                seen += [record.body for record in batch.records()]
                if len(seen) == total:
                    return seen
        return seen

    followers = [asyncio.create_task(follow()) for _ in range(50)]
    for number in range(total):
        await store.append(BASIN, STREAM, bodies(str(number)))
    expected = [str(number).encode() for number in range(total)]
    for seen in await asyncio.gather(*followers):
        assert seen == expected


async def test_a_slow_follower_falls_back_to_storage_and_misses_nothing(bench: Bench) -> None:
    async with bench.store(StoreSettings(recent_bytes=2000)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
            assert await session.next() is not None
            for number in range(100):
                await store.append(BASIN, STREAM, bodies(f"{number:0100d}"))
            seen: list[int] = []
            while len(seen) < 100:
                batch = await session.next()
                assert batch is not None
                seen += seq_nums(batch)
            assert seen == list(range(100))


async def test_a_follower_whose_stream_is_deleted_gets_an_error(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
        await session.next()
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        await store.delete_stream(BASIN, STREAM)
        with pytest.raises(StreamDeletingError):
            await following


async def test_a_follower_that_is_trimmed_away_continues_at_the_first_record_left(
    bench: Bench,
) -> None:
    async with bench.store(StoreSettings(recent_bytes=0, trim_grace=0)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for number in range(5):
            await store.append(BASIN, STREAM, bodies(str(number)))
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
            first = await session.next()
            assert first is not None
            await store.append(BASIN, STREAM, [trim_record(6)])
            await store.append(BASIN, STREAM, bodies("x"))
            await store.upkeep()
            last = first
            while last.end_seq_num < 7:
                batch = await session.next()
                assert batch is not None
                last = batch if batch.count else last
            assert [record.body for record in last.records()][-1] == b"x"


async def test_a_cancelled_follower_leaves_nothing_behind(store: StreamStore, clock: Clock) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
        await session.next()
        following = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        await store.append(BASIN, STREAM, bodies("a"))
        batch = await session.next()
        assert batch is not None
        assert seq_nums(batch) == [0]
