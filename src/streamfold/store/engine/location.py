"""Where a store lives: `memory:`, `file:///folder`, `s3://bucket/prefix`.

A store keeps its database in the folder `db` of its location. s2-lite, which also uses SlateDB,
keeps its database in the location itself: a store opened there would find nothing, start empty, and
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

#: Seconds after which broken connections to a bucket are not tried again, and the pauses between, the
#: first and the longest: a person at a terminal waits for the answer.
_ACCESS_TIMEOUT: Final = 10.0
_ACCESS_PAUSES: Final = (0.5, 3.0)
#: Where SlateDB keeps its manifests, below its own folder, and their file names.
MANIFESTS: Final = "manifest"
_MANIFEST: Final = re.compile(r"[0-9]{20}\.manifest")
#: Folders below the location: SlateDB's files, the blobs of snapshots, and the files of large chunks.
DATABASE, SNAPSHOTS, CHUNKS = "db", "snapshots", "chunks"
#: In the database's folder while a restore into it is not finished. Listings begin with it.
RESTORING: Final = "0-restoring"
#: Bytes of one stream in one commit from which they become a file: on local disk, where a file costs a
#: sync of 0.5 ms, and on object storage, where it costs a request and its latency.
LOCAL_FILE_FROM, REMOTE_FILE_FROM = 128 << 10, 1 << 20
#: Chunk files that are read, and deleted, at the same time. On local disk, the same threads sync
#: commits, and a sync waits for what was freed; on object storage, most of the time is latency.
_LOCAL_READS, _LOCAL_DELETES = 4, 1
_REMOTE_READS, _REMOTE_DELETES = 16, 16
#: Commits after which their rows become a table, even if they are few. A start after a crash reads the
#: WAL file of each commit since: on object storage that takes two requests, on local disk no time, and
#: the limit of SlateDB, 4096, will do.
_LOCAL_COMMITS, _REMOTE_COMMITS = sys.maxsize, 1024
#: Mode of folders on local disk: for this user alone, whatever the files within allow.
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
    """Raise if the location on object storage is one; `manifests` holds the blobs below MANIFESTS."""
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
    """When chunks become files, how many files are used at the same time, and when WAL files end."""

    #: Stored bytes of a stream in one commit from which they get a file.
    write_from: int
    reads_max: int
    deletes_max: int
    #: Commits, each with a WAL file, after which a table takes their place.
    commits_max: int = _LOCAL_COMMITS


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location; `store` is SlateDB's handle on it, and for `memory:` the data itself."""

    url: str
    #: Path of the database within the object store.
    path: str
    #: Folder of the database, if it is on local disk.
    folder: Path | None
    store: Storage = field(repr=False)
    #: The blobs of snapshots.
    snapshots: BlobStore = field(repr=False)
    #: The files of the database on object storage, to measure them.
    files: BlobStore | None = field(repr=False, default=None)
    #: Settings of the bucket, and the database's folder in it for one quick check.
    access: S3Access | None = field(default=None, repr=False)
    probe: BlobStore | None = field(default=None, repr=False)
    #: Where the manifests of another program's database would be.
    others: BlobStore | None = field(default=None, repr=False)
    #: The files of large chunks; None = in a folder that `open_chunks` opens.
    chunks: BlobStore | None = field(default=None, repr=False)
    #: The database's folder on object storage, for a lease: requests end well before it expires.
    leases: BlobStore | None = field(default=None, repr=False)

    @property
    def in_memory(self) -> bool:
        return self.url.startswith("memory:")

    @property
    def name(self) -> str:
        """The name for clients: the kind of storage, not its exact address."""
        kind = self.url.partition(":")[0]
        return {"memory": "local:memory", "file": "local:disk"}.get(kind, f"{kind}:bucket")

    def storage(self, *, synced: bool) -> Storage:
        """SlateDB's handle for a writer; without `synced`, a power cut may lose commits."""
        if synced or self.folder is None:
            return self.store
        return Storage.local(str(self.folder.parent), syncs_log=False)

    def open_chunks(self, *, fsync: bool) -> BlobStore:
        """The files of large chunks; on local disk, this syncs folders unless `fsync` is off."""
        if self.chunks is not None:
            return self.chunks
        if self.folder is None:
            raise InvalidError(f"store location {self.url!r} has no room for files")
        sync = os.fsync if fsync else _no_sync
        return LocalBlobStore(self.folder.parent / CHUNKS, fsync=sync)

    @property
    def file_limits(self) -> FileLimits:
        """The limits of this storage; in memory, no chunk becomes a file."""
        if self.folder is not None:
            return FileLimits(LOCAL_FILE_FROM, _LOCAL_READS, _LOCAL_DELETES)
        write_from = sys.maxsize if self.in_memory else REMOTE_FILE_FROM
        return FileLimits(write_from, _REMOTE_READS, _REMOTE_DELETES, _REMOTE_COMMITS)

    async def check_access(self) -> None:
        """Raise, within seconds, if the bucket cannot be used or holds the data of another program.

        A refusal is raised at once. Broken connections are tried again for a few seconds.
        """
        await self.reach(self._check_once)

    async def reach(self, request: Callable[[], Awaitable[None]]) -> None:
        """Send a request that may be repeated, for a few seconds if connections break."""
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
        """Stop renewing its credentials."""
        if self.access is not None:
            self.access.close()


def open_location(url: str, environment: Mapping[str, str] = os.environ) -> Location:
    """Parse `url` and connect to it; nothing is read or written yet.

    For S3, endpoint, region and credentials come from the sources that AWS tools use; `environment`
    has the variables. This may read files and wait for the network.
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
    """The location of a new basin: a store has only one, called `only`."""
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
    """Leave it to the system when to write a file to the device."""
