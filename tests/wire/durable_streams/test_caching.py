"""Cursors only advance, and entity tags change with the response."""

from __future__ import annotations

import itertools
import random
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.wire.durable_streams.responses import etag, matches, next_cursor

repeatable = settings(derandomize=True, deadline=None, max_examples=200)

EPOCH_MS = int(datetime(2024, 10, 9, tzinfo=UTC).timestamp()) * 1000
NOW_MS = EPOCH_MS + 1000 * 20_000 + 19_999


def never(_low: int, _high: int) -> int:
    raise AssertionError("no jitter is needed")


@pytest.mark.parametrize(
    "client", [None, "", "abc", "-1", "+5", "1.5", "1e9", " 999", "\u0661", "0", "999", "9" * 21]
)
def test_without_a_newer_cursor_it_is_the_current_interval(client: str | None) -> None:
    assert next_cursor(client, NOW_MS, never) == "1000"


def test_an_interval_lasts_20_seconds() -> None:
    assert next_cursor(None, EPOCH_MS, never) == "0"
    assert next_cursor(None, EPOCH_MS + 19_999, never) == "0"
    assert next_cursor(None, EPOCH_MS + 20_000, never) == "1"
    assert next_cursor(None, 0, never) == "0"


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(1, 1), (20, 1), (21, 2), (40, 2), (3599, 180), (3600, 180)]
)
def test_a_client_that_is_not_behind_is_sent_ahead(seconds: int, ahead: int) -> None:
    asked = []

    def randint(low: int, high: int) -> int:
        asked.append((low, high))
        return seconds

    assert next_cursor("1000", NOW_MS, randint) == str(1000 + ahead)
    assert next_cursor("5000", NOW_MS, randint) == str(5000 + ahead)
    assert asked == [(1, 3600)] * 2


@repeatable
@given(st.integers(0, 2**32), st.integers(0, 10**19), st.integers(0, 2**45))
def test_a_cursor_is_always_beyond_the_one_it_answers(seed: int, client: int, now_ms: int) -> None:
    cursor = next_cursor(str(client), now_ms, random.Random(seed).randint)
    assert re.fullmatch("[0-9]+", cursor)
    assert int(cursor) > client


@repeatable
@given(st.integers(0, 2**32), st.lists(st.integers(0, 60_000), min_size=2, max_size=20))
def test_a_client_that_echoes_its_cursor_never_sees_one_twice(seed: int, waits: list[int]) -> None:
    rng = random.Random(seed)
    cursors, cursor = [], None
    for now in itertools.accumulate(waits, initial=NOW_MS):
        cursor = next_cursor(cursor, now, rng.randint)
        cursors.append(int(cursor))
    assert cursors == sorted(set(cursors))


def test_a_tag_is_strong_and_quoted() -> None:
    for stream_id in (7, 'a"b/c,\u00e9', ""):
        assert re.fullmatch(r'"[A-Za-z0-9_:-]*"', etag(stream_id, 0, 5, closed=False))


def test_a_tag_changes_with_everything_that_the_answer_depends_on() -> None:
    ids: list[int | str] = [1, 11, "a", "aa"]
    ranges = itertools.product(ids, (0, 1), (1, 11), (False, True))
    tags = [etag(stream_id, start, end, closed) for stream_id, start, end, closed in ranges]
    assert len(set(tags)) == len(tags)


TAG = etag(7, 0, 5, closed=False)


@pytest.mark.parametrize(
    "header",
    [
        TAG,
        f"W/{TAG}",
        "*",
        " * ",
        f'"x", {TAG}',
        f'{TAG},"x"',
        f'"x",W/"y" , W/{TAG}',
        f'"a,b", {TAG}',
        f'"", {TAG}',
    ],
)
def test_an_answer_that_the_client_has_is_recognised(header: str) -> None:
    assert matches(header, TAG)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        '""',
        '"x"',
        TAG.strip('"'),
        f'"x{TAG[1:]}',
        etag(7, 0, 5, closed=True),
        etag(7, 0, 6, closed=False),
        '"*"',
        f'"{TAG}',
        "*, " + etag(8, 0, 5, closed=False),
    ],
)
def test_any_other_answer_is_sent(header: str | None) -> None:
    assert not matches(header, TAG)
