"""Blocking calls of one sink, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from streamfold.archive.events.sink import EventRefusedError

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Runs calls one after another: a cancelled call ends before the next begins.

    The default thread pool would not do: a few sinks that hang would stop the others. `name` is the
    sink's, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"events-{name}")
        self._closed = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns; EventRefusedError after `close`."""
        if self._closed:
            raise EventRefusedError(f"{self._name}: the sink is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def close(self) -> None:
        """Wait for the running call; no call starts afterwards."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
