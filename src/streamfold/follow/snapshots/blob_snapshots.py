"""External snapshots on any blob store, one blob for each, named as `naming.py` says."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Final

from streamfold.blob import BlobMeta, BlobStore
from streamfold.errors import BlobExistsError
from streamfold.follow.snapshots.naming import CONTAINER, NAMINGS, Naming
from streamfold.follow.snapshots.snapshot_store import Placement, SnapshotInfo, SnapshotStore

logger = logging.getLogger(__name__)

#: A name with a number in it may be meant as a snapshot.
_LOOKS_LIKE_ONE: Final = re.compile(r"[0-9]")
#: Blobs that are named in warnings, at most: ten are enough to recognise a wrong folder.
_WARNINGS_MAX: Final = 10


class BlobSnapshots(SnapshotStore):
    """Snapshots under `prefix` of a blob store; other blobs there are left alone.

    It reads every naming, and writes the one that it is given.
    """

    def __init__(self, blobs: BlobStore, prefix: str = "", naming: Naming = CONTAINER) -> None:
        self._blobs = blobs
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._naming = naming
        self._warned: set[str] = set()

    @property
    def naming(self) -> Naming:
        return self._naming

    async def list(self) -> list[SnapshotInfo]:
        found = []
        async for meta in self._blobs.list(self._prefix):
            info = self._info(meta)
            if info is not None:
                found.append(info)
            else:
                self._warn(meta.key.removeprefix(self._prefix))
        return sorted(found, key=lambda info: info.cursor, reverse=True)

    def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        return self._blobs.stream(info.name)

    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        try:
            await self._blobs.put_if_absent(self._prefix + self._naming.key(cursor, codec), blob)
        except BlobExistsError:
            return False
        return True

    async def delete(self, info: SnapshotInfo) -> None:
        await self._blobs.delete(info.name)

    def _info(self, meta: BlobMeta) -> SnapshotInfo | None:
        key = meta.key.removeprefix(self._prefix)
        for naming in NAMINGS.values():
            if (parsed := naming.parse(key)) is not None:
                cursor, codec = parsed
                created = int(meta.last_modified.timestamp() * 1000)
                return SnapshotInfo(
                    Placement.EXTERNAL, meta.key, cursor, codec, meta.size, created, naming.name
                )
        return None

    def _warn(self, key: str) -> None:
        """Name a blob that may be meant as a snapshot, once."""
        if len(self._warned) == _WARNINGS_MAX or key in self._warned or "/" in key:
            return
        if _LOOKS_LIKE_ONE.search(key):
            self._warned.add(key)
            logger.warning(
                "%s%s looks like a snapshot, but its name is not understood and it is ignored: "
                "call it CURSOR.CODEC, for example 1000.json",
                self._prefix,
                key,
            )
