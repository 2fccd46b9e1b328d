"""The busiest streams: found while something is appended, and in bounded memory."""

from __future__ import annotations

import pytest

from streamfold.store.store import StreamStore
from streamfold.store.usage import busy_streams
from tests.store.conftest import BASIN, STREAM, Clock, bodies
from tests.store.usage.usage_questions import ONE


def busiest(store: StreamStore, limit: int = 10) -> list[tuple[str, int, int]]:
    _, found = store.usage.busy.busiest(limit, lambda ref: ref.stream != "hidden")
    return [(stream.ref.stream, stream.records, stream.bytes) for stream in found]


async def test_the_streams_with_most_bytes_come_first_and_hidden_ones_are_left_out(
    store: StreamStore,
) -> None:
    for name in ("quiet", "hidden"):
        await store.create_stream(BASIN, name)
    await store.append(BASIN, "hidden", bodies(*"abcdefgh"))
    await store.append(BASIN, "quiet", bodies("a"))
    for _ in range(2):
        await store.append(BASIN, STREAM, bodies("a", "b"))
    assert busiest(store) == [(STREAM, 4, 4 * ONE), ("quiet", 1, ONE)]
    assert busiest(store, 1) == [(STREAM, 4, 4 * ONE)]


async def test_appends_count_for_one_to_two_windows(store: StreamStore, clock: Clock) -> None:
    window = busy_streams.WINDOW_MS / 1000
    await store.append(BASIN, STREAM, bodies("a"))
    clock.pass_seconds(window)
    await store.append(BASIN, STREAM, bodies("b"))
    assert busiest(store) == [(STREAM, 2, 2 * ONE)]
    assert store.usage.busy.busiest(1, lambda _: True)[0] == window
    clock.pass_seconds(window)
    assert busiest(store) == [(STREAM, 1, ONE)]
    clock.pass_seconds(window)
    assert busiest(store) == []


async def test_after_a_pause_or_a_clock_that_went_back_nothing_is_busy(
    store: StreamStore, clock: Clock
) -> None:
    for seconds in (60, -60):
        await store.append(BASIN, STREAM, bodies("a"))
        assert busiest(store)
        clock.pass_seconds(seconds)
        assert busiest(store) == []


async def test_a_busy_stream_stays_among_more_streams_than_are_counted(
    store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_streams, "STREAMS_MAX", 4)
    await store.append(BASIN, STREAM, bodies("much", "more"))
    for number in range(20):
        await store.create_stream(BASIN, f"stream-{number}")
        await store.append(BASIN, f"stream-{number}", bodies("a"))
        assert len(busiest(store, 100)) <= 4
    assert busiest(store, 1)[0][0] == STREAM
