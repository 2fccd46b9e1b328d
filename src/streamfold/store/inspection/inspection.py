"""Checks a whole store, running or stopped, without changing its content.

A freeze (`engine/freeze.py`) keeps the files of the newest state in place. SlateDB's reader replays the
log on top of that state once and stays at the result. So the check covers one moment, including every
record acknowledged before it began. A running server continues, but deletes files later.

The reader must have the tables that the freeze pins. It opens a moment later, so if the tables have
changed by then, both start again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from streamfold.errors import NotFoundError, StorageError
from streamfold.store.backup.store_files import StoreFiles, check_is_store, store_url
from streamfold.store.engine.freeze import Freeze, freeze
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.native import Admin, EngineError
from streamfold.store.engine.slatedb import open_admin
from streamfold.store.engine.slatedb_rows import translated
from streamfold.store.inspection.catalog_check import CatalogCheck, DocumentCheck
from streamfold.store.inspection.chunk_check import ChunkCheck
from streamfold.store.inspection.file_check import (
    DatabaseCheck,
    NewSnapshotHash,
    SnapshotCheck,
    UnnamedFiles,
)
from streamfold.store.inspection.report import CheckReport, RowScan
from streamfold.store.inspection.stream_check import StreamCheck
from streamfold.store.inspection.stream_index import StreamIndex
from streamfold.store.read_only import ReaderEngine

#: Attempts to open a reader with the same tables as a freeze.
_ATTEMPTS: Final = 10


class _TablesChangedError(StorageError):
    """Raised if the reader's tables differ from those of the freeze."""


async def inspect_store(
    store: str,
    *,
    new_snapshot_hash: NewSnapshotHash | None = None,
    check_document: DocumentCheck = lambda kind, document_id, content: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> CheckReport:
    """Check the store at `store`, a URL or a folder. It may be in use.

    Raises only if the store cannot be checked: it does not exist, a newer version wrote it, or
    storage fails.
    """
    url = store_url(store)
    check_is_store(url)
    began = time.monotonic()
    location = await asyncio.to_thread(open_location, url, environment)
    try:
        await location.check_access()
        for attempt in range(1, _ATTEMPTS + 1):
            inspection = _Inspection(location, url, new_snapshot_hash, check_document, progress)
            try:
                report = await inspection.run()
                break
            except _TablesChangedError:
                if attempt == _ATTEMPTS:
                    raise
        report.seconds = round(time.monotonic() - began, 3)
        return report
    except EngineError as error:
        raise translated(error) from error
    finally:
        await asyncio.to_thread(location.close)


class _Inspection:
    """A check in progress."""

    def __init__(
        self,
        location: Location,
        url: str,
        new_snapshot_hash: NewSnapshotHash | None,
        check_document: DocumentCheck,
        progress: Callable[[int, int], None],
    ) -> None:
        self._location = location
        self._report = CheckReport(url)
        self._new_snapshot_hash = new_snapshot_hash
        self._check_document = check_document
        self._progress = progress
        self._done = self._total = 0

    def _advance(self, size: int) -> None:
        self._done += size
        self._progress(self._done, self._total)

    async def run(self) -> CheckReport:
        admin = open_admin(self._location)
        if await admin.read_manifest() is None:
            raise NotFoundError(f"there is no store at {self._report.store}: check the location")
        async with freeze(admin) as frozen:
            files = await asyncio.to_thread(StoreFiles, self._location)
            streams = StreamIndex(self._report)
            database = DatabaseCheck(self._location, files, self._report)
            await database.check_tables(frozen.manifest)
            await database.check_restore_point()
            replayed = await database.check_log(frozen.manifest)
            engine = await self._open(admin, frozen, replay_log=replayed)
            try:
                await self._check_rows(engine, streams, database)
            finally:
                await engine.close()
            frozen.check()
        return self._report

    async def _open(self, admin: Admin, frozen: Freeze, *, replay_log: bool) -> ReaderEngine:
        engine = await ReaderEngine.open_reader(
            self._location, fixed=frozen.manifest, replay_log=replay_log
        )
        newest = await admin.read_manifest()
        if newest is None or newest.files != frozen.manifest.files:
            await engine.close()
            raise _TablesChangedError("the store's tables change too often: check it again later")
        return engine

    async def _check_rows(
        self, engine: ReaderEngine, streams: StreamIndex, database: DatabaseCheck
    ) -> None:
        report, location = self._report, self._location
        chunk_blobs = await asyncio.to_thread(location.open_chunks, fsync=False)
        sizes = [meta.size async for meta in chunk_blobs.list()]
        sizes += [meta.size async for meta in location.snapshots.list()]
        self._total = report.counts.table_bytes + sum(sizes)
        scan = RowScan(engine, report, self._advance)
        catalog = CatalogCheck(scan, streams, report, self._check_document)
        await catalog.check_format()
        await catalog.before_records()
        chunks = ChunkCheck(scan, streams, chunk_blobs, report, self._advance)
        await chunks.run()
        snapshots = SnapshotCheck(
            scan, streams, location.snapshots, report, self._new_snapshot_hash, self._advance
        )
        await snapshots.run()
        await catalog.after_records()
        stream_check = StreamCheck(streams, chunks)
        if chunks.missing_files:
            now = await ReaderEngine.open_reader(location)
            try:
                await stream_check.check_missing_files(now)
            finally:
                await now.close()
        stream_check.run()
        database.report_lost(streams)
        unnamed = UnnamedFiles(report, catalog.leftovers)
        await unnamed.count_chunk_files(chunk_blobs, chunks.named_files)
        await unnamed.count_snapshots(location.snapshots, snapshots.named)
