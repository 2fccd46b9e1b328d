"""Bounds what is accepted but not yet acknowledged, by metered bytes."""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """First come, first served permits; a waiter that is cancelled holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = capacity
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes accepted but not yet acknowledged."""
        return self.capacity - self._free

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._queue)

    @property
    def wanted(self) -> int:
        """Bytes that those who wait want."""
        return sum(size for size, turn in self._queue if not turn.done())

    def acquire_at_once(self, size: int) -> bool:
        """Take the permit if `size` bytes fit and nobody waits."""
        if self._queue or self._free < size:
            return False
        self._free -= size
        return True

    def overdraw(self, size: int) -> None:
        """Take the permit whether it fits or not: for one who has some, and must not wait for more."""
        self._free -= size

    async def acquire(self, size: int) -> None:
        """Return once `size` bytes fit, after everyone who asked before."""
        if self.acquire_at_once(size):
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)  # the permit came together with the cancellation
            else:
                self._admit()  # a large waiter may have held up smaller ones behind it
            raise

    def release(self, size: int) -> None:
        self._free += size
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
            elif size <= self._free:
                self._queue.popleft()
                self._free -= size
                turn.set_result(None)
            else:
                return
