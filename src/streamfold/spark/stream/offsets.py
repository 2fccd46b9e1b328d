"""Offsets of a query and what follows from them: how far a batch goes, and who reads which part.

An offset maps each stream to the seq_num of the next record to read, and is what Spark keeps in its
checkpoint. Nothing here talks to a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from streamfold.spark.stream.range_reads import Range

Offset: TypeAlias = dict[str, int]


def backlog(start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """What lies between two offsets that have the same streams, in the order of their names."""
    ranges = (Range(stream, start[stream], end[stream]) for stream in sorted(end))
    return [found for found in ranges if found.start < found.end]


def limit_records(start: Mapping[str, int], end: Mapping[str, int], records: int) -> Offset:
    """The offset after at most so many records; every stream gets on in proportion to its backlog.

    At least one record is let through, or a query could stand still.
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

    Fewer than `min_partitions` come out only where there are fewer records.
    """
    total = sum(map(len, ranges))
    if not total:
        return []
    size = max(1, min(max_records, total // min_partitions))
    return [part for found in ranges for part in _cut(found, ceil(len(found) / size))]


def _cut(found: Range, parts: int) -> list[Range]:
    edges = [found.start + len(found) * part // parts for part in range(parts + 1)]
    return [Range(found.stream, start, end) for start, end in pairwise(edges) if start < end]
