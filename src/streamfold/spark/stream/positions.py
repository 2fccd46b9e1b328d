"""Decides where a query starts and ends in each stream, and cuts a batch into partitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from streamfold.errors import NotFoundError
from streamfold.records.columns import read_columns
from streamfold.spark.errors import DataLossError, OptionError, StreamGoneError
from streamfold.spark.stream.client import Streams
from streamfold.spark.stream.options import (
    EARLIEST,
    EARLIEST_NUMBER,
    LATEST_NUMBER,
    Positions,
    SourceOptions,
    Timestamps,
)
from streamfold.spark.stream.range_reads import Range
from streamfold.spark.stream.stored import OpenBasin

Offset: TypeAlias = dict[str, int]


def backlog(start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """Return the ranges between two offsets of the same streams, in the order of their names."""
    ranges = (Range(stream, start[stream], end[stream]) for stream in sorted(end))
    return [found for found in ranges if found.start < found.end]


def limit_records(start: Mapping[str, int], end: Mapping[str, int], records: int) -> Offset:
    """Return the offset after at most `records`; every stream advances in proportion to its backlog.

    Advances by at least one record, so that a query cannot stall.
    """
    waiting = backlog(start, end)
    total = sum(map(len, waiting))
    if total <= records:
        return dict(end)
    limited = {stream: start[stream] for stream in end}
    left = max(1, records)
    for found in sorted(waiting, key=len):
        share = min(len(found), ceil(records * len(found) / total), left)
        limited[found.stream] = found.start + share
        left -= share
    return limited


def split(ranges: Sequence[Range], min_partitions: int, max_records: int) -> list[Range]:
    """Cut ranges into parts of nearly equal size: none above `max_records`, and enough of them.

    There are fewer than `min_partitions` only if there are fewer records.
    """
    total = sum(map(len, ranges))
    if not total:
        return []
    size = max(1, min(max_records, total // min_partitions))
    return [part for found in ranges for part in _cut(found, ceil(len(found) / size))]


def _cut(found: Range, parts: int) -> list[Range]:
    edges = [found.start + len(found) * part // parts for part in range(parts + 1)]
    return [Range(found.stream, start, end) for start, end in pairwise(edges) if start < end]


#: Characters with a meaning in regular expressions: what precedes them is a literal prefix.
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


class StreamPositions:
    """The streams that options choose, and positions in them. On the driver only."""

    def __init__(self, options: SourceOptions, streams: Streams | OpenBasin) -> None:
        self._options = options
        self._streams = streams

    def chosen(self) -> list[str]:
        """Return the streams to read, in order; with a pattern, those that match it now."""
        selection = self._options.selection
        if selection.pattern is None:
            return list(selection.streams)
        matches = re.compile(selection.pattern).fullmatch
        return [name for name in self._streams.names(_prefix(selection.pattern)) if matches(name)]

    def starts(self, default: str) -> Offset:
        """Return where a new query starts."""
        starting, streams = self._options.starting, self.chosen()
        if isinstance(starting, Timestamps):
            return {stream: self._since(stream, starting) for stream in streams}
        wanted = default if starting is None else starting
        return self._resolve("startingOffsets", wanted, streams, self._start)

    def ends(self, streams: Iterable[str]) -> Offset:
        """Return where a batch read ends."""
        ending = self._options.ending
        if isinstance(ending, Timestamps):
            return {stream: self._until(stream, ending) for stream in streams}
        return self._resolve("endingOffsets", ending, streams, self._end)

    def tails(self, start: Offset) -> Offset:
        """Return the tail of every stream of the query: those in `start`, and those that match now."""
        found = dict.fromkeys((*start, *self.chosen()))
        tails = {stream: self._tail(stream, start.get(stream)) for stream in sorted(found)}
        return {stream: tail for stream, tail in tails.items() if tail is not None}

    def with_new(self, start: Offset, end: Offset) -> Offset:
        """Return `start` with the streams that only `end` has, read from their first record."""
        return start | {
            stream: self._streams.first(stream) for stream in end if stream not in start
        }

    def mean_size(self, stream: str, at: int) -> float:
        """Return the mean size in bytes of the next records."""
        page = self._streams.page_bytes(stream, at) or b""
        count = len(read_columns(page, headers=False, bodies=False).seq_nums)
        return len(page) / max(1, count)

    def _tail(self, stream: str, position: int | None) -> int | None:
        try:
            tail = int(self._streams.tail(stream).seq_num)
        except NotFoundError:
            return self._gone(stream, position)
        if position is not None and tail < position:
            if self._options.fail_on_data_loss:
                raise DataLossError(stream, tail, position, 0)
            return position
        return tail

    def _gone(self, stream: str, position: int | None) -> int | None:
        if position is not None and self._options.fail_on_data_loss:
            raise StreamGoneError(stream, position)
        return position

    def _resolve(
        self,
        name: str,
        wanted: Positions,
        streams: Iterable[str],
        resolve: Callable[[str, int], int],
    ) -> Offset:
        if wanted == EARLIEST:
            return {stream: resolve(stream, EARLIEST_NUMBER) for stream in streams}
        if isinstance(wanted, str):
            return {stream: resolve(stream, LATEST_NUMBER) for stream in streams}
        found = {}
        for stream in streams:
            if stream not in wanted:
                raise OptionError(name, f"does not name stream {stream!r}: name all streams")
            found[stream] = resolve(stream, wanted[stream])
        return found

    def _start(self, stream: str, wanted: int) -> int:
        if wanted == LATEST_NUMBER:
            return int(self._streams.tail(stream).seq_num)
        if wanted != EARLIEST_NUMBER and not self._options.bootstrap:
            return wanted
        asked = max(wanted, 0)
        first = self._streams.first(stream, asked)
        if first > asked and self._options.bootstrap:
            cursor = self._streams.snapshot_cursor(stream)
            if cursor is not None and cursor > asked:
                return cursor
        return first if wanted == EARLIEST_NUMBER else asked

    def _since(self, stream: str, starting: Timestamps) -> int:
        """Return the first record that is not older; the tail, or an error, if all are."""
        time = starting.at(stream)
        if not self._options.starting_record_needed:
            return self._streams.first_since(stream, time)
        tail = self._streams.tail(stream)
        first = self._streams.first_since(stream, time)
        if first >= tail.seq_num:
            raise OptionError(
                starting.option,
                f"is {time}, and stream {stream!r} has no record that new, its last is of "
                f"{tail.timestamp}: give an earlier time, or set "
                "startingOffsetsByTimestampStrategy to latest to start at its tail",
            )
        return first

    def _until(self, stream: str, ending: Timestamps) -> int:
        """Return the first record that is not older, which is the first not to read."""
        time, starting = ending.at(stream), self._options.starting
        if isinstance(starting, Timestamps) and starting.at(stream) > time:
            raise OptionError(
                ending.option,
                f"is {time} for stream {stream!r}, before {starting.option}, which is "
                f"{starting.at(stream)}: give a later end",
            )
        return self._streams.first_since(stream, time)

    def _end(self, stream: str, wanted: int) -> int:
        tail = int(self._streams.tail(stream).seq_num)
        if wanted > tail:
            raise OptionError(
                "endingOffsets",
                f"is {wanted} for stream {stream!r}, whose tail is {tail}: give at most that",
            )
        return tail if wanted == LATEST_NUMBER else wanted


def _prefix(pattern: str) -> str:
    """Return a literal prefix of every match of the pattern; may be shorter than possible."""
    special = _SPECIAL.search(pattern)
    if special is None:
        return pattern
    # A quantifier after a character makes even that character optional; "|" makes all of it so.
    plain = pattern[: special.start()]
    return "" if "|" in pattern else plain[:-1] if special.group() in "?*{" else plain
