"""Decides where a query starts and ends in each stream, and splits batches into partitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from streamfold.errors import NotFoundError
from streamfold.records.columns import read_columns
from streamfold.spark.errors import DataLossError, OptionError, StreamGoneError
from streamfold.spark.stream.client import StreamCalls
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
    """Return the nonempty ranges between two offsets of the same streams, sorted by stream name."""
    ranges = (Range(stream, start[stream], end[stream]) for stream in sorted(end))
    return [part for part in ranges if part.start < part.end]


def limit_records(start: Mapping[str, int], end: Mapping[str, int], records: int) -> Offset:
    """Return the offset after at most `records`, spread in proportion to each stream's backlog.

    Always advances by at least one record, so that a query cannot stall.
    """
    waiting = backlog(start, end)
    total = sum(map(len, waiting))
    if total <= records:
        return dict(end)
    limited = {stream: start[stream] for stream in end}
    left = max(1, records)
    for part in sorted(waiting, key=len):
        share = min(len(part), ceil(records * len(part) / total), left)
        limited[part.stream] = part.start + share
        left -= share
    return limited


def split(ranges: Sequence[Range], min_partitions: int, max_records: int) -> list[Range]:
    """Split ranges into nearly equal parts of at most `max_records`.

    Returns fewer than `min_partitions` parts only if there are fewer records.
    """
    total = sum(map(len, ranges))
    if not total:
        return []
    size = max(1, min(max_records, total // min_partitions))
    return [part for whole in ranges for part in _cut(whole, ceil(len(whole) / size))]


def _cut(whole: Range, parts: int) -> list[Range]:
    edges = [whole.start + len(whole) * part // parts for part in range(parts + 1)]
    return [Range(whole.stream, start, end) for start, end in pairwise(edges) if start < end]


#: Regular expression metacharacters. Text before the first one is a literal prefix.
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


class StreamPositions:
    """The selected streams and the positions in them. Used only on the driver."""

    def __init__(self, options: SourceOptions, streams: StreamCalls | OpenBasin) -> None:
        self._options = options
        self._streams = streams

    def chosen(self) -> list[str]:
        """Return the streams to read, in order. A pattern selects the streams that match it now."""
        selection = self._options.selection
        if selection.pattern is None:
            return list(selection.streams)
        matches = re.compile(selection.pattern).fullmatch
        return [name for name in self._streams.names(_prefix(selection.pattern)) if matches(name)]

    def starts(self, default: str) -> Offset:
        """Return where a new query starts in each stream."""
        starting, streams = self._options.starting, self.chosen()
        if isinstance(starting, Timestamps):
            return {stream: self._since(stream, starting) for stream in streams}
        positions = default if starting is None else starting
        return self._resolve("startingOffsets", positions, streams, self._start)

    def ends(self, streams: Iterable[str]) -> Offset:
        """Return where a batch read ends in each stream."""
        ending = self._options.ending
        if isinstance(ending, Timestamps):
            return {stream: self._until(stream, ending) for stream in streams}
        return self._resolve("endingOffsets", ending, streams, self._end)

    def tails(self, start: Offset) -> Offset:
        """Return the tails of the query's streams: those in `start` and those that match now."""
        streams = dict.fromkeys((*start, *self.chosen()))
        tails = {stream: self._tail(stream, start.get(stream)) for stream in sorted(streams)}
        return {stream: tail for stream, tail in tails.items() if tail is not None}

    def with_new(self, start: Offset, end: Offset) -> Offset:
        """Return `start` plus the streams that only `end` has, at their first records."""
        return start | {
            stream: self._streams.first(stream) for stream in end if stream not in start
        }

    def mean_size(self, stream: str, at: int) -> float:
        """Return the mean size in bytes of the next records at `at`."""
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
        positions: Positions,
        streams: Iterable[str],
        resolve: Callable[[str, int], int],
    ) -> Offset:
        if positions == EARLIEST:
            return {stream: resolve(stream, EARLIEST_NUMBER) for stream in streams}
        if isinstance(positions, str):
            return {stream: resolve(stream, LATEST_NUMBER) for stream in streams}
        offset = {}
        for stream in streams:
            if stream not in positions:
                raise OptionError(name, f"does not name stream {stream!r}: name all streams")
            offset[stream] = resolve(stream, positions[stream])
        return offset

    def _start(self, stream: str, seq_num: int) -> int:
        if seq_num == LATEST_NUMBER:
            return int(self._streams.tail(stream).seq_num)
        if seq_num != EARLIEST_NUMBER and not self._options.bootstrap:
            return seq_num
        asked = max(seq_num, 0)
        first = self._streams.first(stream, asked)
        if first > asked and self._options.bootstrap:
            cursor = self._streams.snapshot_cursor(stream)
            if cursor is not None and cursor > asked:
                return cursor
        return first if seq_num == EARLIEST_NUMBER else asked

    def _since(self, stream: str, starting: Timestamps) -> int:
        """Return the first record at or after the starting time.

        If all records are older, returns the tail, or raises OptionError if the options demand a
        record.
        """
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
        """Return the first record at or after the ending time. The read stops before it."""
        time, starting = ending.at(stream), self._options.starting
        if isinstance(starting, Timestamps) and starting.at(stream) > time:
            raise OptionError(
                ending.option,
                f"is {time} for stream {stream!r}, before {starting.option}, which is "
                f"{starting.at(stream)}: give a later end",
            )
        return self._streams.first_since(stream, time)

    def _end(self, stream: str, seq_num: int) -> int:
        tail = int(self._streams.tail(stream).seq_num)
        if seq_num > tail:
            raise OptionError(
                "endingOffsets",
                f"is {seq_num} for stream {stream!r}, whose tail is {tail}: give at most that",
            )
        return tail if seq_num == LATEST_NUMBER else seq_num


def _prefix(pattern: str) -> str:
    """Return a literal prefix that every match starts with, not necessarily the longest."""
    special = _SPECIAL.search(pattern)
    if special is None:
        return pattern
    # A quantifier can make the preceding character optional, and "|" the whole prefix.
    plain = pattern[: special.start()]
    return "" if "|" in pattern else plain[:-1] if special.group() in "?*{" else plain
