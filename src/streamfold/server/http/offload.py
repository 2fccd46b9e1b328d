"""Threads for work that would hold up the event loop: parsing, encoding and compressing what is large.

A thread alone is not enough. Most of this work is Python, or C that keeps the interpreter's lock, so it
is written in steps of a few milliseconds, and `SWITCH_INTERVAL` lets the event loop in between them.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

#: Bytes up to which work is done at once on the event loop: a thread costs 0.1 ms,
#: and this much work takes 20 ms at worst.
LIGHT_BYTES: Final = 64 << 10
#: The same for work that only copies and scans, 3 ms per MiB: dozens of such requests may arrive in the
#: same iteration of the loop.
COPIED_BYTES: Final = 128 << 10
#: Seconds that a thread may keep the interpreter's lock while another one wants it. Python's own 5 ms
#: are too long for an event loop that needs it several times per request.
SWITCH_INTERVAL: Final = 0.001

#: Few: more would only help work that releases the lock, such as compression.
_THREADS_MIN, _THREADS_MAX = 2, 8

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _call(function: Callable[[], Result]) -> Result:
    try:
        return function()
    except BaseException as error:
        # Unfinished work may hold millions of objects: free them here, not on the event loop.
        traceback.clear_frames(error.__traceback__)
        raise


class OffloadPool:
    """Runs functions in a few threads, of which no single owner gets more than half.

    Owners, which are connections, take turns: however much one requests, another waits for at most one
    piece of its work.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(_THREADS_MAX, max(_THREADS_MIN, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(count, "streamfold-worker")
        self._free = count
        self._share = max(1, count // 2)
        self._running: Counter[Hashable] = Counter()
        #: Waiters for a thread, by owner; the owner whose turn is next comes first.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    async def run(
        self,
        owner: Hashable,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """The result of `function`, called in a thread; once started, it runs to its end."""
        await self._enter(owner)
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, _call, partial(function, *args, **kwargs))
        work.add_done_callback(partial(self._end, owner))
        try:
            # Shielded: a caller that gives up does not free the thread.
            return await asyncio.shield(work)
        finally:
            del work  # it has the error, whose traceback has this frame

    def close(self) -> None:
        """Take no more work; running work finishes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _enter(self, owner: Hashable) -> None:
        if self._free and self._running[owner] < self._share and owner not in self._waiting:
            self._take(owner)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(owner)  # the thread came together with the cancellation
            raise

    def _take(self, owner: Hashable) -> None:
        self._free -= 1
        self._running[owner] += 1

    def _end(self, owner: Hashable, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # marks it as retrieved: the caller may have given up
        self._leave(owner)

    def _leave(self, owner: Hashable) -> None:
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._admit()

    def _admit(self) -> None:
        for owner in list(self._waiting):
            if not self._free:
                return
            if self._running[owner] >= self._share:
                continue
            turns = self._waiting.pop(owner)
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns:
                self._take(owner)
                turns.popleft().set_result(None)
            if turns:
                self._waiting[owner] = turns  # behind all others
