"""No stream remains in a deleted basin."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from streamfold.errors import (
    BasinDeletingError,
    BasinNotFoundError,
    OutcomeUnknownError,
    StoreRecoveringError,
    StreamNotFoundError,
)
from streamfold.records.batch import RecordBatch
from streamfold.store import ReadRequest, from_tail, keys, rows
from streamfold.store.engine.engine import WriteBatch, commit_rows
from streamfold.store.rows import BasinRow
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, STREAM, Bench, bodies, until
from tests.store.durable_streams import append, create
from tests.store.many_streams import QUIET


async def streams_left(bench: Bench, store: StreamStore) -> list[bytes]:
    """Keys of the streams that storage has after the background's work."""
    for _ in range(4):
        await store.upkeep()
    span = keys.STREAMS_START, keys.STREAMS_END
    return [key async for page in bench.engine.scan(*span) for key, _ in page]


async def test_a_stream_that_is_on_its_way_when_its_basin_is_deleted_is_not_created(
    store: StreamStore, bench: Bench
) -> None:
    await store.delete_stream(BASIN, "orders")
    assert await streams_left(bench, store) == []
    commit, released = bench.engine.inner.commit, asyncio.Event()

    async def commit_slowly(batch: WriteBatch) -> None:
        if any(key == keys.stream(BASIN, "late") for key, _ in batch.ops):
            await released.wait()
        await commit(batch)

    bench.engine.inner.commit = commit_slowly  # type: ignore[method-assign]
    bench.engine.hold()
    deletion = asyncio.create_task(store.delete_basin(BASIN))
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    creation = asyncio.create_task(store.create_stream(BASIN, "late"))
    mounted = await store._supervisor.mounted()
    lock, commits = mounted.catalog.locks._locks[BASIN,], mounted.mount.committer._under_way
    await until(lambda: lock.users == 2 or len(commits) == 2)  # behind the deletion, in some way
    bench.engine.resume()
    await deletion
    await asyncio.sleep(0.3)  # the background looks for streams of the basin
    released.set()
    with pytest.raises(BasinDeletingError):
        await creation
    assert await streams_left(bench, store) == []
    with pytest.raises(BasinNotFoundError):
        await store.basin_config(BASIN)


async def test_a_stream_whose_basin_is_deleted_while_it_is_prepared_is_not_created(
    store: StreamStore, bench: Bench
) -> None:
    begun, deleted = asyncio.Event(), asyncio.Event()

    async def slow_content(content_type: str) -> list[RecordBatch]:
        begun.set()
        await deleted.wait()
        return []

    creation = asyncio.create_task(create(store, "late", content=slow_content))
    await begun.wait()
    await store.delete_basin(BASIN)
    assert await streams_left(bench, store) == []
    deleted.set()
    with pytest.raises((BasinDeletingError, BasinNotFoundError)):
        await creation
    assert await streams_left(bench, store) == []


async def test_a_deleted_basin_takes_no_append_and_no_read_from_then_on(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    await create(store, "durable", b"a")
    upkeep = (await store._supervisor.mounted()).upkeep
    async with upkeep._turn():  # or the background may be done with it before the test is
        await _refused_during_and_after_a_deletion(store, bench)


async def _refused_during_and_after_a_deletion(store: StreamStore, bench: Bench) -> None:
    bench.engine.hold()
    before = asyncio.create_task(store.append(BASIN, STREAM, bodies("b")))
    async with asyncio.timeout(60):
        while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
    deletion = asyncio.create_task(store.delete_basin(BASIN))
    await asyncio.sleep(0)
    late = asyncio.create_task(store.append(BASIN, STREAM, bodies("c")))
    reading = asyncio.create_task(store.check_tail(BASIN, STREAM))
    await asyncio.sleep(0)
    # A refusal waits for the state that it depends on.
    assert not late.done()
    assert not reading.done()
    bench.engine.resume()
    assert (await before).end.seq_num == 2
    await deletion
    with pytest.raises(BasinDeletingError):
        await late
    with pytest.raises(BasinDeletingError):
        await reading
    with pytest.raises(BasinDeletingError):
        await append(store, "durable", b"b")
    with pytest.raises(BasinDeletingError):
        await store.check_tail(BASIN, STREAM)
    with pytest.raises(BasinDeletingError):
        await store.create_stream(BASIN, "new")
    with pytest.raises(BasinDeletingError):
        await create(store, "new", b"a")


async def test_a_follower_of_a_deleted_basin_ends(store: StreamStore) -> None:
    async with store.follow(BASIN, STREAM, ReadRequest(from_tail(0))) as session:
        await session.next()  # the heartbeat at the tail
        waiting = asyncio.create_task(session.next())
        await asyncio.sleep(0)
        await store.delete_basin(BASIN)
        with pytest.raises(BasinDeletingError):
            await waiting


async def test_a_deleted_basin_takes_no_append_after_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("a"))
        row = rows.decode(await bench.engine.get(keys.basin(BASIN)) or b"", BasinRow)
    async with bench.store() as store:
        deleted = msgspec.structs.replace(row, deleted_at=bench.clock.now)
        await commit_rows(bench.engine, [(keys.basin(BASIN), rows.encode(deleted))])
    async with bench.store(QUIET) as store:
        bench.engine.hold()  # or the background may be done with it before the test is
        late = asyncio.create_task(store.append(BASIN, STREAM, bodies("b")))
        await asyncio.sleep(0.05)
        bench.engine.resume()
        with pytest.raises((BasinDeletingError, BasinNotFoundError, StreamNotFoundError)):
            await late


async def test_a_basin_that_is_created_again_takes_streams(store: StreamStore) -> None:
    await store.delete_basin(BASIN)
    for _ in range(4):
        await store.upkeep()
    await store.create_basin(BASIN)
    await store.create_stream(BASIN, STREAM)
    assert (await store.append(BASIN, STREAM, bodies("a"))).start.seq_num == 0


@pytest.mark.parametrize("deleted", ["basin", "stream"])
async def test_an_append_is_not_refused_because_of_a_deletion_that_failed(
    store: StreamStore, bench: Bench, deleted: str
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    bench.engine.hold()
    bench.engine.fail_next(CommitFault.BEFORE)
    change = store.delete_basin(BASIN) if deleted == "basin" else store.delete_stream(BASIN, STREAM)
    deletion = asyncio.create_task(change)
    async with asyncio.timeout(60):
        while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
    late = asyncio.create_task(store.append(BASIN, STREAM, bodies("b")))
    await asyncio.sleep(0)
    bench.engine.resume()
    with pytest.raises(OutcomeUnknownError):
        await deletion
    with pytest.raises(StoreRecoveringError):
        await late
    assert (await store.append(BASIN, STREAM, bodies("b"))).end.seq_num == 2
