"""When the background must visit which streams, for all streams of a store.

A due time for each of a million streams would take more memory than the streams in use. So streams are
taken together in ranges of their names, with one due time for each range: the earliest of its streams.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from streamfold.model.names import StreamRef
from streamfold.store import keys

#: Streams of a range: a range that is due costs a scan of so many rows, 10 us each.
_STREAMS: Final = 256
#: The due time of a range without a stream that is ever due.
NEVER: Final = 1 << 62


class Visit(NamedTuple):
    """What a visit of one stream found."""

    key: bytes
    stream_id: int
    #: When the stream is due next; ms since the Unix epoch.
    due: int
    #: No record of the stream arrived before this; 0 = unknown.
    oldest: int


@dataclass(slots=True)
class _Range:
    start: bytes
    due: int
    #: Stream id and oldest arrival in turn, of streams of which a visit found the latter.
    oldest: array[int] = field(default_factory=lambda: array("q"))


class DueRanges:
    """The due times of all streams. Until its first visit, every range is due."""

    def __init__(self) -> None:
        #: Without gaps, in order.
        self._ranges = [_Range(keys.STREAMS_START, 0)]

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, ref: StreamRef, at: int) -> None:
        """Visit the stream at `at` at the latest."""
        found = self._at(keys.stream(*ref))
        found.due = min(found.due, at)

    def due(self, now: int) -> list[bytes]:
        """Starts of the ranges that are due, those that are due longest first."""
        late = sorted((found.due, found.start) for found in self._ranges if found.due <= now)
        return [start for _, start in late]

    def begin(self, start: bytes) -> tuple[bytes, dict[int, int]]:
        """Begin a visit of the range at `start`: its end, and the oldest arrivals by stream id.

        What is added to the range from now on counts for its next visit.
        """
        index = self._index(start)
        found = self._ranges[index]
        found.due = NEVER
        last = index + 1 == len(self._ranges)
        end = keys.STREAMS_END if last else self._ranges[index + 1].start
        return end, dict(zip(found.oldest[::2], found.oldest[1::2], strict=True))

    def finish(self, start: bytes, visits: Iterable[Visit], rest: bytes | None = None) -> None:
        """Replace the range at `start` by what a visit found; from `rest` on, it is still due."""
        index = self._index(start)
        former = self._ranges[index]
        found: list[_Range] = []
        for number, visit in enumerate(visits):
            if number % _STREAMS == 0:
                found.append(_Range(visit.key if found else start, former.due))
            newest = found[-1]
            newest.due = min(newest.due, visit.due)
            if visit.oldest:
                newest.oldest.extend((visit.stream_id, visit.oldest))
        if rest is not None:
            found.append(_Range(rest if found else start, 0, former.oldest))
        if not found and index:  # its streams are gone: it becomes part of the range before
            before = self._ranges[index - 1]
            before.due = min(before.due, former.due)
            del self._ranges[index]
        elif found:
            self._ranges[index : index + 1] = found

    def _at(self, key: bytes) -> _Range:
        return self._ranges[self._index(key)]

    def _index(self, key: bytes) -> int:
        return bisect.bisect_right(self._ranges, key, key=lambda found: found.start) - 1
