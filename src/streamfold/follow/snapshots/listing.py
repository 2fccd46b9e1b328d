"""Lists snapshots, in the stream and outside."""

from __future__ import annotations

from streamfold.follow.clients.client import StreamClient
from streamfold.follow.clients.feed import Backoff, Feed
from streamfold.follow.encoding.assembly import Assembly, PartialSnapshot
from streamfold.follow.encoding.record_forms import form_of
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.follow.snapshots.snapshot_store import AnySnapshots, Placement, SnapshotInfo


async def list_snapshots(
    client: StreamClient, snapshots: AnySnapshots, backoff: Backoff | None = None
) -> list[SnapshotInfo]:
    """All whole snapshots, the one with the largest cursor first; reads the stream to its tail."""
    outside = await snapshots.store.list() if snapshots.store else []
    inside = await list_in_stream(client, backoff or Backoff(attempts=3))
    return sorted(outside + inside, key=lambda info: info.cursor, reverse=True)


async def list_in_stream(client: StreamClient, backoff: Backoff) -> list[SnapshotInfo]:
    """Whole snapshots that the stream still holds, in order."""
    found: list[SnapshotInfo] = []
    assembly = Assembly(keep=False)
    tail = (await client.check_tail()).seq_num
    if not await client.peek(0, 1):
        return found
    feed = Feed(client, 0, backoff)
    try:
        while feed.position < tail:
            for record in await feed.next() or ():
                if form_of(record) is None:
                    continue
                try:
                    parts = assembly.add(record)
                except (SnapshotCorruptError, SnapshotUnsupportedError):
                    continue  # not a whole one
                if parts is not None:
                    found.append(_info(parts))
    finally:
        await feed.close()
    return found


def _info(parts: PartialSnapshot) -> SnapshotInfo:
    placement = Placement.RECORD if parts.in_one_record else Placement.FRAMED
    return SnapshotInfo(
        placement,
        parts.snapshot,
        parts.opening.covers_before,
        parts.opening.codec,
        parts.size,
        parts.timestamp,
    )
