"""Keeps SlateDB's clock from going back, across restarts, too.

SlateDB stamps each write and names each table by its clock, and refuses all writes while that clock
is behind the newest time in storage (`invalid clock tick`). It reads the system clock once, when it is
opened, and then counts by the monotonic clock: a system clock that jumps while the database is open
does no harm, but one that is behind at the next opening does. So each opening reads the newest time in
storage, and starts SlateDB's clock there if the system clock is behind (upstream defect 2).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from streamfold.errors import StorageError
from streamfold.store.engine.clock_shift import ClockShiftError, StartedAhead, clock_ahead

logger = logging.getLogger(__name__)

#: Milliseconds that the clock may be behind for opening to wait: it is being corrected.
_WAIT_MS = 1000
#: Letters of a ULID in order of their value, and how many of them are its time (ms).
_ULID_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_TIME = 10


def system_time() -> int:
    """The system clock as SlateDB reads it when it is opened: ms since the Unix epoch."""
    return time.time_ns() // 1_000_000


async def newest_time(manifest: Any, admin: Any, wal: Any) -> int:
    """The newest time in storage, ms since the Unix epoch: no write may be older."""
    compactions = await admin.read_compactions(None)
    jobs = compactions.recent_compactions if compactions is not None else []
    tables = max((_ulid_time(ulid) for ulid in _ulids(manifest, jobs)), default=0)
    written = await _newest_in_wal(manifest, wal)
    return max(int(manifest.last_l0_clock_tick), tables, written)


async def _newest_in_wal(manifest: Any, wal: Any) -> int:
    """The time of the last write in the WAL; files without rows only mark a new writer."""
    replayed = manifest.replay_after_wal_id
    for number in range(await wal.last_wal_file_id(replayed), replayed, -1):
        rows = (await (await wal.iterator(number)).next()).rows
        if rows:
            return max(row.create_ts or 0 for row in rows)
    return 0


def _ulids(manifest: Any, jobs: list[Any]) -> Iterator[str]:
    for tree in (manifest, *manifest.segments):
        if tree.last_compacted_l0_sst_view_id is not None:
            yield tree.last_compacted_l0_sst_view_id
        for view in tree.l0:
            yield view.id
            yield view.sst.id.value
    for job in jobs:
        yield job.id
        for table in job.output_ssts:
            yield table.id.value


def _ulid_time(ulid: str) -> int:
    value = 0
    for letter in ulid[:_ULID_TIME]:
        value = value * 32 + _ULID_LETTERS.index(letter)
    return value


class SlateClock:
    """Opens SlateDB's handles with a clock that is `ahead` milliseconds ahead of the system's."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    @classmethod
    async def for_time(cls, wanted: int, location: str) -> SlateClock:
        """A clock that starts at `wanted` ms or now, whichever is later."""
        ahead = wanted - system_time()
        if 0 < ahead <= _WAIT_MS:
            await asyncio.sleep(ahead / 1000)
            ahead = wanted - system_time()
        if ahead > 0:
            logger.warning(
                "the system clock is %.1f s behind the newest write in %s: SlateDB's clock continues "
                "from that write, and records get the timestamp of the one before until the system "
                "clock has caught up",
                ahead / 1000,
                location,
            )
        return cls(max(ahead, 0))

    def start(self, build: Callable[[], Any]) -> Any:
        """Call `build` under this clock."""
        if not self._ahead:
            return build()
        try:
            with clock_ahead(self._ahead):
                return build()
        except ClockShiftError as error:
            raise self._refusal(error) from error

    async def open(self, build: Callable[[], Any]) -> Any:
        """Call `build` in the background under this clock."""
        if not self._ahead:
            return await build()
        try:
            return await StartedAhead(build(), self._ahead)
        except ClockShiftError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: ClockShiftError) -> StorageError:
        return StorageError(
            f"the system clock is {self._ahead / 1000:.1f} s behind the newest write in the store, and "
            f"SlateDB takes no writes until it has caught up ({error}): set the clock, or wait"
        )
