"""The layout of a backup target, which holds any number of backups of one store.

    backups/{id}.json            a finished backup: every file of the store, and the object that has it
    unfinished/{id}.json         the same for a backup that is running or was interrupted
    objects/{id}/{file}          the files that this backup was the first to copy

An id is the time at which the backup began, so ids sort by age. Objects never change. A later backup
names the objects of earlier ones instead of copying their files again, and an interrupted backup leaves
objects that the next one can use. A backup is complete if and only if its manifest is in `backups`,
because that is written last.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec

from streamfold.blob import BlobStore
from streamfold.errors import (
    BlobNotFoundError,
    DataCorruptError,
    FormatUnsupportedError,
    NotFoundError,
)
from streamfold.store.backup import backup_manifest

FINISHED, UNFINISHED, OBJECTS = "backups/", "unfinished/", "objects/"
#: The format that this version writes, and the newest that it reads.
BACKUP_FORMAT: Final = 1
_SUFFIX: Final = ".json"


class BackedUpFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the store, and the object that holds its bytes."""

    #: The name below the store's location: db/…, chunks/…, snapshots/….
    name: str
    #: The object's key in the target.
    object: str
    size: int
    sha256: str
    #: An etag, which changes whenever storage has a different file with this name.
    stamp: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup."""

    format: int = BACKUP_FORMAT
    id: str
    #: Milliseconds since the Unix epoch. The backup has every record acknowledged before this time.
    began_at: int
    #: The store's location when it was backed up.
    store: str
    #: The version from the store's `FormatRow`.
    store_format: int
    #: The number of SlateDB's manifest, and the epoch of the writer at that time.
    slatedb_manifest: int
    writer_epoch: int
    #: The number of the last log file; 0 if there was none.
    last_log_file: int
    files: list[BackedUpFile]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


class _Format(msgspec.Struct, frozen=True):
    format: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(BackupManifest)
_format_decoder = msgspec.json.Decoder(_Format)


def new_id(began_at: int) -> str:
    """Return an id for a backup that began at `began_at` (ms since the Unix epoch)."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began_at / 1000))
    return f"{moment}-{uuid.uuid4().hex[:8]}"


def encode(manifest: BackupManifest) -> bytes:
    return _encoder.encode(manifest)


def decode(content: bytes, key: str) -> BackupManifest:
    """Decode a manifest. Raises DataCorruptError, naming `key`, if it cannot be read."""
    try:
        version = _format_decoder.decode(content).format
        if version > BACKUP_FORMAT:
            raise FormatUnsupportedError(
                f"the backup manifest {key!r} has format {version}, but this version reads up to "
                f"{BACKUP_FORMAT}: use the version that wrote it, or a newer one"
            )
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise DataCorruptError(
            f"the backup manifest {key!r} is damaged ({error}): choose another backup with --at"
        ) from error


async def ids_below(target: BlobStore, folder: str) -> list[str]:
    """Return the ids of the backups in `folder`, oldest first."""
    keys = [meta.key async for meta in target.list(folder)]
    return [key[len(folder) : -len(_SUFFIX)] for key in keys if key.endswith(_SUFFIX)]


def key_of(folder: str, backup_id: str) -> str:
    return f"{folder}{backup_id}{_SUFFIX}"


async def read_backup(target: BlobStore, backup_id: str, folder: str = FINISHED) -> BackupManifest:
    key = key_of(folder, backup_id)
    try:
        return decode(await target.get(key), key)
    except BlobNotFoundError:
        raise NotFoundError(
            f"there is no finished backup {backup_id!r} in {target!r}: list them with "
            "`streamfold backup --list TARGET`"
        ) from None


async def list_backups(target: BlobStore) -> Sequence[BackupManifest]:
    """Return all finished backups, oldest first."""
    return [await read_backup(target, each) for each in await ids_below(target, FINISHED)]


logger = logging.getLogger(__name__)

#: Milliseconds after which an unfinished backup counts as interrupted: a running one records its
#: progress every few seconds.
_INTERRUPTED_AFTER: Final = 3_600_000


async def prune(target: BlobStore, keep: int) -> tuple[str, ...]:
    """Delete all but the `keep` newest backups. Returns the ids of those deleted.

    Manifests are deleted first. An interruption leaves objects that no manifest names, and the next
    call deletes those. If a manifest that must stay cannot be read, nothing is deleted, because it
    may need any object.
    """
    finished = await backup_manifest.ids_below(target, FINISHED)
    deleted, newest_ids = finished[:-keep], finished[-keep:]
    needed: set[str] = set()
    for backup_id in newest_ids:
        try:
            manifest = await backup_manifest.read_backup(target, backup_id)
        except DataCorruptError as error:
            logger.warning("no backup is deleted: %s", error)
            return ()
        needed |= {file.object for file in manifest.files}
    if await _others_running(target):
        logger.warning("no backup is deleted while another one is running")
        return ()
    for backup_id in deleted:
        await target.delete(key_of(FINISHED, backup_id))
    newest = newest_ids[-1]
    async for meta in target.list(OBJECTS):
        owner = meta.key[len(OBJECTS) :].partition("/")[0]
        if owner <= newest and meta.key not in needed:
            await target.delete(meta.key)
    for backup_id in await backup_manifest.ids_below(target, UNFINISHED):
        await target.delete(key_of(UNFINISHED, backup_id))
    return tuple(deleted)


async def _others_running(target: BlobStore) -> bool:
    """Return whether another backup may be running, and about to reuse objects of earlier ones."""
    now = time.time() * 1000
    async for meta in target.list(UNFINISHED):
        if now - meta.last_modified.timestamp() * 1000 < _INTERRUPTED_AFTER:
            return True
    return False
