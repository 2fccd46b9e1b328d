"""Accesses a store's files as blobs, by their names below its location."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from streamfold.blob import BlobMeta, BlobStore, LocalBlobStore, location_url, open_blob_store
from streamfold.errors import BlobNotFoundError, DataCorruptError, InvalidError, NotFoundError
from streamfold.store.engine.location import (
    CHUNKS,
    DATABASE,
    RESTORING,
    SNAPSHOTS,
    Location,
    unfinished_restore,
)
from streamfold.store.engine.native import SlateManifest
from streamfold.store.log.chunk_files import FileName

LOG: Final = "wal"
_LOG_FILE: Final = re.compile(rf"{LOG}/([0-9]{{20}})\.sst")
#: Unpublished snapshot parts: they belong to requests, not to the store.
_PARTS: Final = "parts/"


class StoreFile(NamedTuple):
    """A file of a store."""

    name: str
    size: int
    #: Changes whenever storage has a different file with this name.
    stamp: str
    #: Whether a backup is complete without the file.
    optional: bool = False


class LogFiles(NamedTuple):
    """Consecutive log files."""

    files: list[StoreFile]
    #: The number of the last of these files, and of the last file in the listing.
    last: int
    end: int
    #: The number of a file missing before `end`; None if none is missing.
    missing: int | None


def store_url(text: str) -> str:
    """Return the URL of a location given as a URL or as a folder's path."""
    return location_url(text)


def open_target(url: str) -> BlobStore:
    """Open the blobs at `url`, a URL or a folder. Creates a folder for this user alone."""
    located = store_url(url)
    if (folder := folder_of(located)) is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidError(
                f"cannot use the folder {str(folder)!r} ({error.strerror}): choose another one"
            ) from None
    return open_blob_store(located)


def folder_of(url: str) -> Path | None:
    """Return the folder that a file:// URL names, or None for other URLs."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


class StoreFiles:
    """Reads, lists and writes the files of the store at `location`."""

    def __init__(self, location: Location) -> None:
        database = location.files
        if location.folder is not None:
            database = LocalBlobStore(location.folder)
        if database is None:
            raise InvalidError(f"{location.url} has no files: give a folder or s3://bucket/prefix")
        self.database = database
        self._areas: Mapping[str, BlobStore] = {
            DATABASE: database,
            CHUNKS: location.open_chunks(fsync=True),
            SNAPSHOTS: location.snapshots,
        }

    def blob(self, name: str) -> tuple[BlobStore, str]:
        """Return the blob store that contains a file, and the file's key there."""
        area, _, key = name.partition("/")
        return self._areas[area], key

    async def log_files(self, after: int) -> LogFiles:
        """List the log files with numbers above `after`.

        The log keeps growing meanwhile. A listing has every file that existed when it began, so all
        records acknowledged by then are in files before the first number that it lacks.
        """
        files: dict[int, StoreFile] = {}
        async for meta in self.database.list(f"{LOG}/"):
            if (match := _LOG_FILE.fullmatch(meta.key)) and int(match[1]) > after:
                files[int(match[1])] = _file(DATABASE, meta)
        last = after
        while last + 1 in files:
            last += 1
        missing = None
        if (end := max(files, default=last)) > last and not await self._has_log_file(last + 1):
            missing = last + 1
        return LogFiles(
            [files[number] for number in range(after + 1, last + 1)], last, end, missing
        )

    async def _has_log_file(self, number: int) -> bool:
        """Return whether a log file exists that was written while a listing was made."""
        try:
            await self.database.head(f"{LOG}/{number:020d}.sst")
        except BlobNotFoundError:
            return False
        return True

    async def tables(self, manifest: SlateManifest) -> list[StoreFile]:
        """List the tables that `manifest` names. Raises DataCorruptError if one is missing."""
        needed = manifest.files
        files = [
            _file(DATABASE, meta)
            async for meta in self.database.list("compacted/")
            if meta.key.rpartition("/")[2] in needed
        ]
        if missing := needed - {file.name.rpartition("/")[2] for file in files}:
            raise DataCorruptError(
                f"the store lacks the file 'db/compacted/{min(missing)}', and "
                f"{len(missing) - 1} more: run `streamfold check` to see what that costs"
            )
        return files

    async def manifest(self, number: int) -> StoreFile:
        return _file(DATABASE, await self.database.head(f"manifest/{number:020d}.manifest"))

    async def chunk_files(self, epoch: int) -> AsyncIterator[StoreFile]:
        """Yield the chunk files of all writers up to `epoch`."""
        async for meta in self._areas[CHUNKS].list():
            name = FileName.parse(meta.key)
            if name is not None and name.epoch <= epoch:
                yield _file(CHUNKS, meta)

    async def snapshots(self) -> AsyncIterator[StoreFile]:
        async for meta in self._areas[SNAPSHOTS].list():
            yield _file(SNAPSHOTS, meta, optional=meta.key.startswith(_PARTS))


def _file(area: str, meta: BlobMeta, *, optional: bool = False) -> StoreFile:
    stamp = meta.etag or meta.last_modified.isoformat()
    return StoreFile(f"{area}/{meta.key}", meta.size, stamp, optional)


def check_is_store(url: str) -> None:
    """Raise if there is certainly no store at `url`, because opening a local one would create it."""
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        return  # opening the store checks this
    folder = folder_of(url)
    if folder is None:
        raise InvalidError(
            f"store {url!r} cannot be read from storage: give a folder or s3://bucket/prefix"
        )
    if not folder.is_dir():
        raise NotFoundError(f"there is no store at {folder}: the folder does not exist")
    present = [name for name in (DATABASE, CHUNKS, SNAPSHOTS) if (folder / name).is_dir()]
    if not present:
        raise NotFoundError(f"there is no store at {folder}: it has no folder {DATABASE!r}")
    if (folder / DATABASE / RESTORING).exists():
        raise unfinished_restore(url)
    manifests = folder / DATABASE / "manifest"
    if not manifests.is_dir() or not any(manifests.iterdir()):
        raise NotFoundError(
            f"{folder} is only a part of a store: it has no manifest in {DATABASE}/manifest; restore "
            "the whole folder from a backup"
        )
