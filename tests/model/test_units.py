from __future__ import annotations

from datetime import timedelta

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.cli.parameters import ByteSize, Duration
from streamfold.model.units import (
    approximate_size,
    duration_text,
    parse_duration,
    parse_seconds,
    parse_size,
    size_text,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("5m", 300), ("6h", 21600), ("250ms", 0.25), ("1d", 86400), ("1w", 604800),
        ("1h30m", 5400), ("1.5h", 5400), ("5 minutes", 300), ("1 day", 86400), ("0", 0), ("7us", 7e-6),
        (" 2 s ", 2), ("10µs", 1e-5), ("2000ns", 2e-6), ("2hrs", 7200), ("3 mins", 180),
    ],
)  # fmt: skip
def test_durations_are_words(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "30", "s", "-5s", "5x", "5s5", "5 s m", "1e3s", "0.1us", "99999d"]
)
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("7d", 604_800), ("1w", 604_800), ("1h 30m", 5400), ("2hours5min", 7500),
     ("40000d", 3_456_000_000)],
)  # fmt: skip
def test_whole_seconds_may_be_many(text: str, seconds: int) -> None:
    assert parse_seconds(text) == seconds
    assert Duration().convert(text.upper() if " " in text else text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "7 fortnights", "-1d", "1.5h", "250ms"])
def test_what_is_not_whole_seconds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_seconds(text)


def test_the_command_line_takes_numbers_for_seconds_and_bytes() -> None:
    assert (Duration().convert("90", None, None), ByteSize().convert(123, None, None)) == (90, 123)
    for kind, text in ((Duration(), "7 fortnights"), (ByteSize(), "7 pounds")):
        with pytest.raises(click.BadParameter, match=f"'{text}' is not a {kind.name}: write it"):
            kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_a_size_is_shown_roughly(size: int, text: str) -> None:
    assert approximate_size(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("32MiB", 32 << 20), ("1GB", 10**9), ("4096", 4096), ("1.5 KiB", 1536), ("2 tib", 2 << 40),
        ("7B", 7), ("10kB", 10_000), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_are_words(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "1M", "0.3B", "1e6", "99999999TiB", "٣"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


@settings(deadline=None)
@given(st.timedeltas(timedelta(0), timedelta(days=3000)), st.integers(0, 2**62))
def test_what_is_shown_can_be_read_again(duration: timedelta, size: int) -> None:
    assert parse_duration(duration_text(duration)) == duration
    assert parse_size(size_text(size)) == size
