"""Tracks when background work must visit each stream of a store.

A due time for each of a million streams would take more memory than the streams in use. So streams
are grouped into ranges of names, with one due time per range: the earliest of its streams.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from streamfold.model.names import StreamRef
from streamfold.store import keys

#: Streams per range: visiting a range that is due scans that many rows, at 10 us each.
_STREAMS: Final = 256
#: The due time of a range in which no stream will ever be due.
NEVER: Final = 1 << 62


class Visit(NamedTuple):
    """The result of a visit to one stream."""

    key: bytes
    stream_id: int
    #: When the stream is due next, in ms since the Unix epoch.
    due: int
    #: No record of the stream arrived before this; 0 = unknown.
    oldest: int


@dataclass(slots=True)
class _Range:
    start: bytes
    due: int
    #: Alternating stream ids and oldest arrivals, for streams whose oldest arrival a visit found.
    oldest: array[int] = field(default_factory=lambda: array("q"))


class DueRanges:
    """The due times of all streams. Every range is due until its first visit."""

    def __init__(self) -> None:
        #: In key order and without gaps.
        self._ranges = [_Range(keys.STREAMS_START, 0)]

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, ref: StreamRef, at: int) -> None:
        """Ensure a visit to the stream by `at` (ms since the Unix epoch)."""
        due_range = self._at(keys.stream(*ref))
        due_range.due = min(due_range.due, at)

    def due(self, now: int) -> list[bytes]:
        """Return the starts of the ranges that are due, longest overdue first."""
        late = sorted((part.due, part.start) for part in self._ranges if part.due <= now)
        return [start for _, start in late]

    def begin(self, start: bytes) -> tuple[bytes, dict[int, int]]:
        """Begin a visit to the range at `start`. Returns its end, and oldest arrivals by stream id.

        Due times added to the range from now on count for its next visit.
        """
        index = self._index(start)
        due_range = self._ranges[index]
        due_range.due = NEVER
        last = index + 1 == len(self._ranges)
        end = keys.STREAMS_END if last else self._ranges[index + 1].start
        return end, dict(zip(due_range.oldest[::2], due_range.oldest[1::2], strict=True))

    def finish(self, start: bytes, visits: Iterable[Visit], rest: bytes | None = None) -> None:
        """Replace the range at `start` with the results of a visit.

        From `rest` on, it is still due.
        """
        index = self._index(start)
        former = self._ranges[index]
        parts: list[_Range] = []
        for number, visit in enumerate(visits):
            if number % _STREAMS == 0:
                parts.append(_Range(visit.key if parts else start, former.due))
            newest = parts[-1]
            newest.due = min(newest.due, visit.due)
            if visit.oldest:
                newest.oldest.extend((visit.stream_id, visit.oldest))
        if rest is not None:
            parts.append(_Range(rest if parts else start, 0, former.oldest))
        if not parts and index:  # its streams are gone: merge it into the range before it
            before = self._ranges[index - 1]
            before.due = min(before.due, former.due)
            del self._ranges[index]
        elif parts:
            self._ranges[index : index + 1] = parts

    def _at(self, key: bytes) -> _Range:
        return self._ranges[self._index(key)]

    def _index(self, key: bytes) -> int:
        return bisect.bisect_right(self._ranges, key, key=lambda part: part.start) - 1


#: Milliseconds to which times are rounded up, so that streams due at nearly the same time are
#: checked together.
_ROUND: Final = 500


class DueTimes:
    """Keeps the earliest due time per stream, and calls `wake` when one is reached.

    Times are milliseconds since the Unix epoch.
    """

    def __init__(self, now: Callable[[], int], wake: Callable[[], None]) -> None:
        self._now = now
        self._wake = wake
        self._heap: list[tuple[int, StreamRef]] = []
        self._earliest: dict[StreamRef, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def add(self, at: int, ref: StreamRef) -> None:
        """Schedule a check of the stream at `at`."""
        at = -(-at // _ROUND) * _ROUND
        earliest = self._earliest.get(ref)
        if earliest is not None and earliest <= at:
            return
        self._earliest[ref] = at
        heapq.heappush(self._heap, (at, ref))
        self._set_timer()

    def take(self) -> list[StreamRef]:
        """Remove and return the streams that are due."""
        now, due = self._now(), []
        while self._heap and self._heap[0][0] <= now:
            at, ref = heapq.heappop(self._heap)
            if self._earliest.get(ref) == at:
                del self._earliest[ref]
                due.append(ref)
        self._set_timer()
        return due

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if not self._heap:
            self.close()
            return
        at = self._heap[0][0]
        if self._timer is not None and self._timer_at == at:
            return
        self.close()
        self._timer_at = at
        delay = max(0, at - self._now()) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._wake()
