"""Changes of a caller that goes away happen completely or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from streamfold.errors import StreamDeletingError, StreamNotFoundError
from streamfold.model.configs import INFINITE, StreamReconfiguration
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, STREAM, Bench, bodies


async def cancelled_while_written(bench: Bench, change: Coroutine[Any, Any, object]) -> None:
    """Start `change`, and cancel it when its commit is on its way; it stays there until resumed."""
    bench.engine.hold()
    task = asyncio.create_task(change)
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stream_whose_creator_went_is_not_created_again_over_its_records(
    store: StreamStore, bench: Bench
) -> None:
    await cancelled_while_written(bench, store.ensure_stream(BASIN, "new"))
    again = asyncio.create_task(store.ensure_stream(BASIN, "new"))
    await asyncio.sleep(0)
    bench.engine.resume()
    while True:
        try:
            await store.append(BASIN, "new", bodies("a"))
            break
        except StreamNotFoundError:
            await asyncio.sleep(0)
    await again
    await store.append(BASIN, "new", bodies("b"))
    async with bench.store() as restarted:
        assert (await restarted.check_tail(BASIN, "new")).seq_num == 2


async def test_a_reconfiguration_whose_caller_went_holds_for_appends_and_after_a_restart(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    change = StreamReconfiguration(retention=INFINITE)
    await cancelled_while_written(bench, store.reconfigure_stream(BASIN, STREAM, change))
    bench.engine.resume()
    unchanged = await store.reconfigure_stream(BASIN, STREAM, StreamReconfiguration())
    assert unchanged.retention == INFINITE
    async with bench.store() as restarted:
        assert (await restarted.stream_config(BASIN, STREAM)).retention == INFINITE


async def test_a_deletion_whose_caller_went_is_finished(store: StreamStore, bench: Bench) -> None:
    await cancelled_while_written(bench, store.delete_stream(BASIN, STREAM))
    bench.engine.resume()
    with pytest.raises((StreamDeletingError, StreamNotFoundError)):
        await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    await store.create_stream(BASIN, STREAM)
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 0


async def test_a_store_closes_while_a_change_without_its_caller_is_on_its_way(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await cancelled_while_written(bench, store.create_stream(BASIN, STREAM))
        bench.engine.resume()
    async with bench.store() as store:
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 0
