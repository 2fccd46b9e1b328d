"""A stream has one log in memory, and that log is the stream's: whatever happens while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamfold.errors import InvalidError, StreamForkedError, StreamNotFoundError
from streamfold.model.configs import (
    StreamConfigLayer,
    StreamReconfiguration,
    TimestampMode,
)
from streamfold.model.names import StreamRef
from streamfold.store import keys
from streamfold.store.mount import Mount
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import HeldRead
from tests.store.conftest import BASIN, STREAM, Bench, at_rest, bodies
from tests.store.durable_streams import append, create, fork_of, read

#: Every log leaves memory as soon as another one is used.
ONE_LOG = StoreSettings(idle_streams=1, trim_grace=0, upkeep_interval=1e6)


@pytest.fixture
async def store(bench: Bench) -> AsyncIterator[StreamStore]:
    async with bench.store(ONE_LOG) as opened:
        await opened.create_basin(BASIN)
        await at_rest(opened)
        yield opened


def mount_of(store: StreamStore) -> Mount:
    assert store._supervisor.current is not None
    return store._supervisor.current.mount


async def evict(store: StreamStore, *streams: str) -> None:
    """Drop the logs of `streams` from memory by using another stream."""
    await create(store, "other", b"x")
    assert not any(mount_of(store).log_in_memory(StreamRef.parse(BASIN, s)) for s in streams)


async def hold_load(store: StreamStore, bench: Bench, stream: str) -> HeldRead:
    """Hold back what the next load of a stream reads last: its state."""
    row = await mount_of(store).stream(StreamRef.parse(BASIN, stream))
    assert row is not None
    return bench.engine.hold_read(keys.state(row.id))


async def test_a_name_that_is_reused_while_the_old_stream_is_read_is_the_new_streams(
    store: StreamStore, bench: Bench
) -> None:
    old, _ = await create(store, "a", b"old")
    await create(store, "fork", b"x", fork=fork_of("a", 1))
    await store.stream(BASIN, "a").delete()  # the fork still needs it
    with pytest.raises(StreamForkedError):
        await store.stream(BASIN, "a").status()
    await evict(store, "a")
    held = await hold_load(store, bench, "a")
    late = asyncio.create_task(store.stream(BASIN, "a").status())
    await held.answered.wait()
    await store.stream(BASIN, "fork").delete()
    for _ in range(3):  # the fork, then what it came from, then its name
        await store.upkeep()
    assert await bench.engine.get(keys.stream(BASIN, "a")) is None
    committed = asyncio.Event()
    store.on_commit(lambda report: committed.set())
    creation = asyncio.create_task(create(store, "a", b"new", b"er"))
    await committed.wait()
    await mount_of(store).committer.write([])  # after it, the creation waits for the log, too
    held.release.set()
    status, created = await creation
    assert created
    assert status.id != old.id
    assert (await late).id == status.id
    assert await read(store, "a") == [b"new", b"er"]


async def test_a_stream_that_is_removed_while_it_is_read_is_not_found(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "a", b"old")
    await create(store, "fork", b"x", fork=fork_of("a", 1))
    await store.stream(BASIN, "a").delete()
    await evict(store, "a")
    held = await hold_load(store, bench, "a")
    late = asyncio.create_task(store.stream(BASIN, "a").status())
    await held.answered.wait()
    await store.stream(BASIN, "fork").delete()
    for _ in range(3):
        await store.upkeep()
    held.release.set()
    with pytest.raises(StreamNotFoundError):
        await late
    assert mount_of(store).log_in_memory(StreamRef.parse(BASIN, "a")) is None


async def test_a_purge_whose_caller_is_cancelled_still_frees_the_name(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "a", b"old")
    assert store._supervisor.current is not None
    ref, catalog = StreamRef.parse(BASIN, "a"), store._supervisor.current.catalog
    await catalog.delete_stream(ref)
    held = bench.engine.hold_read(keys.stream(*ref))
    upkeep = asyncio.create_task(store.upkeep())
    await held.answered.wait()
    upkeep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upkeep
    held.release.set()
    await catalog.deletion(ref)  # waits for the lock of the name
    assert mount_of(store).log_in_memory(ref) is None
    assert (await create(store, "a", b"new"))[1]
    assert await read(store, "a") == [b"new"]


async def test_a_stream_that_is_created_while_it_is_looked_for_exists_for_its_creator(
    store: StreamStore, bench: Bench
) -> None:
    held = bench.engine.hold_read(keys.stream(BASIN, "a"))
    early = asyncio.create_task(store.stream(BASIN, "a").status())
    await held.answered.wait()
    committed = asyncio.Event()
    store.on_commit(lambda report: committed.set())
    creation = asyncio.create_task(create(store, "a", b"x"))
    await committed.wait()
    await mount_of(store).committer.write([])  # after it, the creation waits for the log, too
    held.release.set()
    status, created = await creation
    assert created
    assert (await early).id == status.id


async def test_a_configuration_that_changes_while_the_stream_is_read_applies(
    store: StreamStore, bench: Bench
) -> None:
    await store.create_stream(BASIN, STREAM, StreamConfigLayer())
    await store.append(BASIN, STREAM, bodies("a"))
    await evict(store, STREAM)
    held = await hold_load(store, bench, STREAM)
    tail = asyncio.create_task(store.check_tail(BASIN, STREAM))
    await held.answered.wait()
    required = StreamReconfiguration(timestamp_mode=TimestampMode.CLIENT_REQUIRE)
    await store.reconfigure_stream(BASIN, STREAM, required)
    held.release.set()
    assert (await tail).seq_num == 1
    with pytest.raises(InvalidError, match="timestamp"):
        await store.append(BASIN, STREAM, bodies("without a timestamp"))


async def test_callers_that_wait_together_for_a_log_keep_it_in_memory(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "a", b"x")
    await evict(store, "a")
    ref, mount = StreamRef.parse(BASIN, "a"), mount_of(store)
    held = await hold_load(store, bench, "a")
    waiting = [asyncio.create_task(mount.lease(ref)) for _ in range(3)]
    await held.answered.wait()
    waiting[1].cancel()
    held.release.set()
    first, second, third = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(second, asyncio.CancelledError)
    assert not isinstance(first, BaseException)
    assert not isinstance(third, BaseException)
    assert first.log is third.log
    first.release()
    await append(store, "other", b"y")
    assert mount.log_in_memory(ref) is third.log
    third.release()
    await append(store, "other", b"z")
    await create(store, "another", b"x")
    assert mount.log_in_memory(ref) is None
