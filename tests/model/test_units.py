from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.model.units import duration_text, parse_duration, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("5m", 300), ("6h", 21600), ("250ms", 0.25), ("1d", 86400), ("1w", 604800),
        ("1h30m", 5400), ("1.5h", 5400), ("5 minutes", 300), ("1 day", 86400), ("0", 0), ("7us", 7e-6),
        (" 2 s ", 2),
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
