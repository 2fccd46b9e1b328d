"""Lets others run between the batches of one reader.

A reader that never waits, because its records are in memory and its client takes them at once, would
occupy the event loop until it reaches the tail.
"""

from __future__ import annotations

import asyncio
from typing import Final

from streamfold.store.read.requests import ReadBatch

#: Records, and metered bytes, after which a reader yields: some milliseconds of work.
YIELD_RECORDS: Final = 1_000
YIELD_BYTES: Final = 1 << 20


class ReaderFairness:
    """Counts what one reader has received since it last yielded to others."""

    __slots__ = ("_bytes", "_records")

    def __init__(self) -> None:
        self._records = self._bytes = 0

    async def after(self, batch: ReadBatch) -> None:
        """Call after each batch; returns at once, most of the time."""
        self._records += batch.count
        self._bytes += batch.metered
        if self._records >= YIELD_RECORDS or self._bytes >= YIELD_BYTES:
            self._records = self._bytes = 0
            await asyncio.sleep(0)
