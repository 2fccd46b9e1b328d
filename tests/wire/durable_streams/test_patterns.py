"""Globs of subscriptions, against a matcher that tries everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.errors import InvalidError
from streamfold.wire.durable_streams.subscriptions import (
    MANY_MAX,
    PATTERN_MAX,
    SEGMENTS_MAX,
    Pattern,
)

repeatable = settings(derandomize=True, deadline=None, max_examples=500)


def fits(pattern: list[str], path: list[str]) -> bool:
    """The definition, taken literally; exponential, so for short ones only."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(fits(pattern[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and pattern[0] in ("*", path[0]) and fits(pattern[1:], path[1:])


@repeatable
@given(
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6),
)
def test_a_path_fits_when_the_definition_says_so(pattern: list[str], path: list[str]) -> None:
    assert Pattern("/".join(pattern)).matches("/".join(path)) == fits(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("events", "events", True),
        ("events", "Events", False),
        ("events", "events/a", False),
        ("events/*", "events/a", True),
        ("events/*", "events", False),
        ("events/*", "events/a/b", False),
        ("events/**", "events", True),
        ("events/**", "events/a/b", True),
        ("events/**", "eventsa", False),
        ("**", "a/b/c", True),
        ("**/log", "log", True),
        ("**/log", "a/b/log", True),
        ("**/log", "a/log/b", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/z/z", True),
        ("a/**/**/z", "a/b/z", True),
        ("*/b", "a/b", True),
        ("/events/*", "events/a", True),
        ("events/*", "/events/a", True),
        ("a.c", "abc", False),
        ("[ab]", "a", False),
        ("a?", "ab", False),
        ("*", "*", True),
        ("a", "*", False),
        ("a", "**", False),
    ],
)
def test_segments_match_as_a_whole(pattern: str, path: str, expected: bool) -> None:
    assert Pattern(pattern).matches(path) is expected


@pytest.mark.parametrize(
    "text", ["", "/", "//", "a//b", "a/", "//a", "a*", "*a", "a/b*c", "***", "a/***/b", "a\0b"]
)
def test_a_pattern_that_cannot_mean_anything_is_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="pattern"):
        Pattern(text)


def test_a_pattern_has_a_bound() -> None:
    assert Pattern("a" * PATTERN_MAX).matches("a" * PATTERN_MAX)
    with pytest.raises(InvalidError, match=str(PATTERN_MAX)):
        Pattern("a" * (PATTERN_MAX + 1))


def test_a_new_pattern_has_few_segments_and_fewer_of_any_length() -> None:
    Pattern("/".join(["a"] * SEGMENTS_MAX)).require_simple()
    Pattern("**/a/" * (MANY_MAX - 1) + "**").require_simple()
    for text in ("/".join(["a"] * (SEGMENTS_MAX + 1)), "**/a/" * MANY_MAX + "**"):
        with pytest.raises(InvalidError, match=f"{SEGMENTS_MAX} and {MANY_MAX}"):
            Pattern(text).require_simple()


def test_a_pattern_that_makes_backtracking_explode_is_matched() -> None:
    pattern = Pattern("**/" + "a/**/" * 200 + "b")
    assert not pattern.matches("a/" * 255 + "c")
    assert pattern.matches("a/" * 255 + "b")


def test_a_pattern_shows_itself_without_its_leading_slash() -> None:
    assert repr(Pattern("/a/*")) == "Pattern('a/*')"
