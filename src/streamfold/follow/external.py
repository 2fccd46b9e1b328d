"""External snapshots on any blob store: `<prefix>/<cursor, 20 digits>.<codec>`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from streamfold.blob import BlobStore
from streamfold.errors import BlobExistsError
from streamfold.follow.snapshots import Place, SnapshotInfo, SnapshotStore

#: Digits of the cursor in a key: as many as a 64-bit number has, so that keys sort as numbers do.
_DIGITS = 20
_KEY = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z0-9_-]+)")


class BlobSnapshots(SnapshotStore):
    """Snapshots under `prefix` of a blob store; other blobs there are left alone."""

    def __init__(self, blobs: BlobStore, prefix: str = "") -> None:
        self._blobs = blobs
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    async def list(self) -> list[SnapshotInfo]:
        found = []
        async for meta in self._blobs.list(self._prefix):
            match = _KEY.fullmatch(meta.key.removeprefix(self._prefix))
            if match is None:
                continue
            created = int(meta.last_modified.timestamp() * 1000)
            found.append(
                SnapshotInfo(Place.EXTERNAL, meta.key, int(match[1]), match[2], meta.size, created)
            )
        return found[::-1]

    def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        return self._blobs.stream(info.name)

    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        key = f"{self._prefix}{cursor:0{_DIGITS}d}.{codec}"
        try:
            await self._blobs.put_if_absent(key, blob)
        except BlobExistsError:
            return False
        return True

    async def delete(self, info: SnapshotInfo) -> None:
        await self._blobs.delete(info.name)
