"""Which external snapshots may go."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from streamfold.errors import BlobNotFoundError
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.follow.snapshots.snapshot_store import SnapshotInfo, SnapshotStore

logger = logging.getLogger(__name__)


def find_prunable(
    found: Sequence[SnapshotInfo], *, keep: int | None, max_age: float | None, now: int
) -> list[SnapshotInfo]:
    """Of snapshots, newest first, those beyond the first `keep`, and those older than `max_age`
    seconds; `now` is in milliseconds.
    """
    too_many = found[keep:] if keep is not None else []
    horizon = now - max_age * 1000 if max_age is not None else None
    return [
        info
        for info in found
        if info in too_many or (horizon is not None and info.created_at < horizon)
    ]


async def prune(
    store: SnapshotStore, *, keep: int | None = None, max_age: float | None = None, now: int
) -> list[SnapshotInfo]:
    """Delete snapshots by count and age, but never the newest one that can be read; returns those.

    It is read to verify it: without a readable one nothing is deleted.
    """
    found = await store.list()
    going = find_prunable(found, keep=keep, max_age=max_age, now=now)
    if not going:
        return []
    treasure = await _newest_whole(store, found)
    if treasure is None:
        return []
    going = [info for info in going if info != treasure]
    for info in going:
        await store.delete(info)
    return going


async def _newest_whole(store: SnapshotStore, found: Sequence[SnapshotInfo]) -> SnapshotInfo | None:
    for info in found:
        try:
            await store.unpack(info)
        except (SnapshotCorruptError, SnapshotUnsupportedError, BlobNotFoundError) as error:
            logger.warning("kept beside the newest whole snapshot: %s", error)
        else:
            return info
    return None
