"""Returns memory to the system after a period of heavy writes.

After such a period, the allocator keeps most of the memory that was used, and few of the recent
records are still read from memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from streamfold._native import trim_memory
from streamfold.store.log.recent_chunks import RecentChunks

#: Seconds between checks.
_INTERVAL: Final = 10.0
#: Number of first consecutive quiet checks that each return memory, because a store at rest still
#: writes and merges tables, which takes memory again. After that, only every sixth check does,
#: because readers need memory too.
_FIRST: Final = 6
#: Bytes of records written between two checks below which the store counts as unused.
_QUIET_BYTES: Final = 1 << 20
#: Bytes of recent records that an unused store keeps cached in memory.
_RECENT_BYTES: Final = 16 << 20


@dataclass(slots=True)
class MemoryRelease:
    """Returns memory to the system when nothing writes to the store any more."""

    recent: RecentChunks
    #: Bytes written as of the last check.
    _written: int = 0
    #: Consecutive checks that found hardly any writes.
    _quiet: int = 0

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self.check()

    async def check(self) -> None:
        """Return memory if hardly anything was written since the last check and a return is due."""
        written, self._written = self._written, self.recent.added
        if self._written - written >= _QUIET_BYTES:
            self._quiet = 0
            return
        self._quiet += 1
        if self._quiet > _FIRST and self._quiet % _FIRST:
            return
        self.recent.shrink(_RECENT_BYTES)
        await asyncio.to_thread(trim_memory)
