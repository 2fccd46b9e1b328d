"""The snapshotter's one event loop, in its own thread: Spark calls from many threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DriverLoop:
    """Runs coroutines for callers that cannot await; start it, or use it as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="snapshotter-loop", daemon=True
        )

    def __enter__(self) -> DriverLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end; return what it returns, or raise what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start `work`, which runs until it is cancelled."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work, name=name)

        return self.call(begin())

    def end(self, task: asyncio.Task[None]) -> None:
        """Cancel the task and wait for its end; raises what it failed with."""

        async def cancel() -> None:
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return

        self.call(cancel())

    def soon(self, function: Any) -> None:
        """Call a function in the loop's thread, without waiting."""
        self._loop.call_soon_threadsafe(function)
