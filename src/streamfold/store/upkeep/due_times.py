"""When the background must check which streams."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

from streamfold.model.names import StreamRef

#: Milliseconds to which times are rounded up, so that streams that are due at nearly the same time are
#: checked together.
_ROUND: Final = 500


class DueTimes:
    """Keeps the earliest due time per stream, and calls `wake` when one is reached.

    Times are milliseconds since the Unix epoch.
    """

    def __init__(self, now: Callable[[], int], wake: Callable[[], None]) -> None:
        self._now = now
        self._wake = wake
        self._heap: list[tuple[int, StreamRef]] = []
        self._earliest: dict[StreamRef, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def add(self, at: int, ref: StreamRef) -> None:
        """Schedule a check of the stream at `at`."""
        at = -(-at // _ROUND) * _ROUND
        known = self._earliest.get(ref)
        if known is not None and known <= at:
            return
        self._earliest[ref] = at
        heapq.heappush(self._heap, (at, ref))
        self._set_timer()

    def take(self) -> list[StreamRef]:
        """Remove and return the streams that are due."""
        now, taken = self._now(), []
        while self._heap and self._heap[0][0] <= now:
            at, ref = heapq.heappop(self._heap)
            if self._earliest.get(ref) == at:
                del self._earliest[ref]
                taken.append(ref)
        self._set_timer()
        return taken

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if not self._heap:
            self.close()
            return
        at = self._heap[0][0]
        if self._timer is not None and self._timer_at == at:
            return
        self.close()
        self._timer_at = at
        delay = max(0, at - self._now()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._wake()
