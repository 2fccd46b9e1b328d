"""A stream is never left in a basin that is gone."""

from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import BasinDeletingError, BasinNotFoundError
from streamfold.records.batch import RecordBatch
from streamfold.store import keys
from streamfold.store.engine.engine import Batch
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, Bench
from tests.store.durable_streams import create


async def streams_left(bench: Bench, store: StreamStore) -> list[bytes]:
    """Keys of the streams that storage has after the background's work."""
    for _ in range(4):
        await store.upkeep()
    span = keys.STREAMS_START, keys.STREAMS_END
    return [key async for page in bench.engine.scan(*span) for key, _ in page]


async def test_a_stream_that_is_on_its_way_when_its_basin_is_deleted_is_deleted_too(
    store: StreamStore, bench: Bench
) -> None:
    await store.delete_stream(BASIN, "orders")
    assert await streams_left(bench, store) == []
    commit, released = bench.engine.inner.commit, asyncio.Event()

    async def commit_slowly(batch: Batch) -> None:
        if any(key == keys.stream(BASIN, "late") for key, _ in batch.ops):
            await released.wait()
        await commit(batch)

    bench.engine.inner.commit = commit_slowly  # type: ignore[method-assign]
    bench.engine.hold()
    deletion = asyncio.create_task(store.delete_basin(BASIN))
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    creation = asyncio.create_task(store.create_stream(BASIN, "late"))
    await asyncio.sleep(0.05)
    bench.engine.resume()
    await deletion
    await asyncio.sleep(0.3)  # the background looks for streams of the basin
    released.set()
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
