"""Spans of time that usage can be asked for."""

from __future__ import annotations

import pytest

from streamfold.errors import InvalidError
from streamfold.model.metrics import SPAN_MAX, Interval, Span, parse_span

NOW = 1_767_225_600


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [
        (None, NOW, "both start and end"),
        (NOW, None, "both start and end"),
        (None, None, "both start and end"),
        (NOW, NOW - 1, "after end"),
        (NOW, NOW + 61, "future"),
        (NOW - SPAN_MAX - 1, NOW, "30 days"),
    ],
)
def test_a_span_that_makes_no_sense_is_refused(
    start: int | None, end: int | None, why: str
) -> None:
    with pytest.raises(InvalidError, match=why):
        parse_span(start, end, NOW)


@pytest.mark.parametrize(("start", "end"), [(NOW, NOW), (NOW - SPAN_MAX, NOW), (NOW, NOW + 60)])
def test_a_span_may_be_as_long_as_thirty_days_and_a_little_ahead(start: int, end: int) -> None:
    assert parse_span(start, end, NOW) == Span(start, end)


def test_intervals_that_have_a_part_in_the_span_are_asked_for() -> None:
    assert list(Span(90, 181).buckets(Interval.MINUTE)) == [60, 120, 180]
    assert list(Span(90, 180).buckets(Interval.MINUTE)) == [60, 120]
    assert list(Span(3599, 3601).buckets(Interval.HOUR)) == [0, 3600]
    assert list(Span(60, 60).buckets(Interval.MINUTE)) == []
