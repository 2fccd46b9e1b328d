"""The engine on SlateDB: group commits as write batches, flushed on demand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.errors import StorageError, WriterFencedError
from streamfold.store.engine import slatedb_binding, slatedb_reads
from streamfold.store.engine.engine import Batch, DiskUse, Op, Tables, size_of
from streamfold.store.engine.freeze import is_frozen
from streamfold.store.engine.local_disk import LocalDisk, forget_restore_point
from streamfold.store.engine.location import Location
from streamfold.store.engine.slatedb_clock import SlateClock, newest_time, system_time
from streamfold.store.engine.slatedb_rows import READ, SlateRows, translated
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
T = TypeVar("T")

#: Seconds to wait for a failed database to report the cause.
_CAUSE_TIMEOUT = 1.0
_CAUSE_PAUSE = 0.01
#: Seconds to repeat opening and the first read for, while SlateDB's clock is behind its newest write.
_CLOCK_TIMEOUT, _CLOCK_PAUSE = 30.0, 0.01
_CLOCK_BEHIND = "invalid clock tick"
#: Part of the message of an error that does not contain storage's answer.
_NO_CAUSE = "(object store error)"

#: Seconds within which storage must answer once to be opened.
_ANSWER_TIMEOUT = 15.0

#: Collections to run after the last commit: SlateDB may still merge young tables meanwhile, and
#: checkpoints that have yet to expire may hold replaced files.
_IDLE_COLLECTIONS = 2
#: A key that no row has: deleting it gives `flush` something to write.
_NO_ROW = b"\xff"

_WAL = binding.FlushOptions(flush_type=binding.FlushType.WAL)
#: One file ahead: SlateDB would wait for further ones in the background long after the last was read.
_READ_WAL = binding.SlateDbWalReaderOptions(max_fetch_tasks=1)


class SlateEngine(SlateRows):
    """SlateDB as an Engine."""

    def __init__(
        self,
        db: Any,
        admin: Any,
        epoch: int,
        disk: LocalDisk | None,
        tables: SlateTables,
        check: TableCheck,
    ) -> None:
        super().__init__(slatedb_reads.Reads(db, READ), check)
        self._db = db
        self._admin = admin
        self._epoch = epoch
        self._disk = disk
        self._tables = tables
        self._order = asyncio.Lock()
        #: Whether a commit ended before SlateDB had its rows: later ones must not be stored without it.
        self._incomplete = False
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
                await disk.repair(open_admin(location), wal_reader(location))
            elif location.folder is not None:
                forget_restore_point(location.folder)
            await location.check_access()
            # Another reader than that of the repair, which may have read ahead files that are gone now.
            wal = wal_reader(location)
            db, admin, epoch = await _until_clock_accepted(lambda: _build(location, wal, now))
        except (*slatedb_binding.FAILURES, OSError) as error:
            if disk is not None and is_damage(error):
                await disk.name_damage(open_admin(location), wal_reader(location))
            raise translated(error) from error
        sizes, local = sizes_of(location.folder, location.files), location.folder is not None
        tables = SlateTables(db, admin, sizes, local=local)
        engine = cls(db, admin, epoch, disk, tables, table_check(location, admin))
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
            await _until_clock_accepted(self._read_any)
        except (*slatedb_binding.FAILURES, OSError) as error:
            raise translated(error) from error

    async def _check_epoch(self) -> None:
        """Raise WriterFencedError unless this opening has the number after the last.

        SlateDB does not say which number it took. If another process opened the store at the same time,
        the number in storage may be that process's: both would believe that they have it, and would
        write chunk files of the same names.
        """
        manifest = await slatedb_binding.read_manifest(self._admin)
        if manifest.writer_epoch != self._epoch:
            raise WriterFencedError

    async def _read_any(self) -> None:
        with suppress(binding.Error.Data, binding.InternalError):  # damage: the clock is accepted
            await self._reads.get(b"any key")

    def prepare(self, ops: list[Op]) -> Batch:
        try:
            return Batch(ops, size_of(ops), slatedb_binding.write_batch(ops))
        except slatedb_binding.FAILURES as error:
            raise translated(error) from error

    async def commit(self, batch: Batch) -> None:
        if not batch.ops:
            return  # SlateDB refuses an empty batch
        try:
            # The lock is first come, first served: rows enter SlateDB in the order of the calls.
            async with self._order:
                if self._incomplete:
                    raise StorageError("an earlier commit failed: open the store again")
                self._incomplete = True
                written = await self._db.write(batch.native)
                seqnum = written.seqnum()
                self._incomplete = False
                self._tables.committed(seqnum, batch.size)
                self._committed = True
            await self._db.flush_with_options(_WAL)
            if self._db.status().durable_seq < seqnum:
                await written.await_durable()
            if self._disk is not None:
                await self._disk.sync_wal()
        except slatedb_binding.FAILURES as error:
            raise translated(await self._cause(error)) from error
        except OSError as error:
            raise translated(error) from error

    async def _cause(self, error: Any) -> Any:
        """Storage's answer when a commit failed. SlateDB at first reports, once or several times, only
        that its WAL failed, and gives the answer in a later call (upstream defect 3).
        """
        try:
            async with asyncio.timeout(_CAUSE_TIMEOUT):
                while not isinstance(error, binding.Error.Closed) and _NO_CAUSE in str(error):
                    try:
                        await self._db.flush_with_options(_WAL)
                    except slatedb_binding.FAILURES as next_error:
                        error = next_error
                    await asyncio.sleep(_CAUSE_PAUSE)
        except TimeoutError:
            pass  # the first error is all that SlateDB gives
        return error

    async def check(self) -> None:
        try:
            manifest = await slatedb_binding.read_manifest(self._admin)
        except slatedb_binding.FAILURES as error:
            raise translated(error) from error
        if manifest is None or manifest.writer_epoch != self._epoch:
            raise WriterFencedError

    async def frozen(self) -> bool:
        return await is_frozen(self._admin)

    async def tables(self) -> Tables:
        try:
            return await self._tables.read()
        except slatedb_binding.FAILURES as error:
            raise translated(error) from error

    async def flush(self) -> None:
        """Write a young table, even if there is no row to write.

        The collector keeps all tables that are newer than the newest young one: this moves that limit.
        """
        try:
            async with self._order:
                await self._db.write(slatedb_binding.write_batch([(_NO_ROW, None)]))
                self._committed = True
            try:
                await self._tables.flush()
            finally:
                if self._disk is not None:  # few log files may be without a sync: see local_disk.py
                    await self._disk.sync_wal()
        except (*slatedb_binding.FAILURES, OSError) as error:
            raise translated(error) from error

    async def merge(self, runs: Sequence[int], *, young: bool) -> bool:
        try:
            return await self._tables.merge(runs, young=young, damaged=self.damaged_files)
        except slatedb_binding.FAILURES as error:
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
        except (*slatedb_binding.FAILURES, OSError) as error:
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
        layer = binding.FlushType.MEM_TABLE if flush else None
        try:
            await self._db.shutdown_with_options(binding.CloseOptions(flush_type=layer))
            if flush and self._disk is not None:
                await self._disk.finish()
        except slatedb_binding.FAILURES as error:
            # A database that is already closed or fenced has nothing left to flush.
            if not isinstance(error, binding.Error.Closed):
                raise translated(error) from error
        except OSError as error:
            raise translated(error) from error


def table_check(location: Location, admin: Any, fixed: Any = None) -> TableCheck:
    """Checks the tables at `location`: those of the newest manifest, or of one that is `fixed`."""
    read = reader_of(location.folder, location.files)

    async def manifest() -> Any:
        return fixed or await slatedb_binding.read_manifest(admin)

    return TableCheck(manifest, read)


def wal_reader(location: Location) -> Any:
    """SlateDB's reader of log files."""
    return binding.SlateDbWalReader.with_options(location.path, location.store, _READ_WAL)


def open_admin(location: Location) -> Any:
    return binding.AdminBuilder(location.path, location.store).build()


async def _check_answers(admin: Any, location: Location) -> Any:
    """The newest manifest, None if there is none; raises if storage does not answer.

    SlateDB itself would retry without end and without a message.
    """
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            return await slatedb_binding.read_manifest(admin)
    except TimeoutError:
        raise StorageError(
            f"storage at {location.url} did not answer as expected within {_ANSWER_TIMEOUT} s: check "
            "that it exists, its endpoint and the credentials"
        ) from None


async def _build(location: Location, wal: Any, now: Callable[[], int]) -> tuple[Any, Any, int]:
    """Open the database, and an admin, with a clock that is not behind the newest write.

    The last value is the epoch that the database has if nobody else opened it meanwhile.
    """
    builder = binding.DbBuilder(location.path, location.store)
    builder.with_sst_block_size(binding.SstBlockSize.BLOCK64_KIB)
    cache = binding.FoyerCacheOptions(max_capacity=_CACHE_BYTES, shards=4)
    builder.with_db_cache(binding.DbCache.new_foyer_cache(cache), 0)
    admin = open_admin(location)
    manifest = await _check_answers(admin, location)
    settings = _settings(local=location.folder is not None)
    _set_young_tables(settings, 0 if manifest is None else len(manifest.l0))
    builder.with_settings(settings)
    seen = await newest_time(manifest, admin, wal) if manifest is not None else 0
    clock = await SlateClock.for_time(max(now(), seen), location.url)
    admin = clock.start(lambda: open_admin(location))
    epoch = 1 if manifest is None else manifest.writer_epoch + 1
    return await clock.open(builder.build), admin, epoch


async def _until_clock_accepted(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` until SlateDB accepts its clock (upstream defect 2).

    While another process is still writing, opening the database and the first read after it found the
    clock up to 57 ms behind the newest write.
    """
    end = time.monotonic() + _CLOCK_TIMEOUT
    while True:
        try:
            return await call()
        except binding.Error.Invalid as error:
            if _CLOCK_BEHIND not in str(error) or time.monotonic() > end:
                raise
            await asyncio.sleep(_CLOCK_PAUSE)


def _set_young_tables(settings: Any, present: int) -> None:
    """Make writers wait for merges at some number of young tables.

    A damaged one is never merged (upstream defect 21). If they are many already, allow more: otherwise
    writers would wait without end.
    """
    most = max(_YOUNG_TABLES, 2 * present)
    settings.set("l0_max_ssts", str(most))
    settings.set("l0_max_ssts_per_key", str(most))


def _settings(*, local: bool) -> Any:
    settings = binding.Settings.default()
    # Off: `SlateTables.collect` calls the collector when files can be deleted, on local disk after a
    # restore point.
    settings.set("garbage_collector_options", "null")
    # No timer: each commit flushes, so an ack waits for one write and not for a tick.
    settings.set("flush_interval", "null")
    settings.set("object_store_max_retries", str(_RETRIES))
    settings.set("l0_sst_size_bytes", str(_TABLE_BYTES))
    settings.set("max_unflushed_bytes", str(_UNFLUSHED_BYTES))
    # A writer at full speed waits while young tables are too many: check for work often.
    for name in ("poll_interval", "worker.compactions_poll_interval", "commit_compacted_interval"):
        settings.set(f"compactor_options.{name}", f'"{_POLL_LOCAL if local else _POLL_REMOTE}"')
    # One for young tables, for which writers may have to wait, and one for merges on request.
    settings.set("compactor_options.max_concurrent_compactions", "2")
    settings.set("compactor_options.worker.max_concurrent_compactions", "2")
    settings.set("compactor_options.checkpoint_lifetime", f'"{REPLACED_SECONDS}s"')
    # SlateDB itself must never find two runs similar enough to merge.
    scheduler = {
        "min_compaction_sources": str(_MANY_YOUNG_TABLES),
        "max_compaction_sources": str(_MERGED_YOUNG_TABLES),
        "include_size_threshold": "0",
    }
    settings.set("compactor_options.scheduler_options", json.dumps(scheduler))
    settings.set("compactor_options.worker.max_subcompactions", "1")
    # Each fetch is a thread on local disk: dozens of them would keep commits from the processors.
    settings.set("compactor_options.worker.max_fetch_tasks", "1")
    settings.set("compactor_options.worker.max_sst_size", str(_COMPACTED_BYTES))
    return settings
