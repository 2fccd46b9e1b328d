"""Lets others run between the batches of one reader.

A reader that never has to wait, because all is in memory and its client takes it at once, would keep
the event loop to itself for as long as there is something to read.
"""

from __future__ import annotations

import asyncio
from typing import Final

from streamfold.store.read.requests import ReadBatch

#: Records, and metered bytes, after which others get a turn: some milliseconds of work.
YIELD_RECORDS: Final = 1_000
YIELD_BYTES: Final = 1 << 20


class ReaderFairness:
    """Counts what one reader has got since others had their turn."""

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
