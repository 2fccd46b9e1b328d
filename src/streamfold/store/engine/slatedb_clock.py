"""Keeps SlateDB's clock from going back, even across restarts.

SlateDB stamps each write and names each table by its clock, and rejects all writes while that clock is
behind the newest time in storage (`invalid clock tick`). The clock is set when the database is opened,
and then follows the monotonic clock. So a system clock that jumps while the database is open does no
harm, but one that is behind at the next opening would. So each opening reads the newest time in
storage, and starts SlateDB's clock there if the system clock is behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from streamfold._native import Clock
from streamfold.store.engine.native import Admin, Compaction, SlateManifest, WalReader

logger = logging.getLogger(__name__)

#: Maximum milliseconds behind for which opening waits, because the clock is being corrected.
_WAIT_MS = 1000
#: Letters of a ULID in order of value, and the number of leading letters that encode its time (ms).
_ULID_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_TIME = 10


def system_time() -> int:
    """Return the time at which SlateDB's clock starts, in ms since the Unix epoch."""
    return time.time_ns() // 1_000_000


async def newest_time(manifest: SlateManifest, admin: Admin, log: WalReader) -> int:
    """Return the newest time in storage, in ms since the Unix epoch. No write may be older."""
    ulids = _ulids(manifest, await admin.read_compactions())
    tables = max(map(_ulid_time, ulids), default=0)
    return max(manifest.last_table_time, tables, await _newest_in_log(manifest, log))


async def _newest_in_log(manifest: SlateManifest, log: WalReader) -> int:
    """Return the time of the last write in the log. Files without rows only mark new writers."""
    for number in reversed(await log.files(manifest.replay_after)):
        if rows := await log.rows(number):
            return max(row.time or 0 for row in rows)
    return 0


def _ulids(manifest: SlateManifest, merges: list[Compaction]) -> Iterator[str]:
    if manifest.last_merged_view is not None:
        yield manifest.last_merged_view
    for view in manifest.young:
        yield view.id
        yield view.table
    for merge in merges:
        yield merge.id
        yield from merge.tables


def _ulid_time(ulid: str) -> int:
    value = 0
    for letter in ulid[:_ULID_TIME]:
        value = value * 32 + _ULID_LETTERS.index(letter)
    return value


async def clock_from(time_ms: int, location: str) -> Clock:
    """Return a clock for SlateDB that starts at `time_ms` or now, whichever is later."""
    ahead = time_ms - system_time()
    if 0 < ahead <= _WAIT_MS:
        await asyncio.sleep(ahead / 1000)
        ahead = time_ms - system_time()
    if ahead > 0:
        logger.warning(
            "the system clock is %.1f s behind the newest write in %s: SlateDB's clock continues "
            "from that write, and records get the timestamp of the one before until the system "
            "clock has caught up",
            ahead / 1000,
            location,
        )
    return Clock(max(time_ms, system_time()))
