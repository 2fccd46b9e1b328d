"""When a snapshot is due, and which external snapshots may go: decisions from numbers alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.errors import BlobNotFoundError, InvalidError
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.follow.snapshots.snapshot_store import SnapshotInfo, SnapshotStore
from streamfold.wording import noun

logger = logging.getLogger(__name__)

#: Assumed records per second of a replay before one was measured.
ASSUMED_SPEED = 50_000.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits on what a restore has to replay; None = no limit of that kind."""

    #: Deltas since the last snapshot.
    records: int | None = 10_000
    #: Bytes of their bodies.
    bytes: int | None = 64 << 20
    #: Seconds since the last snapshot, if anything came since.
    age: float | None = None
    #: Seconds that replaying them would take, by the speed of this reader.
    replay: float | None = 5.0

    def __post_init__(self) -> None:
        for name in ("records", "bytes", "age", "replay"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidError(
                    f"policy {name} {value} must be more than 0, or None for no limit"
                )


@dataclass(frozen=True, slots=True)
class SinceSnapshot:
    """What has come since the last snapshot."""

    records: int
    bytes: int
    #: Seconds since the last snapshot; without one, since this process started.
    age: float
    #: Records per second of a replay, when one was measured.
    speed: float | None = None


def due(policy: Policy, since: SinceSnapshot) -> str | None:
    """Why a snapshot should be taken now; None while it should not."""
    if since.records == 0:
        return None
    if policy.records is not None and since.records >= policy.records:
        return f"{since.records} {noun(since.records, 'record')} since the last snapshot"
    if policy.bytes is not None and since.bytes >= policy.bytes:
        return f"{since.bytes} bytes since the last snapshot"
    if policy.age is not None and since.age >= policy.age:
        return f"{since.age:.0f} s since the last snapshot"
    replay = since.records / (since.speed or ASSUMED_SPEED)
    if policy.replay is not None and replay >= policy.replay:
        return f"a replay would take {replay:.1f} s"
    return None


def wait_for(policy: Policy, since: SinceSnapshot) -> float | None:
    """Seconds after which age alone makes a snapshot due; None when it never will."""
    if policy.age is None or since.records == 0:
        return None
    return max(0.0, policy.age - since.age)


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
