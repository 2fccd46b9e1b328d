"""Makes a store from a backup.

The new store consists of the backup's files and shares nothing with the original. SlateDB's
manifest names tables below its own folder, so the two stores never write, fence or delete each
other's files. The manifest inherits checkpoints (restore points, readers, the backup's own freeze)
that belong to the original and pin manifests that are not in the backup, so the restore removes
them.

Until everything is durable, a file in the database's folder marks the restore as unfinished, so
nobody can open half a store or mistake it for an empty one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from streamfold.blob import BlobStore
from streamfold.blob.local_files import DRAFTS
from streamfold.errors import (
    BlobNotFoundError,
    DataCorruptError,
    InvalidError,
    NotFoundError,
    StreamfoldError,
)
from streamfold.store.backup import backup_manifest
from streamfold.store.backup.backup import PIECE, HashedPieces, Progress, first_leaf
from streamfold.store.backup.backup_manifest import FINISHED, BackedUpFile, BackupManifest
from streamfold.store.backup.store_files import (
    LOG,
    StoreFiles,
    folder_of,
    open_target,
    store_url,
)
from streamfold.store.engine.local_disk import current_boot, sync_path
from streamfold.store.engine.location import DATABASE, RESTORING, open_location
from streamfold.store.engine.native import Admin, EngineError
from streamfold.store.engine.slatedb import open_admin
from streamfold.store.engine.slatedb_rows import translated
from streamfold.store.engine.wal_files import MARKER, RestorePoint

#: Files copied concurrently.
_COPIES: Final = 4
#: Names that a new file system contains.
_IGNORED: Final = ("lost+found",)


class RestoreReport(NamedTuple):
    """The outcome of a restore."""

    manifest: BackupManifest
    #: The location of the restored store.
    store: str


async def restore_backup(
    backup: str,
    target: str,
    *,
    at: str | None = None,
    progress: Progress = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> RestoreReport:
    """Restore the newest backup in `backup`, or the one with the id `at`, to a store at `target`.

    Raises InvalidError before writing anything if the target is not empty. Checks every byte
    against the backup's checksums.
    """
    source = await open_backups(backup)
    manifest = await _choose(source, backup, at)
    url = store_url(target)
    await _check_empty(url)
    location = await asyncio.to_thread(open_location, url, environment)
    try:
        await location.check_access()
        files = await asyncio.to_thread(StoreFiles, location)
        if [meta async for meta in files.database.list()]:
            raise _not_empty(url)
        await files.database.put(RESTORING, f"{manifest.id}\n".encode())
        await _Copying(source, files, manifest, progress).run()
        try:
            number = await _forget_checkpoints(open_admin(location))
        except EngineError as error:
            raise translated(error) from error
        if location.folder is not None:
            await asyncio.to_thread(_note_restore_point, location.folder, number, manifest)
        await files.database.delete(RESTORING)
        return RestoreReport(manifest, url)
    finally:
        await asyncio.to_thread(location.close)


async def open_backups(backup: str) -> BlobStore:
    """Open the backups at `backup`. Raises NotFoundError if the folder does not exist."""
    folder = folder_of(store_url(backup))
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"there is no backup at {folder}: the folder does not exist")
    return await asyncio.to_thread(open_target, backup)


async def _choose(source: BlobStore, backup: str, at: str | None) -> BackupManifest:
    if at is None:
        finished = await backup_manifest.ids_below(source, FINISHED)
        if not finished:
            raise NotFoundError(
                f"there is no finished backup at {backup}: it has no manifest in {FINISHED}"
            )
        at = finished[-1]
    return await backup_manifest.read_backup(source, at)


async def _check_empty(url: str) -> None:
    folder = folder_of(url)
    if folder is not None:
        if folder.is_dir() and {path.name for path in folder.iterdir()} - set(_IGNORED):
            raise _not_empty(url)
        if folder.exists() and not folder.is_dir():
            raise InvalidError(f"the target {folder} is a file: name a folder that is empty")
        return
    async for _ in open_target(url).list():
        raise _not_empty(url)


def _not_empty(url: str) -> InvalidError:
    return InvalidError(
        f"the target {url} is not empty: restore to a new folder or prefix, and move the server there"
    )


class _Copying(NamedTuple):
    """Copies a backup's objects to the files of a new store."""

    source: BlobStore
    files: StoreFiles
    manifest: BackupManifest
    progress: Progress

    async def run(self) -> None:
        total, done = self.manifest.size, 0

        def advance(size: int) -> None:
            nonlocal done
            done += size
            self.progress(done, total)

        pending = iter(self.manifest.files)

        async def work() -> None:
            for file in pending:  # shared: each takes the next one
                await self._copy(file, advance)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_COPIES):
                    group.create_task(work())
        except* StreamfoldError as errors:
            raise first_leaf(errors) from None

    async def _copy(self, file: BackedUpFile, advance: Any) -> None:
        pieces = HashedPieces(self.source.stream(file.object, PIECE), advance)

        async def checked() -> AsyncIterator[bytes]:
            try:
                async for piece in pieces.pieces():
                    yield piece
            except BlobNotFoundError:
                raise self._damaged(file, "is missing") from None
            if pieces.size != file.size:
                raise self._damaged(file, f"has {pieces.size} of {file.size} bytes")
            if pieces.hexdigest() != file.sha256:
                raise self._damaged(file, "has other bytes than were backed up")

        blobs, key = self.files.blob(file.name)
        await blobs.put(key, checked())

    def _damaged(self, file: BackedUpFile, fault: str) -> DataCorruptError:
        return DataCorruptError(
            f"backup {self.manifest.id} is damaged: its object {file.object!r} {fault}; empty the "
            "target, and choose another backup with --at"
        )


async def _forget_checkpoints(admin: Admin) -> int:
    """Remove the original's checkpoints. Returns the number of the manifest without them."""
    while (manifest := await admin.read_manifest()) is not None and manifest.checkpoints:
        for checkpoint in manifest.checkpoints:
            await admin.delete_checkpoint(checkpoint.id)
    if manifest is None:
        raise DataCorruptError("the backup has no manifest of SlateDB")
    return manifest.id


def _note_restore_point(folder: Path, number: int, manifest: BackupManifest) -> None:
    """Make all files durable and write the restore point that `local_disk.py` expects."""
    with suppress(OSError):  # empty at this point
        (folder / DRAFTS).rmdir()
    for path in sorted((folder / "manifest").iterdir()):
        sync_path(path)
    sync_path(folder / "manifest")
    marks = [
        int(Path(file.name).stem)
        for file in manifest.files
        if file.name.startswith(f"{DATABASE}/{LOG}/") and not file.size
    ]
    point = RestorePoint(
        current_boot(),
        number,
        manifest.last_log_file,
        manifest.writer_epoch,
        tuple(sorted(marks)),
        in_flight=0,
    )
    (folder / LOG).mkdir(exist_ok=True)
    (folder / MARKER).write_bytes(msgspec.json.encode(point))
    for path in (folder / MARKER, folder / LOG, folder):
        sync_path(path)
