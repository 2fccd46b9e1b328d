"""Keeps a store's space close to the size of its live rows.

Three things take space beyond the live rows:

- Runs of tables. SlateDB writes young tables and merges six of them into a run. Runs of similar size
  are merged further, four to eight at a time, as long as the result is at most half of the store: a
  merge needs its sources and its result at the same time.
- Dead rows: trimmed, expired or deleted, but still in a table. A deletion is a row too, and only a
  merge of both rows drops them. `LiveBytes` counts dead bytes as rows are deleted and as merges
  shrink the tables. After `wait_for` seconds, the newest runs, which probably contain the dead
  rows, are merged. If that frees little, the next merge includes more of the older runs.
- Replaced files: tables that a merge has replaced, and WAL files whose rows are in tables. They are
  collected after a certain number of bytes has been written, and as long as any are left.

One merge runs at a time, besides SlateDB's merges of young tables. After a merge for dead rows comes a
pause of the same length, so merges take at most half of the time. Dropping few bytes from a large store
may cost a rewrite of the store. So after a merge that freed little, the pause is long enough that
merges read `reclaim_rate` bytes per second on average.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from streamfold.errors import DeviceFailedError, StreamfoldError, WriterFencedError
from streamfold.store.engine.engine import DiskUse, Engine, TableRun, Tables
from streamfold.store.log.committer import Committer
from streamfold.store.upkeep.live_bytes import LiveBytes

logger = logging.getLogger(__name__)

#: Minimum and maximum runs merged at once, and the largest ratio of their sizes.
_MERGE_MIN, _MERGE_MAX, _SIMILAR = 4, 8, 4
#: Bytes that may be merged even if they are more than half of the store.
_SMALL_MERGE = 128 << 20
#: Fraction of the live bytes from which dead bytes are worth a rewrite of the store, and the
#: seconds that they wait.
_WORTHWHILE, _SOON = 0.2, 30.0
#: Fraction of the live bytes, and bytes, from which dead bytes wait only so many seconds, because
#: the store takes much more space than it needs. They wait longer during a large deletion.
_PRESSING, _PRESSING_BYTES, _PRESSING_WAIT = 0.5, 256 << 20, 2.0
#: Bytes deleted between two checks that count as a large deletion.
_BULK = 1 << 20
#: Fraction of what a merge reads that it must free to not count towards `reclaim_rate`.
_CHEAP = 0.25
#: Bytes below which dead rows are ignored, because bookkeeping rows are replaced all the time.
_FLOOR = 64 << 10
#: Size of the first merge as a multiple of the dead bytes, and factor for the next if it freed
#: little.
_FIRST_REACH, _FURTHER = 3.0, 4.0
#: Bytes per second that a merge processes on a slow machine, and bytes from which a merge's speed
#: is measured.
_MERGE_SPEED, _LARGE_MERGE = 50 << 20, 64 << 20
#: Bytes of young tables that may accumulate during a merge that includes young ones. SlateDB merges
#: no other young tables meanwhile, and writers wait once there are 32 tables of 32 MiB.
_YOUNG_ROOM = 512 << 20
#: Seconds until the next attempt when the disk has no room for a merge.
_NO_ROOM_PAUSE = 60.0
#: Seconds without a commit after which the store counts as resting.
_REST = 10.0
#: Bytes in the log that a resting store writes to a table, so that log files can be deleted.
_LOG_REST = 1 << 20
#: Seconds between checks for work, and bytes or seconds after which the tables are read again.
_TICK, _READ_BYTES, _READ_SECONDS = 2.0, 8 << 20, 30.0
#: Bytes or seconds after which files are collected, and minimum seconds between collections.
_COLLECT_BYTES, _COLLECT_SECONDS, _COLLECT_PAUSE = 64 << 20, 60.0, 3.0
#: Number of consecutive collections without deletions after which the interval doubles each time. At
#: each multiple of that number, a table is written. Also the longest interval in seconds.
_COLLECT_RETRIES, _COLLECT_LONGEST_PAUSE = 5, 600.0
#: Change in live bytes after which they are stored.
_NOTE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Bytes of a store's live rows, dead rows and files."""

    live: int
    dead: int
    disk: int


def similar_runs(runs: tuple[TableRun, ...], room: float = float("inf")) -> tuple[int, ...] | None:
    """Return the ids of the newest adjacent runs of similar size that should be merged, if any.

    The result must fit into `room` bytes.
    """
    most = min(room, max(_SMALL_MERGE, sum(run.size for run in runs) // 2))
    for first in range(len(runs)):
        chosen: list[TableRun] = []
        for run in runs[first : first + _MERGE_MAX]:
            sizes = [run.size, *(other.size for other in chosen)]
            if max(sizes) > _SIMILAR * min(sizes) or sum(sizes) > most:
                break
            chosen.append(run)
        if len(chosen) >= _MERGE_MIN:
            return tuple(run.id for run in chosen)
    return None


def newest_runs(runs: tuple[TableRun, ...], size: float) -> tuple[TableRun, ...]:
    """Return the newest runs that together have at least `size` bytes, or all runs."""
    covered = 0
    for number, run in enumerate(runs, start=1):
        covered += run.size
        if covered >= size:
            return runs[:number]
    return runs


def wait_for(dead: int, live: int, reclaim_after: float) -> float:
    """Return the seconds after which the store drops `dead` bytes."""
    if dead <= _FLOOR:
        return float("inf")
    if dead >= max(_PRESSING * live, _PRESSING_BYTES):
        return min(reclaim_after, _PRESSING_WAIT)
    return min(reclaim_after, _SOON * max(1.0, _WORTHWHILE * live / dead))


def pause_after(size: int, freed: int, seconds: float, rate: float) -> float:
    """Return the seconds to pause after a merge.

    The merge took `seconds`, read `size` bytes and freed `freed`.
    """
    return seconds if freed >= _CHEAP * size else max(seconds, size / rate - seconds)


@dataclass(slots=True)
class Reclaimer:
    """Reclaims the space of one mount."""

    engine: Engine
    committer: Committer
    live: LiveBytes
    reclaim_after: float
    #: Bytes per second.
    reclaim_rate: float
    #: Bytes of records by basin once known, for stores that were never counted.
    by_basin: Callable[[], dict[str, int] | None]
    #: Bytes that a merge may write before the disk counts as full.
    room: Callable[[], float] = lambda: float("inf")
    #: Bytes of chunk files, which contain no rows and need no merges.
    in_files: Callable[[], int] = lambda: 0
    #: Bytes of chunk files that no row names.
    left_over: Callable[[], int] = lambda: 0
    #: Commits after which their rows are written as a table.
    commits_max: int = sys.maxsize
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    _disk: DiskUse | None = None
    #: The tables, and the bytes of dead rows, as last read.
    _tables: Tables | None = None
    _dead: int = 0
    #: Elapsed fraction of the wait for the dead bytes (0 to 1), and when it was computed.
    _waited: float = 0.0
    _waited_at: float | None = None
    #: Size of the next merge, as a multiple of the dead bytes.
    _reach: float = _FIRST_REACH
    #: Bytes deleted before the last merge for dead bytes.
    _removed: int = 0
    #: No dead rows are dropped before this time.
    _pause_until: float = 0.0
    #: Whether a merge has replaced files since the last collection.
    _replaced: bool = False
    #: Live bytes as last stored.
    _noted: int | None = None
    #: Recent bytes written per second, and the total when that was computed.
    _write_rate: float = 0.0
    _added: int = 0
    #: Whether a large deletion is in progress, and the bytes deleted as of the last check.
    _deleting: bool = False
    _seen_removed: int = 0
    #: Measured bytes per second that merges process.
    _speed: float = _MERGE_SPEED
    #: Commits as last seen, and when they last changed. Then the state when the tables were last
    #: read.
    _commits: int = 0
    _committed_at: float = 0.0
    _read_commits: int = -1
    _read_bytes: int = 0
    _read_at: float = 0.0
    #: Number of commits when a table was last written because of their number.
    _flushed_commits: int = 0

    @property
    def use(self) -> StorageUse | None:
        """The current use; None before the tables were first read."""
        if self._tables is None:
            return None
        stored = self._tables.total
        live = stored if self.live.total is None else max(0, self.live.total)
        disk, files = self._disk.total if self._disk else stored, self.in_files()
        return StorageUse(live + files - self.left_over(), self._dead, disk + files)

    async def run(self) -> NoReturn:
        """Work until cancelled or until storage fails for good."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._merge_forever())
            group.create_task(self._collect_forever())
        raise AssertionError("both tasks run until they are cancelled or fail")

    async def _merge_forever(self) -> NoReturn:
        while True:
            self.observe_changes()
            if self._commits - self._flushed_commits >= self.commits_max:
                self._flushed_commits = self._commits
                with _retried_later():
                    await self.engine.flush()
            if self._tables_changed() or self._is_due():
                with _retried_later():
                    await self.step()
            await asyncio.sleep(min(_TICK, self.reclaim_after))

    async def _collect_forever(self) -> NoReturn:
        pause = min(_COLLECT_PAUSE, self.reclaim_after)
        collected_at, collected, retries = self.clock(), self.live.changed, 0
        while True:
            await asyncio.sleep(pause)
            written, waited = self.live.changed - collected, self.clock() - collected_at
            replaced = self._disk is None or self._disk.replaced > 0 or self._replaced
            interval = min(_COLLECT_LONGEST_PAUSE, pause * 2 ** max(0, retries - _COLLECT_RETRIES))
            if not (
                written >= _COLLECT_BYTES
                or (written and waited >= _COLLECT_SECONDS)
                or (replaced and waited >= interval)
            ):
                continue
            collected_at, collected, self._replaced = self.clock(), self.live.changed, False
            before = self._disk.replaced if self._disk else 0
            with _retried_later():
                await self.collect()
            progress = written or self._disk is None or self._disk.replaced != before
            retries = 0 if progress else retries + 1
            if retries and retries % _COLLECT_RETRIES == 0:
                # The files may be newer than the newest young table. Write a newer table, and a row
                # for it, because flushing no rows writes no table.
                with _retried_later():
                    await self._note(always=True)
                    await self.engine.flush()

    async def collect(self) -> None:
        """Delete files that are no longer needed, and measure the rest."""
        self._disk = await self.engine.collect()

    async def step(self) -> None:
        """Read the tables, and run a merge if one is due."""
        self._read_commits, self._read_at = self._commits, self.clock()
        self._read_bytes = self.live.changed
        tables = await self.engine.tables()
        if self._resting() and tables.pending >= _LOG_REST:
            await self.engine.flush()
            tables = await self.engine.tables()
        self._observe(tables)
        await self._note()
        if (merge := similar_runs(tables.runs, self.room())) is not None:
            self._replaced |= await self.engine.merge(merge, young=False)
            self._read_commits = -1  # there may be more to merge
        elif self._is_due():
            await self._reclaim(tables)

    def observe_changes(self) -> None:
        """Record what was written and deleted since the last call, about `_TICK` seconds ago."""
        added, removed = self.live.added - self._added, self.live.removed - self._seen_removed
        self._added, self._seen_removed = self.live.added, self.live.removed
        self._write_rate = (self._write_rate + added / _TICK) / 2
        self._deleting = removed > max(_BULK, 2 * added)
        if self.live.commits != self._commits:
            self._commits, self._committed_at = self.live.commits, self.clock()

    def _resting(self) -> bool:
        return self.clock() - self._committed_at >= min(_REST, self.reclaim_after)

    def _tables_changed(self) -> bool:
        """Return whether enough was committed since the tables were last read to read them again."""
        if self._commits == self._read_commits:
            # Read them once more after the store has come to rest.
            rested_at = self._committed_at + min(_REST, self.reclaim_after)
            return self._read_at < rested_at <= self.clock()
        waited = self.clock() - self._read_at
        return (
            self._read_commits < 0
            or self.live.changed - self._read_bytes >= _READ_BYTES
            or waited >= min(_READ_SECONDS, self.reclaim_after)
        )

    def _observe(self, tables: Tables) -> None:
        if self.live.total is None and (by_basin := self.by_basin()) is not None:
            self.live.total = sum(by_basin.values())
        if self._tables is not None:
            # The tables contain their former rows and those written since, except rows dropped by
            # merges.
            self.live.drop(max(0, _dropped(self._tables, tables)))
        if self.live.total is not None:
            # Live bytes below zero or above the total mean that the count was wrong.
            self.live.total = min(max(0, self.live.total), tables.total)
        self._tables, self._dead = tables, self.live.dead_of(tables.total)
        if self._dead <= _FLOOR:
            self._reach = _FIRST_REACH

    def _is_due(self) -> bool:
        """Update how long the dead bytes have waited. Returns whether it is time to drop them."""
        now = self.clock()
        passed = now - (now if self._waited_at is None else self._waited_at)
        self._waited_at = now
        if self._dead <= _FLOOR:
            self._waited = 0.0
        else:
            wait = wait_for(self._dead, self.live.total or 0, self.reclaim_after)
            if self._deleting:  # do not rewrite rows that are about to be deleted
                wait = max(wait, min(_SOON, self.reclaim_after))
            self._waited += passed / wait
        return self._waited >= 1.0 and now >= self._pause_until

    async def _reclaim(self, tables: Tables) -> None:
        """Merge the newest runs, which probably contain the dead rows."""
        began, dead = self.clock(), self._dead
        chosen = newest_runs(tables.runs, self._reach * dead)
        size = sum(run.size for run in chosen) + sum(tables.young)
        if size - dead > self.room():
            logger.warning(
                "cannot drop %.1f MiB of deleted rows: that needs %.1f MiB of free disk for a while",
                dead / (1 << 20),
                (size - dead) / (1 << 20),
            )
            self._pause_until = began + min(_NO_ROOM_PAUSE, self.reclaim_after)
            return
        young = self._write_rate * size / self._speed <= _YOUNG_ROOM
        balance, removed = self.live.balance, self.live.removed
        if young:
            await self.engine.flush()
        if not await self.engine.merge(tuple(run.id for run in chosen), young=young):
            return  # young tables are being merged: retried at the next tick
        self._replaced, self._waited = True, 0.0
        seconds = self.clock() - began
        if size >= _LARGE_MERGE:
            self._speed = (self._speed + size / max(seconds, _TICK)) / 2
        after = await self.engine.tables()
        self._observe(after)
        freed = max(0, _dropped(tables, after))
        # SlateDB may have added a run since the tables were read, which the merge left out.
        everything = len(chosen) == len(tables.runs) and len(after.runs) <= 1
        if everything and young:
            # The rest is live, except for rows written and deleted meanwhile.
            merged = after.runs[-1].size if after.runs else 0
            self.live.total = merged + self.live.balance - balance
            self.live.deleted = self.live.removed - removed
        elif everything and 2 * freed < dead and removed == self._removed:
            # Nothing was deleted since the last merge: the count was probably wrong.
            self.live.total = (self.live.total or 0) + dead // 2
            self.live.drop(dead // 2)
        self._dead = self.live.dead_of(after.total)
        self._reach = self._reach * _FURTHER if 2 * freed < dead else _FIRST_REACH
        self._removed = removed
        await self._note(always=True)
        self._pause_until = self.clock() + pause_after(size, freed, seconds, self.reclaim_rate)
        logger.info(
            "merged %d runs of %d in %.1f s: %.1f of %.1f MiB of deleted rows are gone",
            len(chosen),
            len(tables.runs),
            seconds,
            freed / (1 << 20),
            dead / (1 << 20),
        )

    async def _note(self, *, always: bool = False) -> None:
        """Store the live bytes, with which a restart begins, if they have changed much."""
        total, row = self.live.total, self.live.row
        if total is None or row is None:
            return
        if always or abs(total - (self._noted or 0)) >= _NOTE_BYTES:
            await self.committer.write([row])
            self._noted = total


def _dropped(before: Tables, after: Tables) -> int:
    """Return the bytes of rows that merges dropped; negative if rows take more space in tables."""
    return before.total + after.written - before.written - after.total


@contextmanager
def _retried_later() -> Iterator[None]:
    """Log a storage failure instead of raising it, because the caller retries soon."""
    try:
        yield
    except (DeviceFailedError, WriterFencedError):
        raise
    except StreamfoldError as error:
        logger.error("cannot reclaim space, retrying soon: %s", error)
