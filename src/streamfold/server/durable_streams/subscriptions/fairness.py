"""Distributes work fairly: slots limit slow owners, and time slices limit long loops.

An owner is an access token. None stands for root, and for all clients of a server without --auth.

How long a step takes depends on what clients sent, so steps are timed rather than counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final
from weakref import WeakValueDictionary

#: Seconds after which holding a slot counts as slow, and for which its owner then counts as slow.
SLOW_AFTER: Final = 2.0
SLOW_KEPT: Final = 60.0
#: Maximum slow owners remembered.
_SLOW_MAX: Final = 10_000
#: Seconds of a loop after which other tasks run: less than a client notices.
SLICE: Final = 0.005


class OwnerSlots:
    """Limits the slots of each owner, and of all slow owners together to half of all slots.

    A limit per owner is not enough, because several owners together could hold all slots.
    """

    def __init__(self, total: int, per_owner: int, of_root: int) -> None:
        self._per_owner = per_owner
        self._of_root = of_root
        self._all = asyncio.Semaphore(total)
        self._for_slow = asyncio.Semaphore(total // 2)
        #: The slots of owners that hold one or wait for one.
        self._owned: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()
        #: Until when each owner counts as slow, by the monotonic clock; oldest first.
        self._slow_until: dict[str | None, float] = {}

    async def take(self, owner: str | None) -> Callable[[], None]:
        """Wait for a slot. Returns a function that gives it back."""
        most = self._of_root if owner is None else self._per_owner
        owned = self._owned.setdefault(owner, asyncio.Semaphore(most))
        slots: list[asyncio.Semaphore] = []
        try:
            slots.append(await _acquired(owned))
            if self._slow_until.get(owner, 0.0) > monotonic():
                slots.append(await _acquired(self._for_slow))
            slots.append(await _acquired(self._all))
        except BaseException:
            _release(slots)
            raise
        since = monotonic()

        def give_back() -> None:
            if monotonic() - since > SLOW_AFTER:
                self._remember_slow(owner)
            _release(slots)

        return give_back

    def _remember_slow(self, owner: str | None) -> None:
        self._slow_until.pop(owner, None)
        self._slow_until[owner] = monotonic() + SLOW_KEPT
        if len(self._slow_until) > _SLOW_MAX:
            del self._slow_until[next(iter(self._slow_until))]


async def _acquired(semaphore: asyncio.Semaphore) -> asyncio.Semaphore:
    await semaphore.acquire()
    return semaphore


def _release(slots: list[asyncio.Semaphore]) -> None:
    while slots:
        slots.pop().release()


class TimeSlice:
    """Yields to the event loop after every `SLICE` seconds of steps."""

    __slots__ = ("_clock", "_end")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + SLICE

    async def step(self) -> None:
        """Count a step. Returns immediately unless the slice is used up."""
        if self._clock() >= self._end:
            await asyncio.sleep(0)
            self._end = self._clock() + SLICE
