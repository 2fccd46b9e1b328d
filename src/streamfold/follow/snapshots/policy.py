"""When a snapshot is due and which external snapshots to prune, decided from numbers alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from streamfold.errors import BlobNotFoundError, InvalidError
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.follow.snapshots.snapshot_store import SnapshotInfo, SnapshotStore
from streamfold.wording import noun

logger = logging.getLogger(__name__)

#: Replay speed in records per second, assumed until one is measured.
ASSUMED_SPEED = 50_000.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits how much a restore has to replay. None means no such limit."""

    #: Deltas since the last snapshot.
    records: int | None = 10_000
    #: Bytes in the bodies of those deltas.
    bytes: int | None = 64 << 20
    #: Seconds since the last snapshot, if any delta has arrived since.
    age: float | None = None
    #: Seconds that a replay of those deltas would take at this reader's speed.
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
    """The deltas since the last snapshot."""

    records: int
    bytes: int
    #: Seconds since the last snapshot or, without one, since this snapshot taker was created.
    age: float
    #: Replay speed in records per second, if measured.
    speed: float | None = None


def due(policy: Policy, since: SinceSnapshot) -> str | None:
    """Return why a snapshot is due now, or None if none is due."""
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
    """Return the seconds until age alone makes a snapshot due, or None if it never will."""
    if policy.age is None or since.records == 0:
        return None
    return max(0.0, policy.age - since.age)


def find_prunable(
    infos: Sequence[SnapshotInfo], *, keep: int | None, max_age: float | None, now: int
) -> list[SnapshotInfo]:
    """Return the snapshots beyond the newest `keep`, and those older than `max_age` seconds.

    `infos` are sorted newest first. `now` is in milliseconds since the Unix epoch.
    """
    too_many = infos[keep:] if keep is not None else []
    horizon = now - max_age * 1000 if max_age is not None else None
    return [
        info
        for info in infos
        if info in too_many or (horizon is not None and info.created_at < horizon)
    ]


async def prune(
    store: SnapshotStore, *, keep: int | None = None, max_age: float | None = None, now: int
) -> list[SnapshotInfo]:
    """Delete all but the newest `keep` snapshots, and those older than `max_age` seconds at `now`.

    `now` is in milliseconds since the Unix epoch. The newest readable snapshot stays. Returns the
    deleted ones. Reads snapshots until one proves readable. If none does, nothing is deleted.
    """
    infos = await store.list()
    going = find_prunable(infos, keep=keep, max_age=max_age, now=now)
    if not going:
        return []
    treasure = await _newest_whole(store, infos)
    if treasure is None:
        return []
    going = [info for info in going if info != treasure]
    for info in going:
        await store.delete(info)
    return going


async def _newest_whole(store: SnapshotStore, infos: Sequence[SnapshotInfo]) -> SnapshotInfo | None:
    for info in infos:
        try:
            await store.unpack(info)
        except (SnapshotCorruptError, SnapshotUnsupportedError, BlobNotFoundError) as error:
            logger.warning("kept beside the newest whole snapshot: %s", error)
        else:
            return info
    return None
