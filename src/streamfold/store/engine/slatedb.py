"""The engine on SlateDB: group commits as write batches, flushed on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from streamfold.errors import StorageError, WriterFencedError
from streamfold.store.engine.engine import DiskUse, Op, Tables, WriteBatch, size_of
from streamfold.store.engine.freeze import is_frozen
from streamfold.store.engine.local_disk import LocalDisk, forget_restore_point
from streamfold.store.engine.location import Location
from streamfold.store.engine.native import (
    Admin,
    EngineError,
    SlateDatabase,
    SlateManifest,
    WalReader,
    code_of,
    prepare_rows,
)
from streamfold.store.engine.slatedb_clock import clock_from, newest_time, system_time
from streamfold.store.engine.slatedb_rows import SlateRows, translated
from streamfold.store.engine.slatedb_tables import REPLACED_SECONDS, SlateTables, sizes_of
from streamfold.store.engine.table_check import TableCheck, reader_of
from streamfold.store.engine.wal_files import is_damage

#: Bytes of memory that SlateDB may use for rows not yet in a sorted table, and the size of a table.
_TABLE_BYTES = 32 << 20
_UNFLUSHED_BYTES = 128 << 20
#: Tables not yet compacted at which writes wait for the compaction.
_YOUNG_TABLES = 32
#: Young tables from which SlateDB merges, and how many of the oldest become a run. A merge needs its
#: sources and its result at the same time, so it must not cover most of what a small store holds; but
#: with fewer at a time, merges would not keep up with fast writers.
_MANY_YOUNG_TABLES, _MERGED_YOUNG_TABLES = 12, 6
#: How often SlateDB checks whether tables need merging and whether merges are done: on local disk, and
#: on storage where a check is a request that costs.
_POLL_LOCAL, _POLL_REMOTE = "500ms", "1s"
#: Bytes of a compacted table. A compaction holds one in memory, and there is one at a time.
_COMPACTED_BYTES = 64 << 20
#: Bytes of blocks cached for point reads; scans of records bypass the cache.
_CACHE_BYTES = 32 << 20
#: How often SlateDB retries a request that storage answered with an error, 0.1 to 0.8 s apart. Without
#: a limit it would retry without end, and appends would never be answered. Server errors (5xx),
#: throttling and refused connections are retried below this level, for minutes.
_RETRIES = 4
#: Seconds within which storage must answer once to be opened.
_ANSWER_TIMEOUT = 15.0

#: Collections to run after the last commit: SlateDB may still merge young tables meanwhile, and
#: checkpoints that have yet to expire may hold replaced files.
_IDLE_COLLECTIONS = 2
#: A key that no row has: deleting it gives `flush` something to write.
_NO_ROW = b"\xff"


class SlateEngine(SlateRows):
    """SlateDB as an Engine."""

    def __init__(
        self,
        database: SlateDatabase,
        admin: Admin,
        epoch: int,
        disk: LocalDisk | None,
        tables: SlateTables,
        check: TableCheck,
    ) -> None:
        super().__init__(database, check)
        self._admin = admin
        self._epoch = epoch
        self._disk = disk
        self._tables = tables
        self._collecting = asyncio.Lock()
        #: Collections in a row that found no new commit and nothing to delete.
        self._idle_collections = 0
        self._committed = False
        self._disk_use = DiskUse(0, 0)
        self._closed = False

    @classmethod
    async def open(
        cls,
        location: Location,
        disk: LocalDisk | None = None,
        now: Callable[[], int] = system_time,
    ) -> SlateEngine:
        """Open the database at `location` as its writer; fences the former writer.

        With `disk`, a commit is synced to the device before it counts as durable. `now` is the time
        (ms) from which SlateDB's clock starts, unless storage has seen a later one.
        """
        try:
            if disk is not None:
                await disk.repair(open_admin(location), log_reader(location))
            elif location.folder is not None:
                forget_restore_point(location.folder)
            await location.check_access()
            database, admin, epoch = await _build(location, now, synced=disk is not None)
        except (EngineError, OSError) as error:
            if disk is not None and is_damage(error):
                await disk.name_damage(open_admin(location), log_reader(location))
            raise translated(error) from error
        sizes, local = sizes_of(location.folder, location.files), location.folder is not None
        tables = SlateTables(admin, sizes, local=local)
        engine = cls(database, admin, epoch, disk, tables, table_check(location, admin))
        try:
            await engine._take_over()
        except BaseException:
            await engine.close(flush=False)
            raise
        return engine

    @property
    def epoch(self) -> int:
        return self._epoch

    async def _take_over(self) -> None:
        try:
            await self._check_epoch()
            if self._disk is not None:
                await self._disk.take_over(self._admin, self._epoch)
        except (EngineError, OSError) as error:
            raise translated(error) from error

    async def _check_epoch(self) -> None:
        """Raise WriterFencedError unless this opening has the number after the last.

        SlateDB does not say which number it took. If another process opened the store at the same time,
        the number in storage may be that process's: both would believe that they have it, and would
        write chunk files of the same names.
        """
        manifest = await self._admin.read_manifest()
        if manifest is None or manifest.writer_epoch != self._epoch:
            raise WriterFencedError

    def prepare(self, ops: list[Op]) -> WriteBatch:
        try:
            return WriteBatch(ops, size_of(ops), prepare_rows(ops))
        except EngineError as error:
            raise translated(error) from error

    async def commit(self, batch: WriteBatch) -> None:
        if not batch.ops:
            return  # SlateDB refuses an empty batch
        self._committed = True
        try:
            sequence = await self._database.commit(batch.native)
        except EngineError as error:
            raise translated(error) from error
        self._tables.committed(sequence, batch.size)

    async def check(self) -> None:
        try:
            manifest = await self._admin.read_manifest()
        except EngineError as error:
            raise translated(error) from error
        if manifest is None or manifest.writer_epoch != self._epoch:
            raise WriterFencedError

    async def frozen(self) -> bool:
        return await is_frozen(self._admin)

    async def tables(self) -> Tables:
        try:
            return await self._tables.read()
        except EngineError as error:
            raise translated(error) from error

    async def flush(self) -> None:
        """Write a young table, even if there is no row to write.

        The collector keeps all tables that are newer than the newest young one: this moves that limit.
        """
        self._committed = True
        try:
            await self._database.commit(prepare_rows([(_NO_ROW, None)]), tables=True)
        except EngineError as error:
            raise translated(error) from error

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        try:
            return await self._tables.merge(runs, young=young, damaged=self.damaged_files)
        except EngineError as error:
            raise translated(error) from error

    async def collect(self) -> DiskUse:
        """Delete files that are not needed; on local disk, make a restore point first.

        Costs nothing while nothing is committed.
        """
        try:
            async with self._collecting:
                idle = not self._committed and not self._disk_use.replaced
                self._idle_collections = self._idle_collections + 1 if idle else 0
                if self._idle_collections <= _IDLE_COLLECTIONS:
                    self._committed = False
                    await self._collect()
                return self._disk_use
        except (EngineError, OSError) as error:
            raise translated(error) from error

    async def _collect(self) -> None:
        if self._disk is None:
            # SlateDB keeps the tables of a checkpoint, but not the log files after its manifest.
            await self._tables.collect(log=not await self.frozen())
        else:
            await self._disk.collect(self._admin, partial(self._tables.collect, log=False))
        self._disk_use = await self._tables.disk_use()

    async def close(self, *, flush: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._database.close(flush=flush)
            if flush and self._disk is not None:
                await self._disk.finish()
        except EngineError as error:
            # A database that is already closed or fenced has nothing left to flush.
            if code_of(error) not in ("closed", "fenced"):
                raise translated(error) from error
        except OSError as error:
            raise translated(error) from error


def table_check(location: Location, admin: Admin, fixed: SlateManifest | None = None) -> TableCheck:
    """Checks the tables at `location`: those of the newest manifest, or of one that is `fixed`."""
    read = reader_of(location.folder, location.files)

    async def manifest() -> SlateManifest | None:
        return fixed or await admin.read_manifest()

    return TableCheck(manifest, read)


def log_reader(location: Location) -> WalReader:
    return WalReader(location.store, location.path)


def open_admin(location: Location) -> Admin:
    return Admin(location.store, location.path)


async def _check_answers(admin: Admin, location: Location) -> SlateManifest | None:
    """The newest manifest, None if there is none; raises if storage does not answer.

    SlateDB itself would retry without end and without a message.
    """
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            return await admin.read_manifest()
    except TimeoutError:
        raise StorageError(
            f"storage at {location.url} did not answer as expected within {_ANSWER_TIMEOUT} s: check "
            "that it exists, its endpoint and the credentials"
        ) from None


async def _build(
    location: Location, now: Callable[[], int], *, synced: bool
) -> tuple[SlateDatabase, Admin, int]:
    """Open the database, and an admin, with a clock that is not behind the newest write.

    The last value is the epoch that the database has if nobody else opened it meanwhile.
    """
    manifest = await _check_answers(open_admin(location), location)
    young, seen = 0, 0
    if manifest is not None:
        young = len(manifest.young)
        seen = await newest_time(manifest, open_admin(location), log_reader(location))
    clock = await clock_from(max(now(), seen), location.url)
    storage = location.storage(synced=synced)
    settings = _settings(local=location.folder is not None, young=young)
    database = await SlateDatabase.open(storage, location.path, settings, clock, _CACHE_BYTES)
    epoch = 1 if manifest is None else manifest.writer_epoch + 1
    return database, Admin(storage, location.path, clock), epoch


def _young_tables_max(present: int) -> int:
    """The number of young tables at which writers wait for merges.

    A damaged one is never merged (upstream defect 21). If they are many already, allow more: otherwise
    writers would wait without end.
    """
    return max(_YOUNG_TABLES, 2 * present)


def _settings(*, local: bool, young: int) -> dict[str, Any]:
    """SlateDB's settings that are not its own, for a database with so many young tables."""
    # A writer at full speed waits while young tables are too many: check for work often.
    poll = _POLL_LOCAL if local else _POLL_REMOTE
    return {
        # Off: `SlateTables.collect` calls the collector when files can be deleted, on local disk after
        # a restore point.
        "garbage_collector_options": None,
        # No timer: each commit flushes, so an ack waits for one write and not for a tick.
        "flush_interval": None,
        "object_store_max_retries": _RETRIES,
        "l0_sst_size_bytes": _TABLE_BYTES,
        "max_unflushed_bytes": _UNFLUSHED_BYTES,
        "l0_max_ssts": _young_tables_max(young),
        "l0_max_ssts_per_key": _young_tables_max(young),
        "compactor_options": {
            "poll_interval": poll,
            "commit_compacted_interval": poll,
            # One for young tables, for which writers may have to wait, and one for merges on request.
            "max_concurrent_compactions": 2,
            "checkpoint_lifetime": f"{REPLACED_SECONDS}s",
            # SlateDB itself must never find two runs similar enough to merge.
            "scheduler_options": {
                "min_compaction_sources": str(_MANY_YOUNG_TABLES),
                "max_compaction_sources": str(_MERGED_YOUNG_TABLES),
                "include_size_threshold": "0",
            },
            "worker": {
                "compactions_poll_interval": poll,
                "max_concurrent_compactions": 2,
                "max_subcompactions": 1,
                # Each fetch is a thread on local disk: dozens would keep commits from the processors.
                "max_fetch_tasks": 1,
                "max_sst_size": _COMPACTED_BYTES,
            },
        },
    }
