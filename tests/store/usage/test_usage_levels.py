"""Bytes that a stream held are reported minute by minute."""

from __future__ import annotations

from streamfold.model.metrics import Gauge
from streamfold.store.rows import HeldRow, LevelRow
from streamfold.store.store import StreamStore
from streamfold.store.usage.held_bytes import advance
from tests.store.conftest import BASIN, STREAM, Bench, Clock, bodies
from tests.store.usage.usage_questions import NOW, ONE, held_now, levels, stored_levels

HOUR = 3600


async def test_levels_are_reported_minute_by_minute(store: StreamStore, clock: Clock) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    clock.pass_seconds(120)
    await store.append(BASIN, STREAM, bodies("b"))
    await store.upkeep()
    clock.pass_seconds(60)
    await store.append(BASIN, STREAM, bodies("c"))
    assert await levels(store, NOW, NOW + 240) == [ONE, ONE, 2 * ONE, 3 * ONE]
    assert await levels(store, NOW + 90, NOW + 180) == [ONE, 2 * ONE]


async def test_levels_carry_over_from_hour_to_hour_and_over_a_restart(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for _ in range(3):
            await store.append(BASIN, STREAM, bodies("a"))
            await store.upkeep()
            clock.pass_seconds(2 * HOUR)
    async with bench.store() as store:
        by_minute = await levels(store, NOW, NOW + 6 * HOUR)
        assert by_minute == [ONE] * 120 + [2 * ONE] * 120 + [3 * ONE] * 120
        assert await levels(store, NOW + HOUR, NOW + HOUR + 60) == [ONE]
        assert await levels(store, NOW + 5 * HOUR, NOW + 5 * HOUR + 60) == [3 * ONE]


async def test_levels_begin_when_the_stream_was_created(store: StreamStore, clock: Clock) -> None:
    clock.pass_seconds(600)
    await store.create_stream(BASIN, "late")
    [gauge] = await store.account.stream_metrics(BASIN, "late", "storage", NOW, NOW + 601)
    assert isinstance(gauge, Gauge)
    assert gauge.values == ((NOW + 600, 0),)


async def test_levels_are_kept_for_a_day(store: StreamStore, bench: Bench, clock: Clock) -> None:
    for _ in range(30):
        await store.append(BASIN, STREAM, bodies("a"))
        await store.upkeep()
        clock.pass_seconds(HOUR)
    now = clock.now // 1000
    assert await stored_levels(bench) <= 25
    [gauge] = await store.account.stream_metrics(BASIN, STREAM, "storage", NOW, now)
    assert isinstance(gauge, Gauge)
    assert gauge.values[0] == (NOW + 7 * HOUR, 8 * ONE)
    assert gauge.values[-1] == (now - 60, 30 * ONE)


async def test_a_clock_that_goes_back_does_not_reorder_levels(
    store: StreamStore, clock: Clock
) -> None:
    clock.pass_seconds(2 * HOUR)
    await store.append(BASIN, STREAM, bodies("a"))
    await store.upkeep()
    clock.pass_seconds(-HOUR)
    await store.append(BASIN, STREAM, bodies("b"))
    await store.upkeep()
    clock.pass_seconds(2 * HOUR)
    assert await held_now(store, clock) == 2 * ONE


def test_a_course_opens_with_the_level_before_it() -> None:
    first = advance(HeldRow(), counted_to=1, size=10, minute=61)
    assert first == HeldRow(1, 10, 1, LevelRow(0, {1: 10}))
    second = advance(first, counted_to=2, size=20, minute=61)
    assert second == HeldRow(2, 20, 1, LevelRow(0, {1: 20}))
    third = advance(second, counted_to=3, size=30, minute=185)
    assert third == HeldRow(3, 30, 3, LevelRow(20, {5: 30}))


def test_a_change_that_leaves_the_level_opens_no_course() -> None:
    row = HeldRow(1, 10, 1, LevelRow(0, {1: 10}))
    assert advance(row, counted_to=2, size=10, minute=200) == HeldRow(2, 10, 1, row.course)
