"""Lets other tasks run during loops over many streams or subscriptions.

How long a step takes depends on what clients sent, so steps are timed rather than counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

#: Seconds of such a loop before other tasks run: less than a client notices.
SLICE: Final = 0.005


class TimeSlice:
    """Yields to the event loop after each `SLICE` seconds of steps."""

    __slots__ = ("_clock", "_end")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + SLICE

    async def step(self) -> None:
        """Call once per step; returns immediately until the slice is used up."""
        if self._clock() >= self._end:
            await asyncio.sleep(0)
            self._end = self._clock() + SLICE
