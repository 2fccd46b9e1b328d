"""Bounds what is accepted but not yet acknowledged, by metered bytes."""

from __future__ import annotations

import asyncio
from collections import deque


class Admission:
    """Grants permits in the order of the requests; a cancelled waiter holds none."""

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
        """How many callers wait for room."""
        return len(self._queue)

    @property
    def wanted(self) -> int:
        """Bytes that the waiting callers ask for."""
        return sum(size for size, turn in self._queue if not turn.done())

    def acquire_at_once(self, size: int) -> bool:
        """Take the permit if `size` bytes fit and the queue is empty."""
        if self._queue or self._free < size:
            return False
        self._free -= size
        return True

    async def acquire(self, size: int) -> None:
        """Return once `size` bytes fit, after all earlier callers."""
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
