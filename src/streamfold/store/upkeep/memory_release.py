"""Returns memory to the system once a load has ended.

After a load, the allocator keeps most of what the load needed, and few of the recent records are still
read from memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from streamfold._native import trim_memory
from streamfold.store.log.recent_chunks import RecentChunks

#: Seconds between two checks.
_INTERVAL: Final = 10.0
#: Quiet checks in a row of which each returns memory: a store at rest first writes tables and merges
#: them, which takes memory once more. Later one of so many, because readers need some, too.
_FIRST: Final = 6
#: Bytes of records between two checks below which the store counts as unused.
_QUIET_BYTES: Final = 1 << 20
#: Bytes of recent records that an unused store keeps in memory.
_RECENT_BYTES: Final = 16 << 20


@dataclass(slots=True)
class MemoryRelease:
    """Notices that a store is no longer written."""

    recent: RecentChunks
    #: Bytes written at the last check.
    _written: int = 0
    #: Checks in a row that found hardly anything written.
    _quiet: int = 0

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.check()

    async def check(self) -> None:
        """Return memory if hardly anything was written since the last check, and it is due."""
        written, self._written = self._written, self.recent.added
        if self._written - written >= _QUIET_BYTES:
            self._quiet = 0
            return
        self._quiet += 1
        if self._quiet > _FIRST and self._quiet % _FIRST:
            return
        self.recent.shrink(_RECENT_BYTES)
        await asyncio.to_thread(trim_memory)
