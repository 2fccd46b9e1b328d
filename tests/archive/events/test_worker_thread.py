from __future__ import annotations

import asyncio
import threading

import pytest

from streamfold.archive.events.sink import WorkerThread


async def test_a_call_begins_only_when_a_cancelled_one_has_ended() -> None:
    thread = WorkerThread("test")
    begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        begun.set()
        assert may_end.wait(300)
        order.append("first")

    cancelled = asyncio.create_task(thread.run(first))
    assert await asyncio.to_thread(begun.wait, 300)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    second = asyncio.create_task(thread.run(order.append, "second"))
    await asyncio.to_thread(lambda: None)  # other threads go on
    may_end.set()
    await second
    assert order == ["first", "second"]
    await thread.close()


async def test_worker_threads_do_not_wait_for_each_other() -> None:
    held = threading.Event()
    stuck = [WorkerThread(f"stuck-{number}") for number in range(40)]
    waiting = [asyncio.create_task(thread.run(held.wait, 300)) for thread in stuck]
    free = WorkerThread("free")
    async with asyncio.timeout(300):
        assert await free.run(lambda: "done") == "done"
    held.set()
    assert all(await asyncio.gather(*waiting))
    for thread in (*stuck, free):
        await thread.close()
