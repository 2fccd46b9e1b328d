"""The snapshotter's one event loop, in its own thread: Spark calls from many threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: Blocking requests at once: silent servers of some tables must not hold up those of others.
_THREADS = 64


class DriverLoop:
    """Runs coroutines for callers that cannot await; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS, "snapshotter-request"))
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="snapshotter-loop", daemon=True
        )

    def __enter__(self) -> DriverLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what is left: requests to silent servers do not delay the end."""
        self.call(_cancel_others())
        self.soon(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; returns or raises what it does."""
        return self.submit(work).result()

    def soon(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread, without waiting."""
        self._loop.call_soon_threadsafe(function)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
