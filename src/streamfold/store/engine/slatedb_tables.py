"""Measures SlateDB's tables, merges them on request, and deletes replaced ones.

SlateDB itself merges young tables into a run (`slatedb.py` sets when). `reclaim.py` decides which runs
to merge, and this module merges them: SlateDB alone would rewrite most of the store at once, and would
never drop deleted rows while nothing is written.

A table that a merge has replaced stays for `REPLACED_SECONDS`, because scans that began before the
merge still read it; a scan that takes longer starts again after the last row that it returned.
SlateDB's collector deletes it after that. The collector is safe at any age: it keeps tables newer than
the newest young one, tables of running merges, and all files that a checkpoint names.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from streamfold.blob import BlobStore
from streamfold.errors import StorageError
from streamfold.store.engine.engine import DiskUse, TableRun, Tables
from streamfold.store.engine.native import (
    Admin,
    Compaction,
    EngineError,
    SlateManifest,
    TableView,
)

#: Seconds for which the tables that a merge has replaced stay readable.
REPLACED_SECONDS: Final = 5
#: Milliseconds of age below which the collector never deletes a file.
_MIN_AGE_MS = 5_000
#: Milliseconds for which manifests are kept, because a process that has listed them must still find
#: the newest. Longer on local disk, where nothing else prevents a process that was paused meanwhile
#: from reusing the number of a deleted manifest. Such a manifest is ignored, and the WAL rejects
#: that process's commits in any case.
_MANIFEST_MIN_AGE_MS, _LOCAL_MANIFEST_MIN_AGE_MS = 60_000, 600_000
#: Seconds between checks of whether a merge is done.
_MERGE_CHECK_INTERVAL = 0.25
#: What SlateDB says if it has stored a merge with a newer name meanwhile. Its clock is ours and never
#: goes back.
_OVERTAKEN: Final = "invalid clock tick"
#: Bytes of commits that are tracked as one.
_PENDING_STEP = 64 << 10


class SlateTables:
    """The tables of one open database. `sizes` returns the bytes of its files by name."""

    def __init__(self, admin: Admin, sizes: Callable[[], Any], *, local: bool) -> None:
        self._local = local
        self._admin = admin
        self._sizes = sizes
        #: Sequence numbers and bytes of commits that may not be in a table yet.
        self._pending: deque[list[int]] = deque()
        self._written = 0
        self._manifest: SlateManifest | None = None

    def committed(self, seqnum: int, size: int) -> None:
        """Record a commit of `size` bytes whose last row has this sequence number."""
        self._written += size
        if self._pending and self._pending[-1][1] < _PENDING_STEP:
            last = self._pending[-1]
            last[0], last[1] = seqnum, last[1] + size
        else:
            self._pending.append([seqnum, size])

    async def read(self) -> Tables:
        return self._tables(await self._newest_manifest())

    async def _newest_manifest(self) -> SlateManifest:
        """Return the newest manifest read so far.

        Of two concurrent reads, the later may return the older manifest.
        """
        manifest = await self._admin.read_manifest()
        if manifest is None:
            raise StorageError("storage has lost the manifests of an open store")
        if self._manifest is None or manifest.id > self._manifest.id:
            self._manifest = manifest
        return self._manifest

    def _tables(self, manifest: SlateManifest) -> Tables:
        while self._pending and self._pending[0][0] <= manifest.last_table_seq:
            self._pending.popleft()
        return Tables(
            tuple(view.size for view in manifest.young),
            tuple(TableRun(run.id, run.size) for run in manifest.runs),
            sum(size for _, size in self._pending),
            self._written,
        )

    async def merge(self, runs: Sequence[int], *, young: bool, damaged: Sequence[str] = ()) -> bool:
        """Merge `runs` and, with `young`, all young tables.

        Never merges `damaged` tables, because that would never end.
        """
        manifest = await self._newest_manifest()
        present = [run.id for run in manifest.runs]
        views = list(manifest.young) if young else []
        views += [view for run in manifest.runs if run.id in runs for view in run.views]
        if any(file.endswith(tuple(_files_of(views))) for file in damaged if views):
            return False
        views_merged = [view.id for view in manifest.young] if young else []
        runs_merged = [run for run in present if run in runs]
        if not (views_merged or runs_merged) or not set(runs) <= set(present):
            return False
        if young and runs and present[0] not in runs:
            return False  # SlateDB has just made a run of young tables, which belongs between these
        destination = min(runs) if runs else max(present, default=-1) + 1
        try:
            submitted = await self._admin.submit_compaction(views_merged, runs_merged, destination)
        except EngineError as error:
            if _OVERTAKEN not in str(error.args[1]):
                raise
            # SlateDB stored another merge after naming this one: upstream defect 30.
            return False
        merge: Compaction | None = submitted
        while merge is not None and not merge.ended:
            await asyncio.sleep(_MERGE_CHECK_INTERVAL)
            merge = await self._admin.read_compaction(submitted.id)
        if merge is not None:
            return merge.completed
        # The merge has ended, and SlateDB has dropped its result after later merges: upstream defect 6.
        # A successful merge replaces its sources.
        return not _files_of(views) & (await self._newest_manifest()).files

    async def collect(self, *, log: bool) -> None:
        """Delete files that are no longer needed, including WAL files if `log` is set."""
        await self._admin.collect(_garbage(log=log, local=self._local))

    async def disk_use(self) -> DiskUse:
        sizes = await self._sizes()
        manifest = await self._newest_manifest()
        if sizes is None:
            return DiskUse(self._tables(manifest).total, 0)
        total, tables = sizes
        needed = manifest.files
        return DiskUse(total, sum(size for name, size in tables.items() if name not in needed))


def _files_of(views: Iterable[TableView]) -> set[str]:
    return {view.file for view in views}


def _garbage(*, log: bool, local: bool) -> dict[str, Any]:
    """Return the collector's options. It does not collect kinds of files that are None or missing.

    Keeps the marks of new writers in the log. Without them, a writer replaced long ago could
    consider itself the only one.
    """
    manifest_age = _LOCAL_MANIFEST_MIN_AGE_MS if local else _MANIFEST_MIN_AGE_MS

    def older_than(age_ms: int) -> dict[str, Any]:
        return {"interval": None, "min_age": f"{age_ms}ms"}

    return {
        "manifest_options": older_than(manifest_age),
        "compacted_options": older_than(_MIN_AGE_MS),
        "compactions_options": older_than(manifest_age),
        "wal_options": older_than(_MIN_AGE_MS) if log else None,
        # SlateDB records how far it has deleted manifests by replacing a file, which it cannot do
        # on local disk: after the first time, it would delete no manifests.
        "boundary_files_enabled": not local,
    }


def sizes_of(folder: Path | None, files: BlobStore | None) -> Callable[[], Any]:
    """Return a function that measures all files, and each table by name. It returns None in memory."""

    async def sizes() -> tuple[int, dict[str, int]] | None:
        if folder is not None:
            return await asyncio.to_thread(lambda: _summed(_local_files(folder)))
        if files is not None:
            return _summed([(meta.key, meta.size) async for meta in files.list()])
        return None

    return sizes


def _summed(files: Iterable[tuple[str, int]]) -> tuple[int, dict[str, int]]:
    total, tables = 0, {}
    for name, size in files:
        total += size
        kind, _, rest = name.partition("/")
        if kind == "compacted":
            tables[rest] = size
    return total, tables


def _local_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the name, below `folder`, and size of each file.

    Creates no path objects: there may be thousands of files, and a thread that builds so many
    objects keeps the GIL from commits in progress.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield from _local_files(Path(entry.path), f"{name}/")
                elif (size := _size_of(entry)) is not None:
                    yield name, size
    except FileNotFoundError:
        return  # deleted during the walk


def _size_of(entry: os.DirEntry[str]) -> int | None:
    """Return the bytes of a file, or None if it is something else or was deleted."""
    with suppress(FileNotFoundError):
        return entry.stat().st_size if entry.is_file() else None
    return None
