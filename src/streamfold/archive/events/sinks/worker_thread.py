"""Blocking calls of one sink, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Runs calls one after another: a cancelled call ends before the next begins.

    The default thread pool would not do: a few sinks that hang would stop the others.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"events-{name}")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def close(self) -> None:
        """Wait for the running call; no call starts afterwards."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
