"""Streams that the background is to look at, each at its time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

#: Milliseconds to which times are rounded up, so that streams which are due at nearly the same time
#: are looked at together.
_ROUND: Final = 500

StreamRef = tuple[str, str]


class DueTimes:
    """At most one time per stream, the earliest; `wake` is called when one has come.

    Times are milliseconds since the Unix epoch.
    """

    def __init__(self, now: Callable[[], int], wake: Callable[[], None]) -> None:
        self._now = now
        self._wake = wake
        self._heap: list[tuple[int, StreamRef]] = []
        self._earliest: dict[StreamRef, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def add(self, at: int, basin: str, stream: str) -> None:
        """Have the stream looked at when `at` has come."""
        at, place = -(-at // _ROUND) * _ROUND, (basin, stream)
        known = self._earliest.get(place)
        if known is not None and known <= at:
            return
        self._earliest[place] = at
        heapq.heappush(self._heap, (at, place))
        self._set_timer()

    def take(self) -> list[StreamRef]:
        """The streams whose time has come; they are no longer in here."""
        now, taken = self._now(), []
        while self._heap and self._heap[0][0] <= now:
            at, place = heapq.heappop(self._heap)
            if self._earliest.get(place) == at:
                del self._earliest[place]
                taken.append(place)
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
