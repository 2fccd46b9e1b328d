"""Parses store locations: `memory:`, `file:///folder`, `s3://bucket/prefix`.

A store keeps its database in the folder `db` of its location. s2-lite, which also uses SlateDB,
keeps its database in the location itself. A store opened there would find nothing, start empty, and
look as if all data were lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from streamfold._native import Storage
from streamfold.backoff import pause_after
from streamfold.blob import BlobStore, LocalBlobStore, open_blob_store
from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    FormatUnsupportedError,
    InvalidError,
    StorageError,
)
from streamfold.store.engine.s3_access import S3Access, find_access

logger = logging.getLogger(__name__)

#: Seconds after which broken connections to a bucket are no longer retried, and the first and
#: longest pauses between attempts. Short, because a person at a terminal may be waiting.
_ACCESS_TIMEOUT: Final = 10.0
_ACCESS_PAUSES: Final = (0.5, 3.0)
#: Where SlateDB keeps its manifests, below its own folder, and the pattern of their file names.
MANIFESTS: Final = "manifest"
_MANIFEST: Final = re.compile(r"[0-9]{20}\.manifest")
#: Folders below the location: SlateDB's files, snapshot blobs, and the files of large chunks.
DATABASE, SNAPSHOTS, CHUNKS = "db", "snapshots", "chunks"
#: A file in the database's folder that marks an unfinished restore. Sorts first in listings.
RESTORING: Final = "0-restoring"
#: Bytes of one stream in one commit from which they become a file. On local disk a file costs a
#: sync of 0.5 ms. On object storage it costs a request and its latency.
LOCAL_FILE_FROM, REMOTE_FILE_FROM = 128 << 10, 1 << 20
#: Chunk files read concurrently, and deleted concurrently. On local disk, the same threads sync
#: commits, and a sync waits for freed blocks. On object storage, most of the time is latency.
_LOCAL_READS, _LOCAL_DELETES = 4, 1
_REMOTE_READS, _REMOTE_DELETES = 16, 16
#: Commits after which their rows become a table, however few they are. A start after a crash reads
#: the WAL file of each commit since the last table. That takes two requests each on object storage,
#: but hardly any time on local disk, where SlateDB's limit of 4096 suffices.
_LOCAL_COMMITS, _REMOTE_COMMITS = sys.maxsize, 1024
#: Mode of folders on local disk: for this user alone, whatever the modes of the files in them.
_PRIVATE = 0o700


def unfinished_restore(url: str) -> StorageError:
    return StorageError(
        f"the restore into {url} was not finished: empty it, and restore the backup again"
    )


def check_folder(url: str, folder: Path) -> None:
    """Raise if `folder` itself is a SlateDB database."""
    manifests = folder / MANIFESTS
    if manifests.is_dir():
        _check(url, (path.name for path in manifests.iterdir()))


async def check_blobs(url: str, manifests: BlobStore) -> None:
    """Raise if a location on object storage is itself a SlateDB database.

    `manifests` holds the blobs below MANIFESTS.
    """
    async for meta in manifests.list():
        _check(url, [meta.key.rpartition("/")[2]])


def _check(url: str, names: Iterable[str]) -> None:
    if not any(map(_MANIFEST.fullmatch, names)):
        return
    above = url.rstrip("/").removesuffix("/db")
    if above != url.rstrip("/"):
        hint = f" (if it is the folder db of a Streamfold store, give {above})"
    else:
        hint = ""
    raise FormatUnsupportedError(
        f"{url} holds a database of another program, most likely of s2-lite{hint}: choose another "
        "location, run s2-lite on this one, and copy each basin with `streamfold copy s2://basin "
        "s2://basin --from-endpoint URL-OF-S2-LITE`"
    )


class FileLimits(NamedTuple):
    """When chunks become files, how many files are accessed concurrently, and when WAL files end."""

    #: Stored bytes of one stream in one commit from which they become a file.
    write_from: int
    reads_max: int
    deletes_max: int
    #: Commits, each with a WAL file, after which a table replaces the WAL files.
    commits_max: int = _LOCAL_COMMITS


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location.

    `store` is SlateDB's handle on it; for `memory:`, it holds the data itself.
    """

    url: str
    #: Path of the database within the object store.
    path: str
    #: Folder of the database, if it is on local disk.
    folder: Path | None
    store: Storage = field(repr=False)
    #: The snapshot blobs.
    snapshots: BlobStore = field(repr=False)
    #: The database's files on object storage, for measuring them.
    files: BlobStore | None = field(repr=False, default=None)
    #: Settings of the bucket, and the database's folder in it, opened for one quick check.
    access: S3Access | None = field(default=None, repr=False)
    probe: BlobStore | None = field(default=None, repr=False)
    #: Where another program's database would have its manifests.
    others: BlobStore | None = field(default=None, repr=False)
    #: The files of large chunks; None = in a folder that `open_chunks` opens.
    chunks: BlobStore | None = field(default=None, repr=False)
    #: The database's folder on object storage, for a lease. Its requests end well before the lease
    #: expires.
    leases: BlobStore | None = field(default=None, repr=False)

    @property
    def in_memory(self) -> bool:
        return self.url.startswith("memory:")

    @property
    def name(self) -> str:
        """The name shown to clients: the kind of storage, not its exact address."""
        kind = self.url.partition(":")[0]
        return {"memory": "local:memory", "file": "local:disk"}.get(kind, f"{kind}:bucket")

    def storage(self, *, synced: bool) -> Storage:
        """Return SlateDB's handle for a writer. Without `synced`, a power cut may lose commits."""
        if synced or self.folder is None:
            return self.store
        return Storage.local(str(self.folder.parent), syncs_log=False)

    def open_chunks(self, *, fsync: bool) -> BlobStore:
        """Open the files of large chunks. On local disk, syncs folders unless `fsync` is off."""
        if self.chunks is not None:
            return self.chunks
        if self.folder is None:
            raise InvalidError(f"store location {self.url!r} has no room for files")
        sync = os.fsync if fsync else _no_sync
        return LocalBlobStore(self.folder.parent / CHUNKS, fsync=sync)

    @property
    def file_limits(self) -> FileLimits:
        """The limits for this kind of storage. In memory, chunks never become files."""
        if self.folder is not None:
            return FileLimits(LOCAL_FILE_FROM, _LOCAL_READS, _LOCAL_DELETES)
        write_from = sys.maxsize if self.in_memory else REMOTE_FILE_FROM
        return FileLimits(write_from, _REMOTE_READS, _REMOTE_DELETES, _REMOTE_COMMITS)

    async def check_access(self) -> None:
        """Raise within seconds if the bucket is unusable or holds another program's data.

        Raises at once if access is denied, and retries broken connections for a few seconds.
        """
        await self.reach(self._check_once)

    async def reach(self, request: Callable[[], Awaitable[None]]) -> None:
        """Send an idempotent request, retrying broken connections for a few seconds."""
        clock = asyncio.get_running_loop().time
        deadline, failures = clock() + _ACCESS_TIMEOUT, 0
        while True:
            try:
                await request()
                return
            except (BlobUnavailableError, BlobOutcomeUnknownError) as error:
                failures += 1
                pause = pause_after(failures, *_ACCESS_PAUSES)
                transient = isinstance(error, BlobOutcomeUnknownError) or error.transient
                if not transient or clock() + pause > deadline:
                    raise StorageError(f"cannot open the store at {self.url}: {error}") from None
                logger.warning(
                    "the store at %s cannot be reached yet: %s; trying again in %.1f s",
                    self.url,
                    error,
                    pause,
                )
            await asyncio.sleep(pause)

    async def _check_once(self) -> None:
        if self.probe is None:
            return
        async for meta in self.probe.list():
            if meta.key == RESTORING:
                raise unfinished_restore(self.url)
            return
        if self.others is not None:
            await check_blobs(self.url, self.others)

    def close(self) -> None:
        """Stop renewing the location's credentials."""
        if self.access is not None:
            self.access.close()


def open_location(url: str, environment: Mapping[str, str] = os.environ) -> Location:
    """Parse `url` and prepare access to it. Stores nothing and reads nothing from the store yet.

    For S3, endpoint, region and credentials come from the sources that AWS tools use. `environment`
    provides the variables. May read files and wait for the network.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        snapshots, chunks = open_blob_store("memory:"), open_blob_store("memory:")
        return Location(url, DATABASE, None, Storage.memory(), snapshots, chunks=chunks)
    if parts.scheme == "file":
        return _local(url, Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        return _s3(url, parts.netloc, parts.path.strip("/"), environment)
    raise InvalidError(
        f"store location {url!r} is not understood: "
        "give memory:, file:///folder or s3://bucket/prefix"
    )


def choose_location(asked: str | None, only: str) -> str:
    """Return the location of a new basin. A store has only one location, called `only`."""
    if asked not in (None, only):
        raise InvalidError(f"location {asked!r} is unknown: choose from {only}, or leave it out")
    return only


def _local(url: str, folder: Path) -> Location:
    if not folder.is_absolute():
        raise InvalidError(f"store location {url!r} must name an absolute folder: file:///folder")
    check_folder(url, folder)
    if (folder / DATABASE / RESTORING).exists():
        raise unfinished_restore(url)
    try:
        for private in (folder, folder / DATABASE, folder / SNAPSHOTS, folder / CHUNKS):
            private.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidError(
            f"cannot create the store's folder {str(folder)!r} ({error.strerror}): choose one that "
            "this user may create and write to"
        ) from None
    snapshots = LocalBlobStore(folder / SNAPSHOTS)
    storage = Storage.local(str(folder), syncs_log=True)
    return Location(url, DATABASE, folder / DATABASE, storage, snapshots)


def _s3(url: str, bucket: str, prefix: str, environment: Mapping[str, str]) -> Location:
    access = find_access(environment)
    path = f"{prefix}/{DATABASE}" if prefix else DATABASE
    snapshots, chunks = (
        "/".join(part for part in (f"s3://{bucket}", prefix, name) if part)
        for name in (SNAPSHOTS, CHUNKS)
    )
    return Location(
        url,
        path,
        None,
        access.open_database(bucket),
        access.open_blobs(snapshots),
        access.open_blobs(f"s3://{bucket}/{path}"),
        access,
        access.open_probe(f"s3://{bucket}/{path}"),
        access.open_probe("/".join(filter(None, (f"s3://{bucket}", prefix, MANIFESTS)))),
        access.open_blobs(chunks),
        access.open_leases(f"s3://{bucket}/{path}"),
    )


def _no_sync(descriptor: int) -> None:
    """Do nothing, so that the system decides when to write a file to the device."""
