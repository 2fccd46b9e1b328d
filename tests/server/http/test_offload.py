"""Heavy work in threads: shared fairly, never more of one connection than its share, in order."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from streamfold.server.http.offload import OffloadPool


@pytest.fixture
async def offload_pool() -> AsyncIterator[OffloadPool]:
    found = OffloadPool(threads=2)
    yield found
    found.close()


class Held:
    """Work that continues until it is released."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self._go.wait(60)
        return "done"

    def let_go(self) -> None:
        self._go.set()

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 60)


async def test_one_owner_never_keeps_all_threads(offload_pool: OffloadPool) -> None:
    held = [Held() for _ in range(5)]
    running = [asyncio.ensure_future(offload_pool.run("greedy", work)) for work in held]
    await held[0].has_begun()
    assert await asyncio.wait_for(offload_pool.run("modest", lambda: "mine"), 60) == "mine"
    assert not held[1].begun.is_set()
    for work in held:
        work.let_go()
    assert await asyncio.gather(*running) == ["done"] * 5


async def test_owners_take_turns() -> None:
    offload_pool, order = OffloadPool(threads=1), list[str]()
    first = Held()
    running = asyncio.ensure_future(offload_pool.run("a", first))
    await first.has_begun()
    owners = ("a", "a", "b", "c", "b")
    waiting = [
        asyncio.ensure_future(offload_pool.run(owner, order.append, owner)) for owner in owners
    ]
    await asyncio.sleep(0)
    first.let_go()
    await asyncio.gather(running, *waiting)
    assert order == ["a", "b", "c", "a", "b"]
    offload_pool.close()


async def test_a_caller_that_gives_up_frees_its_thread_only_when_the_work_ends(
    offload_pool: OffloadPool,
) -> None:
    held, waiting = Held(), Held()
    given_up = asyncio.ensure_future(offload_pool.run("a", held))
    await held.has_begun()
    queued = asyncio.ensure_future(offload_pool.run("a", waiting))
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert not waiting.begun.is_set()
    held.let_go()
    await waiting.has_begun()
    waiting.let_go()
    assert await queued == "done"


async def test_work_that_fails_after_its_caller_gave_up_is_not_logged(
    offload_pool: OffloadPool, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()

    def fail() -> None:
        held()
        raise ValueError

    given_up = asyncio.ensure_future(offload_pool.run("a", fail))
    await held.has_begun()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    held.let_go()
    assert await offload_pool.run("a", lambda: "next") == "next"
    gc.collect()
    assert caplog.messages == []


async def test_a_cancelled_wait_takes_no_turn_of_others(offload_pool: OffloadPool) -> None:
    held = Held()
    running = asyncio.ensure_future(offload_pool.run("a", held))
    await held.has_begun()
    gone = asyncio.ensure_future(offload_pool.run("a", lambda: "never"))
    last = asyncio.ensure_future(offload_pool.run("a", lambda: "last"))
    await asyncio.sleep(0)
    gone.cancel()
    held.let_go()
    assert (await running, await last) == ("done", "last")
    assert await offload_pool.run("a", lambda: "again") == "again"


async def test_errors_come_back_without_what_they_were_made_of(offload_pool: OffloadPool) -> None:
    def fail() -> None:
        large = [object()]
        raise ValueError(len(large))

    with pytest.raises(ValueError, match="1") as caught:
        await offload_pool.run("a", fail)
    assert all("large" not in entry.frame.f_locals for entry in caught.traceback)
