"""Finds the newest snapshot in a stream that was not trimmed to it, from the tail backwards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from streamfold.follow.clients.client import StreamClient
from streamfold.follow.clients.feed import Backoff, retrying
from streamfold.follow.encoding.frames import Closing, Frame, Opening
from streamfold.follow.encoding.record_forms import form_of
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.follow.snapshots.snapshot_store import Placement, SnapshotInfo

#: Records that are read first; each further step reads twice as many.
FIRST_STEP: Final = 1000
#: Records that are looked at where only a trim that has not taken effect yet may hide a snapshot: more
#: than there are between two snapshots by default. To replay so many takes less than a second.
DEFAULT_REACH: Final = 15_000


@dataclass(frozen=True, slots=True)
class Located:
    """A whole snapshot in the stream, and where its first record is."""

    info: SnapshotInfo
    began_at: int


async def find_newest(
    client: StreamClient,
    first: int,
    tail: int,
    skipped: Collection[str],
    backoff: Backoff,
    reach: int | None = DEFAULT_REACH,
) -> Located | None:
    """The newest whole snapshot that begins in the last `reach` records, except `skipped` ones.

    None as `reach` looks at everything; in the worst case that reads as much as a replay would.
    """
    lowest = first if reach is None else max(first, tail - reach)
    closings: dict[str, Closing] = {}
    end, step = tail, FIRST_STEP
    while end > lowest:
        start = max(lowest, end - step)
        for seen in reversed(await _snapshot_records(client, start, end, backoff)):
            frame = seen.frame
            if frame.closing is not None:
                closings[frame.snapshot] = frame.closing
            closing = closings.get(frame.snapshot)
            if frame.opening and closing and frame.snapshot not in skipped:
                return Located(_info(seen, frame.opening, closing), seen.seq_num)
        end, step = start, step * 2
    return None


class _Seen(NamedTuple):
    """A snapshot record without its body: a range may hold more of those than memory does."""

    seq_num: int
    timestamp: int
    frame: Frame


async def _snapshot_records(
    client: StreamClient, start: int, end: int, backoff: Backoff
) -> list[_Seen]:
    found = []
    while start < end:
        batch = await retrying(backoff, partial(client.peek, start, end - start))
        if not batch:
            break
        for record in batch:
            form = form_of(record)
            if form is None or record.seq_num >= end:
                continue
            try:
                found.append(_Seen(record.seq_num, record.timestamp, form.parse(record)))
            except (SnapshotCorruptError, SnapshotUnsupportedError):
                continue  # unusable here; a search that meets it again reports it
        start = batch[-1].seq_num + 1
    return found


def _info(seen: _Seen, opening: Opening, closing: Closing) -> SnapshotInfo:
    placement = Placement.RECORD if seen.frame.closing else Placement.FRAMED
    cursor, codec = opening.covers_before, opening.codec
    return SnapshotInfo(placement, seen.frame.snapshot, cursor, codec, closing.size, seen.timestamp)
