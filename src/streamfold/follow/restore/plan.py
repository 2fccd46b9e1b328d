"""Restore plans: which snapshot to load, and how much to replay after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from streamfold.backoff import Backoff
from streamfold.errors import StreamfoldError
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.clients.feed import retrying
from streamfold.follow.encoding.record_forms import Closing, Opening, SnapshotFrame, form_of
from streamfold.follow.errors import (
    GONE,
    KEEPING,
    SnapshotAheadError,
    SnapshotCorruptError,
    SnapshotUnsupportedError,
)
from streamfold.follow.snapshots.snapshot_store import (
    AnySnapshots,
    Placement,
    SnapshotInfo,
    Writing,
)
from streamfold.model.records import RECORD_OVERHEAD, TRIM_COMMAND
from streamfold.model.units import approximate_size
from streamfold.notebook import html_table
from streamfold.wording import noun

#: Records that the first step reads. Each further step reads twice as many.
FIRST_STEP: Final = 1000
#: Records to search if only a trim that has not taken effect yet can hide a snapshot. By default,
#: two snapshots are closer together than this. Replaying that many records takes less than a
#: second.
DEFAULT_REACH: Final = 15_000
#: Number of records used to estimate the size of the others.
_SAMPLE = 32
#: Numbers of records before the tail in which to look for a snapshot's trim command. It is usually
#: one of the last two. Earlier ones may be large, and one response has at most 1 MiB.
_LAST = (2, 32)


@dataclass(frozen=True, slots=True)
class LocatedSnapshot:
    """A snapshot in the stream and the seq_num of its first record."""

    info: SnapshotInfo
    began_at: int


async def find_newest(
    client: StreamClient,
    first: int,
    tail: int,
    skipped: Collection[str],
    backoff: Backoff,
    reach: int | None = DEFAULT_REACH,
) -> LocatedSnapshot | None:
    """Return the newest whole snapshot that begins in the last `reach` records, ignoring `skipped`.

    `reach=None` searches everything, which in the worst case reads as much as a replay would.
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
                return LocatedSnapshot(_info(seen, frame.opening, closing), seen.seq_num)
        end, step = start, step * 2
    return None


class _Seen(NamedTuple):
    """A snapshot record without its body: the bodies in a range may not fit in memory."""

    seq_num: int
    timestamp: int
    frame: SnapshotFrame


async def _snapshot_records(
    client: StreamClient, start: int, end: int, backoff: Backoff
) -> list[_Seen]:
    seen = []
    while start < end:
        batch = await retrying(backoff, partial(client.peek, start, end - start))
        if not batch:
            break
        for record in batch:
            form = form_of(record)
            if form is None or record.seq_num >= end:
                continue
            try:
                seen.append(_Seen(record.seq_num, record.timestamp, form.parse(record)))
            except (SnapshotCorruptError, SnapshotUnsupportedError):
                continue  # unusable here, and a replay that meets it reports the error
        start = batch[-1].seq_num + 1
    return seen


def _info(seen: _Seen, opening: Opening, closing: Closing) -> SnapshotInfo:
    placement = Placement.RECORD if seen.frame.closing else Placement.FRAMED
    cursor, codec = opening.covers_before, opening.codec
    return SnapshotInfo(placement, seen.frame.snapshot, cursor, codec, closing.size, seen.timestamp)


@dataclass(frozen=True, slots=True)
class SkippedSnapshot:
    """An unusable snapshot and the reason."""

    name: str
    error: StreamfoldError


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How the state will be restored. Made to be printed."""

    stream: str
    #: None to fold from the start or, if that is trimmed, from the first snapshot in the stream.
    snapshot: SnapshotInfo | None
    #: First remaining record.
    first: int
    read_from: int
    tail: int
    estimated_bytes: int
    skipped: tuple[SkippedSnapshot, ...] = ()
    #: Whether the search for snapshots in the stream was skipped because it has so few records.
    unsearched: bool = False

    @property
    def records(self) -> int:
        """Records to be read."""
        return self.tail - self.read_from

    @property
    def searching(self) -> bool:
        """Whether the replay must first find the state in the stream."""
        if self.snapshot is None:
            return self.first > 0
        return self.snapshot.placement is not Placement.EXTERNAL

    def __str__(self) -> str:
        lines = [f"restore {self.stream} up to {self.tail}"]
        records = f"{self.records:,} {noun(self.records, 'record')}"
        if self.snapshot is not None:
            size = "" if self.snapshot.size is None else f", {approximate_size(self.snapshot.size)}"
            lines.append(f"  load    {self.snapshot} (cursor {self.snapshot.cursor}{size})")
        elif self.searching:
            lines.append(
                f"  search  a snapshot in the stream: records before {self.first} are gone, {GONE}"
            )
            if not self.records:
                lines.append(f"  missing no record is left. {KEEPING}")
        else:
            lines.append("  load    nothing: fold from the start")
        if self.unsearched:
            lines.append(
                f"  skip    snapshots in the stream: replaying {records} is cheaper than searching them"
            )
        lines.append(f"  replay  {records} from {self.read_from}")
        lines.append(f"  read    about {approximate_size(self.estimated_bytes)}")
        lines += [f"  skipped {skipped.error}" for skipped in self.skipped]
        return "\n".join(lines)

    def steps(self) -> list[list[str]]:
        """Return the lines of `str(self)` as pairs of a step and its description."""
        return [line.split(maxsplit=1) for line in str(self).splitlines()[1:]]

    def _repr_html_(self) -> str:
        return html_table(f"Restore {self.stream} up to {self.tail}", ("step", ""), self.steps())


async def make_plan(
    client: StreamClient,
    snapshots: AnySnapshots,
    backoff: Backoff | None = None,
    skipped: Sequence[SkippedSnapshot] = (),
) -> RestorePlan:
    """Plan a restore of the client's stream from the newest snapshot that the stream continues.

    Ignores the snapshots in `skipped`. `backoff` sets the pauses between attempts.
    """
    backoff = backoff or Backoff(attempts=3)
    # Read the tail last, so that nothing found earlier can be beyond it.
    outside = await retrying(backoff, snapshots.store.list) if snapshots.store else []
    sample, tail = await _ends(client, backoff)
    if not sample and tail > 0:  # the first records arrived in between, or all are trimmed
        sample, tail = await _ends(client, backoff)
    first = sample[0].seq_num if sample else tail
    names = {skip.name for skip in skipped}
    best = _newest_outside(outside, first, tail, names)
    read_from = first if best is None else best.cursor
    inside = _at_head(sample, names)
    if inside is None:
        inside = await _at_trim(client, first, tail, names, backoff)
    if inside is None and tail - read_from > FIRST_STEP:
        reach = DEFAULT_REACH if snapshots.trim else None
        inside = await find_newest(client, read_from, tail, names, backoff, reach)
    if inside is not None and (best is None or inside.info.cursor >= best.cursor):
        best, read_from = inside.info, inside.began_at
    if read_from > first and tail > read_from:
        sample = await retrying(backoff, partial(client.peek, read_from, _SAMPLE))
    unsearched = best is None and first == 0 and 0 < tail <= FIRST_STEP
    unsearched = unsearched and snapshots.writing is not Writing.EXTERNAL
    loaded = best.size or 0 if best is not None and best.placement is Placement.EXTERNAL else 0
    estimate = loaded + _mean_size(sample) * (tail - read_from)
    return RestorePlan(
        client.name, best, first, read_from, tail, estimate, tuple(skipped), unsearched
    )


async def _ends(client: StreamClient, backoff: Backoff) -> tuple[Sequence[StreamRecord], int]:
    """Return the first remaining records, then the tail, read in this order."""
    sample = await retrying(backoff, partial(client.peek, 0, _SAMPLE))
    return sample, (await retrying(backoff, client.check_tail)).seq_num


def _newest_outside(
    snapshots: Sequence[SnapshotInfo], first: int, tail: int, skipped: set[str]
) -> SnapshotInfo | None:
    usable = [info for info in snapshots if info.name not in skipped and info.cursor >= first]
    if usable and usable[0].cursor > tail:
        raise SnapshotAheadError(str(usable[0]), usable[0].cursor, tail)
    return usable[0] if usable else None


def _at_head(sample: Sequence[StreamRecord], skipped: set[str]) -> LocatedSnapshot | None:
    """Return the snapshot at the head of the stream, which after a trim is the newest one."""
    form = form_of(sample[0]) if sample else None
    if form is None:
        return None
    record = sample[0]
    try:
        frame = form.parse(record)
    except (SnapshotCorruptError, SnapshotUnsupportedError):
        return None  # a replay that meets it reports the error
    if frame.opening is None or frame.snapshot in skipped:
        return None
    info = SnapshotInfo(
        Placement.RECORD if frame.closing else Placement.FRAMED,
        frame.snapshot,
        frame.opening.covers_before,
        frame.opening.codec,
        frame.closing.size if frame.closing else None,
        record.timestamp,
    )
    return LocatedSnapshot(info, record.seq_num)


def _trim_point(record: StreamRecord) -> int | None:
    """Return the seq_num to which a trim command trims the stream, or None for other records."""
    if len(record.headers) != 1 or tuple(record.headers[0]) != (b"", TRIM_COMMAND):
        return None
    return int.from_bytes(record.body, "big")


async def _at_trim(
    client: StreamClient, first: int, tail: int, skipped: set[str], backoff: Backoff
) -> LocatedSnapshot | None:
    """Return the snapshot to which one of the last records trims, if the trim is still pending.

    A snapshot's trim takes effect some seconds later. Until then, it is the quick way to the
    snapshot, however many records and bytes precede it.
    """
    for count in _LAST:
        start = max(first, tail - count)
        if start == tail:
            return None
        for record in reversed(await retrying(backoff, partial(client.peek, start, count))):
            point = _trim_point(record)
            if point is not None and first < point < tail:
                there = await retrying(backoff, partial(client.peek, point, 1))
                return _at_head(there, skipped)
    return None


def _mean_size(sample: Sequence[StreamRecord]) -> int:
    if not sample:
        return 0
    return sum(len(record.body) + RECORD_OVERHEAD for record in sample) // len(sample)
