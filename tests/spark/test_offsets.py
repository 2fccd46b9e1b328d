"""Offsets and partitions: pure arithmetic, no Spark and no server."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamfold.spark.stream.positions import backlog, limit_records, split
from streamfold.spark.stream.range_reads import Range
from tests.records.test_bytes import repeatable

lengths = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 5_000), min_size=1)


@repeatable
@given(lengths, st.integers(1, 50), st.integers(1, 1_000))
def test_parts_cover_every_record_once_and_keep_both_limits(
    waiting: dict[str, int], min_partitions: int, max_records: int
) -> None:
    start = dict.fromkeys(waiting, 7)
    ranges = backlog(start, {stream: 7 + length for stream, length in waiting.items()})
    parts = split(ranges, min_partitions, max_records)
    covered = [(part.stream, n) for part in parts for n in range(part.start, part.end)]
    assert covered == [(s, n) for s in sorted(waiting) for n in range(7, 7 + waiting[s])]
    assert all(0 < len(part) <= max_records for part in parts)
    assert len(parts) >= min(min_partitions, sum(waiting.values()))


@repeatable
@given(lengths, st.integers(1, 5_000))
def test_a_limit_is_used_up_and_never_exceeded(waiting: dict[str, int], limit: int) -> None:
    start = dict.fromkeys(waiting, 3)
    end = {stream: 3 + length for stream, length in waiting.items()}
    limited = limit_records(start, end, limit)
    taken = {stream: limited[stream] - 3 for stream in waiting}
    assert all(0 <= taken[stream] <= waiting[stream] for stream in waiting)
    assert sum(taken.values()) == min(limit, sum(waiting.values()))


def test_a_small_stream_is_not_starved_by_a_large_one() -> None:
    limited = limit_records({"large": 0, "small": 0}, {"large": 1_000_000, "small": 3}, 100)
    assert limited["small"] >= 1


def test_parts_of_one_range_are_of_nearly_the_same_size() -> None:
    parts = split([Range("s", 0, 1_000_001)], 3, 250_000)
    assert {len(part) for part in parts} <= {200_000, 200_001}
    assert all(one.end == two.start for one, two in pairwise(parts))
