"""Counts the requests under way, and refuses new ones while the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any


class DrainGate:
    """Open at first, then draining, then expired: open sessions are then ended."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.expired = asyncio.Event()
        self._callbacks: set[Callable[[], None]] = set()
        self._inside: set[asyncio.Task[Any]] = set()
        #: Set whenever the last request has left; meaningful only while draining.
        self._emptied = asyncio.Event()
        self._last_left = float("-inf")

    @property
    def inside(self) -> int:
        """Requests under way."""
        return len(self._inside)

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Count a task as a request under way, until it leaves."""
        self._inside.add(task)

    def leave(self, task: asyncio.Task[Any]) -> None:
        self._inside.discard(task)
        self._last_left = monotonic()
        if not self._inside:
            self._emptied.set()

    def when_draining(self, callback: Callable[[], None]) -> None:
        """Call `callback` when draining begins; at once if it has."""
        self._callbacks.add(callback)
        if self.draining.is_set():
            callback()

    def forget(self, callback: Callable[[], None]) -> None:
        self._callbacks.discard(callback)

    async def drain(self, max_wait: float) -> None:
        """Refuse new requests, and return when all others have ended.

        Sessions are advised to reconnect; half of `max_wait` seconds later they are ended, and at its
        end the remaining ones are cut off.
        """
        self.draining.set()
        for callback in tuple(self._callbacks):
            callback()
        for last_word in (self.expired.set, self._cut_off):
            if await self._wait_until_empty(max_wait / 2):
                return
            last_word()
        await self._wait_until_empty(None)

    async def linger(self, seconds: float) -> None:
        """Return this many seconds after the last request has left."""
        await asyncio.sleep(max(0.0, self._last_left + seconds - monotonic()))

    async def _wait_until_empty(self, max_wait: float | None) -> bool:
        try:
            async with asyncio.timeout(max_wait):
                while self._inside:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def _cut_off(self) -> None:
        for task in self._inside:
            task.cancel()
