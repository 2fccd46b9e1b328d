"""A range of streams is due no later than any of its streams, whatever is visited and added."""

from __future__ import annotations

import random

import pytest

from streamfold.model.names import StreamRef
from streamfold.store import keys
from streamfold.store.upkeep.due import NEVER, DueRanges, Visit
from tests.proving import seeds
from tests.store.conftest import BASIN


def ref_of(number: int) -> StreamRef:
    return StreamRef.parse(BASIN, f"s-{number:05d}")


def visit(ranges: DueRanges, start: bytes, streams: dict[int, int], rest: int | None = None) -> int:
    """Visit the streams of a range, up to the one with the number `rest`; returns how many."""
    end, _ = ranges.begin(start)
    inside = [n for n in sorted(streams) if start <= keys.stream(*ref_of(n)) < end]
    left = None
    if rest is not None and (later := [n for n in inside if n >= rest]):
        left = keys.stream(*ref_of(later[0]))
        inside = [n for n in inside if n < rest]
    ranges.finish(start, [Visit(keys.stream(*ref_of(n)), n, streams[n], 0) for n in inside], left)
    return len(inside)


@pytest.mark.parametrize("seed", seeds(2, proving=100))
def test_every_stream_is_visited_when_it_is_due(seed: int) -> None:
    chance = random.Random(seed)
    ranges, streams, now = DueRanges(), dict[int, int](), 0
    for _ in range(30):
        for number in chance.sample(range(2000), chance.randrange(150)):  # created or changed
            streams[number] = chance.choice([NEVER, now + chance.randrange(10_000)])
            ranges.add(ref_of(number), streams[number])
        for number in chance.sample(sorted(streams), len(streams) // 50):
            del streams[number]
        now += chance.randrange(1000)
        for start in ranges.due(now):
            end, _ = ranges.begin(start)
            inside = [n for n in sorted(streams) if start <= keys.stream(*ref_of(n)) < end]
            in_time = inside[: chance.choice([len(inside), chance.randrange(len(inside) + 1)])]
            for number in in_time:
                if streams[number] <= now:
                    streams[number] = now + chance.randrange(1, 10_000)
            visits = [Visit(keys.stream(*ref_of(n)), n, streams[n], 0) for n in in_time]
            left = inside[len(in_time) :]
            ranges.finish(start, visits, keys.stream(*ref_of(left[0])) if left else None)
        covered = set(ranges.due(now))
        for number, due in streams.items():
            assert due > now or ranges._at(keys.stream(*ref_of(number))).start in covered


def test_streams_that_are_not_due_are_not_visited() -> None:
    ranges = DueRanges()
    streams = dict.fromkeys(range(10_000), 1_000_000)
    assert visit(ranges, keys.STREAMS_START, streams) == 10_000
    assert ranges.due(999_999) == []
    streams[7_000] = 500
    ranges.add(ref_of(7_000), 500)
    (start,) = ranges.due(500)
    assert visit(ranges, start, streams) <= 256


def test_what_is_added_during_a_visit_counts_after_it() -> None:
    ranges = DueRanges()
    ranges.begin(keys.STREAMS_START)
    ranges.add(ref_of(3), 700)
    ranges.finish(keys.STREAMS_START, [Visit(keys.stream(*ref_of(1)), 1, NEVER, 0)])
    assert ranges.due(699) == []
    assert len(ranges.due(700)) == 1


def test_a_visit_that_fails_or_runs_out_of_time_leaves_the_rest_due() -> None:
    ranges = DueRanges()
    streams = dict.fromkeys(range(1000), NEVER)
    assert visit(ranges, keys.STREAMS_START, streams, rest=0) == 0
    assert ranges.due(0) == [keys.STREAMS_START]
    assert visit(ranges, keys.STREAMS_START, streams, rest=400) == 400
    (rest,) = ranges.due(0)
    assert visit(ranges, rest, streams) == 600
    assert ranges.due(NEVER - 1) == []


def test_the_oldest_arrivals_that_a_visit_found_are_known_at_the_next() -> None:
    ranges = DueRanges()
    ranges.begin(keys.STREAMS_START)
    visits = [Visit(keys.stream(*ref_of(n)), n, 10, n * 5) for n in range(300)]
    ranges.finish(keys.STREAMS_START, visits)
    known: dict[int, int] = {}
    for start in ranges.due(10):
        known |= ranges.begin(start)[1]
    assert known == {n: n * 5 for n in range(1, 300)}


def test_ranges_whose_streams_are_gone_take_no_memory() -> None:
    ranges = DueRanges()
    streams = dict.fromkeys(range(10_000), 10)
    visit(ranges, keys.STREAMS_START, streams)
    assert len(ranges) > 30
    for start in ranges.due(10):
        visit(ranges, start, {1: 20})
    assert len(ranges) == 1
