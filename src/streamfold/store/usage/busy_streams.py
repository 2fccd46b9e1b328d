"""The streams with the most appended bytes in recent seconds, counted in bounded memory.

Counts cover one complete window and the current one after it. So a stream shows up as soon as it is
appended to, and disappears two windows after its last append.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Final

import msgspec

from streamfold.model.names import StreamRef
from streamfold.store.log.shares import Share

#: Milliseconds per window: long enough for steady rates, short enough for a live view.
WINDOW_MS: Final = 5_000
#: Maximum streams counted per window, at 0.3 KiB each. Beyond that, the half with fewer bytes is
#: dropped, so streams with a large share of the bytes stay.
STREAMS_MAX: Final = 1_024


class BusyStream(msgspec.Struct):
    """A stream's durable appends."""

    ref: StreamRef
    records: int = 0
    bytes: int = 0


#: By stream id.
_Counts = dict[int, BusyStream]


class BusyStreams:
    """Counts appends by stream. The hot path calls `count` once per stream and commit."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._begun = now()
        #: When the counts in `_before` begin; `_begun` if there is no earlier window.
        self._since = self._begun
        self._before: _Counts = {}
        self._current: _Counts = {}

    def count(self, share: Share) -> None:
        """Count one stream's share of a durable commit."""
        log = share.log
        stream = self._current.get(log.id)
        if stream is None:
            if len(self._current) >= STREAMS_MAX:
                self._drop_least()
            stream = self._current[log.id] = BusyStream(log.ref)
        for chunk in share.chunks:
            stream.records += chunk.records
        stream.bytes += share.metered

    def advance(self) -> None:
        """Begin a new window if the current one is over. Call this before `count`."""
        now = self._now()
        passed = now - self._begun
        if 0 <= passed < WINDOW_MS:
            return
        # After a pause of two windows, or if the clock has gone back, nothing is recent.
        recent = 0 <= passed < 2 * WINDOW_MS
        self._before = self._current if recent else {}
        self._since = self._begun if recent else now
        self._begun = now
        self._current = {}

    def busiest(
        self, limit: int, visible: Callable[[StreamRef], bool]
    ) -> tuple[float, list[BusyStream]]:
        """Return the seconds covered, and up to `limit` visible streams, busiest first."""
        self.advance()
        totals = {
            key: BusyStream(stream.ref, stream.records, stream.bytes)
            for key, stream in self._before.items()
        }
        for key, stream in self._current.items():
            if total := totals.get(key):
                total.records += stream.records
                total.bytes += stream.bytes
            else:
                totals[key] = stream
        seconds = max(1, self._now() - self._since) / 1000
        ordered = sorted(totals.values(), key=attrgetter("bytes"), reverse=True)
        return seconds, list(islice((s for s in ordered if visible(s.ref)), limit))

    def _drop_least(self) -> None:
        # Sorting all takes a third of the time of `heapq.nlargest`, and keeps the same streams.
        ordered = sorted(self._current.items(), key=lambda item: item[1].bytes, reverse=True)
        self._current = dict(ordered[: STREAMS_MAX // 2])
