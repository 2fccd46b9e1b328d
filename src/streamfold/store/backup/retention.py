"""Deletes old backups, and the objects that only they need."""

from __future__ import annotations

import logging
import time
from typing import Final

from streamfold.blob import BlobStore
from streamfold.errors import DataCorruptError
from streamfold.store.backup import backup_manifest
from streamfold.store.backup.backup_manifest import FINISHED, OBJECTS, UNFINISHED, key_of

logger = logging.getLogger(__name__)

#: Milliseconds after which an unfinished backup counts as interrupted: another one notes its progress
#: every few seconds.
_INTERRUPTED_AFTER: Final = 3_600_000


async def prune(target: BlobStore, keep: int) -> tuple[str, ...]:
    """Delete all but the `keep` newest backups; return the ids of those deleted.

    Manifests go first: an interruption leaves objects that nothing names, and the next call deletes
    them. Nothing is deleted while a manifest cannot be read, because that may need any object.
    """
    finished = await backup_manifest.ids_below(target, FINISHED)
    deleted, kept = finished[:-keep], finished[-keep:]
    needed: set[str] = set()
    for backup_id in kept:
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
    newest = kept[-1]
    async for meta in target.list(OBJECTS):
        owner = meta.key[len(OBJECTS) :].partition("/")[0]
        if owner <= newest and meta.key not in needed:
            await target.delete(meta.key)
    for backup_id in await backup_manifest.ids_below(target, UNFINISHED):
        await target.delete(key_of(UNFINISHED, backup_id))
    return tuple(deleted)


async def _others_running(target: BlobStore) -> bool:
    """Whether another backup may be about to use objects of former ones."""
    now = time.time() * 1000
    async for meta in target.list(UNFINISHED):
        if now - meta.last_modified.timestamp() * 1000 < _INTERRUPTED_AFTER:
            return True
    return False
