"""Lifetimes: a stream never ends early, and an ended one leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from streamfold.errors import AlreadyExistsError, StreamNotFoundError
from streamfold.model.records import Record
from streamfold.store import ReadRequest, from_seq_num
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, EPOCH, Bench, Clock
from tests.store.durable_streams import append, create, read


async def gone(store: StreamStore, stream: str = "s") -> bool:
    try:
        await store.stream(BASIN, stream).status()
    except StreamNotFoundError:
        return True
    return False


async def test_use_keeps_a_stream_alive_and_looking_does_not(
    store: StreamStore, clock: Clock
) -> None:
    await create(store, "s", b"0", ttl=100)
    for use in (lambda: read(store, "s"), lambda: append(store, "s", b"x")):
        clock.pass_seconds(99)
        await use()
    clock.pass_seconds(99)
    assert not await gone(store)
    clock.pass_seconds(1)
    assert await gone(store)
    with pytest.raises(StreamNotFoundError):
        await append(store, "s", b"late")
    with pytest.raises(StreamNotFoundError):
        await store.append(BASIN, "s", [Record(b"late")])


async def read_as_s2(store: StreamStore) -> None:
    await store.read(BASIN, "s", ReadRequest(from_seq_num(0)))


async def follow_as_s2(store: StreamStore) -> None:
    async with store.follow(BASIN, "s", ReadRequest(from_seq_num(0))) as reader:
        await reader.next()


@pytest.mark.parametrize("use", [read_as_s2, follow_as_s2])
async def test_reads_by_seq_num_keep_a_stream_alive_also_after_a_restart(
    bench: Bench, clock: Clock, use: Callable[[StreamStore], Awaitable[None]]
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s", b"0", ttl=100)
        for _ in range(2):
            clock.pass_seconds(99)
            await use(store)
    async with bench.store() as store:
        clock.pass_seconds(99)
        assert not await gone(store)


async def test_a_stream_that_is_never_used_ends_in_time(store: StreamStore, clock: Clock) -> None:
    await create(store, "s", b"0", ttl=100)
    clock.pass_seconds(99)
    assert not await gone(store)
    clock.pass_seconds(1)
    assert await gone(store)


async def test_closing_is_use_as_well(store: StreamStore, clock: Clock) -> None:
    await create(store, "s", ttl=100)
    clock.pass_seconds(99)
    await append(store, "s", close=True)
    clock.pass_seconds(99)
    assert not await gone(store)


async def test_a_moment_of_expiry_never_moves(store: StreamStore, clock: Clock) -> None:
    await create(store, "s", b"0", expires_at=EPOCH + 100_000)
    clock.pass_seconds(99)
    await read(store, "s")
    await append(store, "s", b"1")
    clock.pass_seconds(1)
    assert await gone(store)


@pytest.mark.parametrize("seconds", [1, 20, 26, 60, 99])
async def test_a_restart_never_ends_a_stream_early(
    bench: Bench, clock: Clock, seconds: int
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s", b"0", ttl=100)
        for _ in range(3):
            clock.pass_seconds(seconds)
            await read(store, "s")
    clock.pass_seconds(99)
    async with bench.store() as store:
        assert not await gone(store)
        clock.pass_seconds(1 + 25)  # a quarter of the ttl is how much longer it may live
        assert await gone(store)


async def test_a_read_that_extends_a_life_is_answered_when_that_is_durable(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s", b"0", ttl=100)
        clock.pass_seconds(50)
        bench.engine.hold()
        reading = asyncio.create_task(read(store, "s"))
        done, _ = await asyncio.wait({reading}, timeout=0.2)
        assert not done
        bench.engine.resume()
        assert await reading == [b"0"]


async def test_upkeep_sweeps_what_is_over(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s", b"0", ttl=100)
        await append(store, "s", b"1", producer=("p", 0, 0))
        await create(store, "t", b"0", expires_at=EPOCH + 100_000)
        clock.pass_seconds(100)
        await store.upkeep()
        await store.upkeep()
        assert (await store.list_streams(BASIN)).items == ()
        left = {
            key[:1] async for page in bench.engine.scan(b"\x02", b"\x05") for key, _ in page
        } | {key[:1] async for page in bench.engine.scan(b"\x0b", b"\x0e") for key, _ in page}
        assert left == set()


async def test_upkeep_does_not_delete_what_replaced_an_expired_stream(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s", b"old", ttl=100)
        clock.pass_seconds(100)
        await asyncio.gather(create(store, "s", b"new", ttl=100), store.upkeep())
        assert await read(store, "s") == [b"new"]


@pytest.mark.parametrize("way", ["deleted", "expired"])
async def test_a_name_that_is_used_again_is_another_stream(
    bench: Bench, clock: Clock, way: str
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        first, _ = await create(store, "s", b"old", ttl=100)
        await append(store, "s", b"old", producer=("p", 5, 0), seq="z", close=True)
        if way == "deleted":
            await store.stream(BASIN, "s").delete()
        else:
            clock.pass_seconds(100)
        second, created = await create(store, "s", b"new", content_type="text/plain")
        assert created
        assert second.id != first.id
        assert await read(store, "s") == [b"new"]
        assert not second.closed
        await store.upkeep()
    async with bench.store() as store:
        await store.upkeep()
        assert await read(store, "s") == [b"new"]
        status = await store.stream(BASIN, "s").status()
        assert (status.id, status.traits.content_type) == (second.id, "text/plain")


async def test_creation_is_repeatable_and_another_one_is_refused(store: StreamStore) -> None:
    _, created = await create(store, "s", b"0", ttl=10)
    _, again = await create(store, "s", b"ignored", ttl=10)
    assert (created, again) == (True, False)
    for other in ({"ttl": 11}, {}, {"ttl": 10, "closed": True}, {"ttl": 10, "content_type": "a/b"}):
        with pytest.raises(AlreadyExistsError):
            await create(store, "s", **other)
    assert await read(store, "s") == [b"0"]


async def test_racing_creations_make_one_stream(store: StreamStore) -> None:
    made = await asyncio.gather(*(create(store, "s", b"0") for _ in range(20)))
    assert sum(created for _, created in made) == 1
    assert len({status.id for status, _ in made}) == 1
    assert await read(store, "s") == [b"0"]


async def test_ttl_zero_is_over_at_once(store: StreamStore) -> None:
    await create(store, "s", ttl=0)
    assert await gone(store)
