"""Copies a running store to a folder or a bucket, as it was at one moment.

The copy is consistent, although the server writes and deletes files all the time:

1. A freeze (`engine/freeze.py`) pins SlateDB's newest manifest with its tables. While it lasts, the
   server deletes nothing that this state, or a later one, needs.
2. The log files after that manifest are listed. They have every commit since, so every record
   acknowledged before the backup began is in the manifest's tables or in these files. The log is cut
   between two commits, which are atomic: nothing is in the backup by half.
3. Chunk files and snapshots are listed after that. A file is durable before the commit that names it,
   so the listing has all files that a copied row names. Files of later commits are in it, too: to the
   restored store they are leftovers.
4. The backup's manifest is written when everything else is durable in the target.

A server of an earlier version does not know freezes. If a listed file is gone before it was copied, the
backup therefore starts again from a new freeze; what is copied already is not copied again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from streamfold.blob import BlobStore
from streamfold.errors import (
    BlobNotFoundError,
    DataCorruptError,
    FormatUnsupportedError,
    InvalidError,
    StorageError,
    StreamfoldError,
)
from streamfold.store import keys, rows
from streamfold.store.backup import backup_manifest
from streamfold.store.backup.backup_manifest import (
    FINISHED,
    OBJECTS,
    UNFINISHED,
    BackedUpFile,
    BackupManifest,
    key_of,
    prune,
)
from streamfold.store.backup.store_files import (
    StoreFile,
    StoreFiles,
    check_is_store,
    folder_of,
    open_target,
    store_url,
)
from streamfold.store.engine.freeze import Freeze, freeze
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.native import Admin
from streamfold.store.engine.slatedb import open_admin
from streamfold.store.read_only import ReaderEngine
from streamfold.store.rows import FormatRow
from streamfold.store.supervisor import FORMAT_VERSION

logger = logging.getLogger(__name__)

#: Below this prefix are the blobs that make a folder or prefix a store.
_STORE: Final = "db/manifest/"
#: Attempts to copy a state before any of its files vanishes.
_ATTEMPTS: Final = 10
#: Files copied concurrently, and bytes of each held in memory.
_COPIES: Final = 4
PIECE: Final = 4 << 20
#: Bytes from which a piece is hashed in a thread.
_THREAD_FROM: Final = 64 << 10
#: Seconds between records of what an unfinished backup has copied.
_NOTE_INTERVAL: Final = 5.0

#: Called with the bytes copied so far, and the total bytes if known.
Progress = Callable[[int, int], None]


class BackupReport(NamedTuple):
    """The outcome of a backup."""

    manifest: BackupManifest
    #: Files that this backup copied. The others were already in the target.
    copied_files: int
    copied_bytes: int
    #: Ids of backups that were deleted.
    deleted: tuple[str, ...]


class _FileVanishedError(StorageError):
    """A file of the store was deleted before it was copied."""


async def back_up(
    store: str,
    target: str,
    *,
    keep: int | None = None,
    progress: Progress = lambda done, total: None,
    environment: Mapping[str, str] = os.environ,
) -> BackupReport:
    """Back up the store at `store` to `target`, each a URL or a folder. The store may be in use.

    With `keep`, afterwards delete all but the newest `keep` backups in the target.
    """
    url, target_url = store_url(store), store_url(target)
    check_is_store(url)
    _check_apart(url, target_url)
    location = await asyncio.to_thread(open_location, url, environment)
    try:
        version = await _store_format(location)
        blobs = await asyncio.to_thread(open_target, target_url)
        await _check_no_store(blobs, target_url)
        files = await asyncio.to_thread(StoreFiles, location)
        run = _BackupRun(url, version, files, open_admin(location), blobs, progress)
        manifest = await run.run()
        deleted = await prune(blobs, keep) if keep is not None else ()
        return BackupReport(manifest, run.copied_files, run.copied_bytes, deleted)
    finally:
        await asyncio.to_thread(location.close)


def _check_apart(url: str, target_url: str) -> None:
    """Raise if the target is in the store, or the store in the target."""
    here, there = url.rstrip("/") + "/", target_url.rstrip("/") + "/"
    if (folder := folder_of(url)) and (other := folder_of(target_url)):
        here, there = f"{folder.resolve()}/", f"{other.resolve()}/"
    if here.startswith(there) or there.startswith(here):
        raise InvalidError(
            f"the target {target_url} and the store {url} are within each other: choose a folder or "
            "prefix of its own for backups"
        )


async def _check_no_store(target: BlobStore, url: str) -> None:
    if [blob async for blob in target.list(_STORE)]:
        raise InvalidError(
            f"the target {url} is a store: choose a folder or prefix of its own for backups"
        )


async def _store_format(location: Location) -> int:
    """Return the store's format. Raises FormatUnsupportedError if this version cannot read it."""
    engine = await ReaderEngine.open_reader(location)
    try:
        value = await engine.get(keys.FORMAT)
    finally:
        await engine.close()
    version = rows.decode(value, FormatRow).version if value else 0
    if version > FORMAT_VERSION:
        raise FormatUnsupportedError(
            f"the store has format {version}, but this version reads up to {FORMAT_VERSION}: use the "
            "version that wrote it, or a newer one"
        )
    return version


@dataclass
class _BackupRun:
    """A backup in progress."""

    store: str
    store_format: int
    files: StoreFiles
    admin: Admin
    target: BlobStore
    progress: Progress

    def __post_init__(self) -> None:
        self._began_at = time.time_ns() // 1_000_000
        self._id = backup_manifest.new_id(self._began_at)
        #: Objects in the target, keyed by their file's name, size and stamp.
        self._objects: dict[tuple[str, int, str], BackedUpFile] = {}
        self.copied_files = 0
        self.copied_bytes = 0
        self._done = self._total = 0
        self._noted_at = time.monotonic()
        self._copied: list[BackedUpFile] = []

    async def run(self) -> BackupManifest:
        self._objects = await _usable_objects(self.target)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with freeze(self.admin) as frozen:
                    manifest = await self._copy_state(frozen)
                    frozen.check()
                    content = backup_manifest.encode(manifest)
                    await self.target.put_if_absent(key_of(FINISHED, self._id), content)
                break
            except _FileVanishedError as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.info("starting again from a newer state: %s", error)
        await self.target.delete(key_of(UNFINISHED, self._id))
        return manifest

    async def _copy_state(self, frozen: Freeze) -> BackupManifest:
        state = frozen.manifest
        log = await self.files.log_files(state.replay_after)
        newest = await self.admin.read_manifest()
        if newest is None or newest.writer_epoch != state.writer_epoch:
            raise _FileVanishedError("another server took the store over: try again later")
        if newest.replay_after != state.replay_after:
            # A collection that began before the freeze may have deleted log files before the listing.
            raise _FileVanishedError("the store's tables change too often: try again later")
        if log.missing is not None:
            raise DataCorruptError(
                f"the store lacks the log file {log.missing}: run `streamfold check` to see what that "
                "costs"
            )
        files = [*log.files]
        files += [await self.files.manifest(state.id), *await self.files.tables(state)]
        files += [file async for file in self.files.chunk_files(state.writer_epoch)]
        files += [file async for file in self.files.snapshots()]
        self._done, self._total = 0, sum(file.size for file in files)
        entries = await self._copy_all(files)
        return BackupManifest(
            id=self._id,
            began_at=self._began_at,
            store=self.store,
            store_format=self.store_format,
            slatedb_manifest=state.id,
            writer_epoch=state.writer_epoch,
            last_log_file=log.last,
            files=entries,
        )

    async def _copy_all(self, files: Iterable[StoreFile]) -> list[BackedUpFile]:
        """Copy the files that the target does not have yet. Returns all entries, sorted by name."""
        entries: list[BackedUpFile] = []
        pending = iter(files)

        async def work() -> None:
            for file in pending:  # shared: each takes the next one
                entry = await self._entry(file)
                if entry is not None:
                    entries.append(entry)
                await self._note()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_COPIES):
                    group.create_task(work())
        except* StreamfoldError as errors:
            raise first_leaf(errors) from None
        return sorted(entries, key=lambda entry: entry.name)

    async def _entry(self, file: StoreFile) -> BackedUpFile | None:
        """Copy `file` unless the target has it. Returns None if an optional file has vanished."""
        entry = self._objects.get((file.name, file.size, file.stamp))
        if entry is not None:
            self._advance(file.size)
            return entry
        key = f"{OBJECTS}{self._id}/{file.name}"
        blobs, source = self.files.blob(file.name)
        digest = HashedPieces(blobs.stream(source, PIECE), self._advance)
        try:
            await self.target.put(key, digest.pieces())
        except BlobNotFoundError:
            if file.optional:
                return None
            raise _FileVanishedError(
                f"the store deleted {file.name!r} before it was copied: a server of this version keeps "
                "such files during a backup; upgrade it, or stop it meanwhile"
            ) from None
        if digest.size != file.size:
            raise DataCorruptError(
                f"the file {file.name!r} of the store has {digest.size} bytes, but storage lists it "
                f"with {file.size}: run `streamfold check`"
            )
        entry = BackedUpFile(file.name, key, digest.size, digest.hexdigest(), file.stamp)
        self._objects[file.name, file.size, file.stamp] = entry
        self._copied.append(entry)
        self.copied_files += 1
        self.copied_bytes += digest.size
        return entry

    def _advance(self, size: int) -> None:
        self._done += size
        self.progress(self._done, self._total)

    async def _note(self) -> None:
        """Every few seconds, record the copied objects so that the next backup can reuse them."""
        if time.monotonic() - self._noted_at < _NOTE_INTERVAL or not self._copied:
            return
        self._noted_at = time.monotonic()
        unfinished = BackupManifest(
            id=self._id,
            began_at=self._began_at,
            store=self.store,
            store_format=self.store_format,
            slatedb_manifest=0,
            writer_epoch=0,
            last_log_file=0,
            files=list(self._copied),
        )
        await self.target.put(key_of(UNFINISHED, self._id), backup_manifest.encode(unfinished))


class HashedPieces:
    """Counts pieces and computes their SHA-256 while passing them on."""

    def __init__(self, pieces: AsyncIterator[bytes], advance: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._advance = advance
        self._hash = hashlib.sha256()
        self.size = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            if len(piece) < _THREAD_FROM:
                self._hash.update(piece)
            else:
                await asyncio.to_thread(self._hash.update, piece)
            self.size += len(piece)
            yield piece
            self._advance(len(piece))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def first_leaf(errors: BaseExceptionGroup[StreamfoldError]) -> BaseException:
    """Return the first leaf error of a group. The group itself adds no information."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _usable_objects(target: BlobStore) -> dict[tuple[str, int, str], BackedUpFile]:
    """Return the intact objects of the newest backup and of all interrupted backups."""
    sizes = {meta.key: meta.size async for meta in target.list(OBJECTS)}
    finished = await backup_manifest.ids_below(target, FINISHED)
    unfinished = await backup_manifest.ids_below(target, UNFINISHED)
    usable: dict[tuple[str, int, str], BackedUpFile] = {}
    for folder, backup_ids in ((FINISHED, finished[-1:]), (UNFINISHED, unfinished)):
        for backup_id in backup_ids:
            try:
                manifest = await backup_manifest.read_backup(target, backup_id, folder)
            except DataCorruptError as error:
                logger.warning("its objects are not used again: %s", error)
                continue
            for file in manifest.files:
                if sizes.get(file.object) == file.size:
                    usable[file.name, file.size, file.stamp] = file
    return usable
