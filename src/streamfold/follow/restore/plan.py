"""Restore plans: what will be loaded, and how much is to be replayed after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from streamfold.errors import StreamfoldError
from streamfold.follow.clients.client import StreamClient, StreamRecord
from streamfold.follow.clients.feed import Backoff, retrying
from streamfold.follow.encoding.record_forms import Closing, Frame, Opening, form_of
from streamfold.follow.errors import (
    GONE,
    KEEPING,
    SnapshotAheadError,
    SnapshotCorruptError,
    SnapshotUnsupportedError,
)
from streamfold.follow.snapshots.snapshot_store import AnySnapshots, Placement, SnapshotInfo
from streamfold.model.records import RECORD_OVERHEAD, TRIM_COMMAND
from streamfold.model.units import approximate_size
from streamfold.notebook import html_table
from streamfold.wording import noun

#: Records that are read first; each further step reads twice as many.
FIRST_STEP: Final = 1000
#: Records that are looked at where only a trim that has not taken effect yet may hide a snapshot: more
#: than there are between two snapshots by default. To replay so many takes less than a second.
DEFAULT_REACH: Final = 15_000
#: Records read to estimate the size of the others.
_SAMPLE = 32
#: Records before the tail among which the trim of a snapshot is looked for. Most often it is one of the
#: last two; what comes before those may be large, and one answer has 1 MiB at most.
_LAST = (2, 32)


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


@dataclass(frozen=True, slots=True)
class Skipped:
    """A snapshot that was not usable, and why."""

    name: str
    error: StreamfoldError


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How the state will be restored; `print` it."""

    stream: str
    #: None = fold from the start, or, when that is trimmed, from the first snapshot in the stream.
    snapshot: SnapshotInfo | None
    #: First record that still exists.
    first: int
    read_from: int
    tail: int
    estimated_bytes: int
    skipped: tuple[Skipped, ...] = ()

    @property
    def records(self) -> int:
        """Records to be read."""
        return self.tail - self.read_from

    @property
    def searching(self) -> bool:
        """Whether the state is still to be found in the stream."""
        if self.snapshot is None:
            return self.first > 0
        return self.snapshot.placement is not Placement.EXTERNAL

    def __str__(self) -> str:
        lines = [f"restore {self.stream} up to {self.tail}"]
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
        records = noun(self.records, "record")
        lines.append(f"  replay  {self.records:,} {records} from {self.read_from}")
        lines.append(f"  read    about {approximate_size(self.estimated_bytes)}")
        lines += [f"  skipped {skipped.error}" for skipped in self.skipped]
        return "\n".join(lines)

    def steps(self) -> list[list[str]]:
        """What is done, a step and its object each, as `str` has them line by line."""
        return [line.split(maxsplit=1) for line in str(self).splitlines()[1:]]

    def _repr_html_(self) -> str:
        return html_table(f"Restore {self.stream} up to {self.tail}", ("step", ""), self.steps())


async def make_plan(
    client: StreamClient,
    snapshots: AnySnapshots,
    backoff: Backoff | None = None,
    skipped: Sequence[Skipped] = (),
) -> RestorePlan:
    """Find the newest snapshot that the stream continues, wherever it is, except `skipped` ones."""
    backoff = backoff or Backoff(attempts=3)
    # The tail last: whatever is found before that is certainly not beyond it.
    outside = await retrying(backoff, snapshots.store.list) if snapshots.store else []
    sample, tail = await _ends(client, backoff)
    if not sample and tail > 0:  # the first records came in between, or all are trimmed
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
    loaded = best.size or 0 if best is not None and best.placement is Placement.EXTERNAL else 0
    estimate = loaded + _mean_size(sample) * (tail - read_from)
    return RestorePlan(client.name, best, first, read_from, tail, estimate, tuple(skipped))


async def _ends(client: StreamClient, backoff: Backoff) -> tuple[Sequence[StreamRecord], int]:
    """The first records that still exist, and then the tail."""
    sample = await retrying(backoff, partial(client.peek, 0, _SAMPLE))
    return sample, (await retrying(backoff, client.check_tail)).seq_num


def _newest_outside(
    found: Sequence[SnapshotInfo], first: int, tail: int, skipped: set[str]
) -> SnapshotInfo | None:
    usable = [info for info in found if info.name not in skipped and info.cursor >= first]
    if usable and usable[0].cursor > tail:
        raise SnapshotAheadError(str(usable[0]), usable[0].cursor, tail)
    return usable[0] if usable else None


def _at_head(sample: Sequence[StreamRecord], skipped: set[str]) -> Located | None:
    """The snapshot that the stream begins with: once it is trimmed, the newest one does."""
    form = form_of(sample[0]) if sample else None
    if form is None:
        return None
    record = sample[0]
    try:
        frame = form.parse(record)
    except (SnapshotCorruptError, SnapshotUnsupportedError):
        return None  # the search meets it again, and reports it
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
    return Located(info, record.seq_num)


def _trim_point(record: StreamRecord) -> int | None:
    """Where the record trims the stream to, if it is the command for that."""
    if len(record.headers) != 1 or tuple(record.headers[0]) != (b"", TRIM_COMMAND):
        return None
    return int.from_bytes(record.body, "big")


async def _at_trim(
    client: StreamClient, first: int, tail: int, skipped: set[str], backoff: Backoff
) -> Located | None:
    """The snapshot to which one of the last records trims the stream, if that is still to happen.

    The trim that goes with a snapshot takes effect some seconds later; until then it is the quick way
    to the snapshot, however many records and bytes the stream begins with.
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
