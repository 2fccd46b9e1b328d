"""Reports usage as series over a span of time, as far as it is known.

Unknown values are omitted: hours in which a basin's storage was not measured, levels of a stream older
than a day, and everything older than 31 days. Amounts have a value in every interval, because where
nothing was counted, nothing happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Final

from streamfold.model.metrics import (
    AccountMetrics,
    Accumulation,
    BasinMetrics,
    Gauge,
    Interval,
    Label,
    Metric,
    Span,
    Unit,
)
from streamfold.store import keys, rows
from streamfold.store.mount import Mount
from streamfold.store.rows import LevelRow, StreamRow
from streamfold.store.usage.held_bytes import LEVEL_HOURS
from streamfold.store.usage.recorder import ACCOUNT, USAGE_HOURS, Hour, UsageKeeper

_HOUR, _MINUTE = 3600, 60

#: Sets of amounts: their unit, their default interval, and the series shown even when zero.
_AMOUNTS: Final[dict[str, tuple[Unit, Interval, tuple[str, ...]]]] = {
    AccountMetrics.ACCOUNT_OPS: (Unit.OPERATIONS, Interval.HOUR, ()),
    BasinMetrics.APPEND_OPS: (Unit.OPERATIONS, Interval.MINUTE, ("standard", "express")),
    BasinMetrics.READ_OPS: (Unit.OPERATIONS, Interval.MINUTE, ("unary", "streaming")),
    BasinMetrics.READ_THROUGHPUT: (Unit.BYTES, Interval.MINUTE, ("bytes",)),
    BasinMetrics.APPEND_THROUGHPUT: (Unit.BYTES, Interval.MINUTE, ("bytes",)),
    BasinMetrics.BASIN_OPS: (Unit.OPERATIONS, Interval.HOUR, ()),
}


#: The series of the account's bill.
_BILLED: Final = (*BasinMetrics, AccountMetrics.ACCOUNT_OPS, "total")


class UsageReport:
    """Reports the usage in one mount. `now` is in Unix seconds."""

    def __init__(self, mount: Mount, keeper: UsageKeeper, now: int) -> None:
        self._mount = mount
        self._keeper = keeper
        self._now = now

    async def active_basins(self, span: Span) -> tuple[Metric, ...]:
        """Return the basins that had a stream during the span, with hourly precision."""
        hours = await self._hours(ACCOUNT, self._recorded(span, USAGE_HOURS))
        names = set[str]().union(*(hour.basins for hour in hours.values()))
        first = await self._keeper.first_streams()  # includes basins that were not measured yet
        names.update(name for name, row in first.items() if row.created_at < span.end * 1000)
        return (Label(AccountMetrics.ACTIVE_BASINS, tuple(sorted(names))),)

    def bill(self, span: Span, interval: Interval | None) -> tuple[Metric, ...]:
        """Return a bill in US dollars, by dimension and in total, for complete hours.

        This server charges nothing.
        """
        interval = interval or Interval.HOUR
        recorded = self._recorded(span, USAGE_HOURS)
        hours = Span(recorded.start, min(recorded.end, self._now // _HOUR * _HOUR))
        points = tuple((ts, 0) for ts in hours.buckets(interval))
        return tuple(Accumulation(name, Unit.USD, interval, points) for name in _BILLED)

    async def amounts(
        self, basin: str, metric_set: str, span: Span, interval: Interval | None
    ) -> tuple[Metric, ...]:
        """Return one series for each amount in `metric_set`."""
        unit, default, always = _AMOUNTS[metric_set]
        interval = interval or default
        buckets = self._recorded(span, USAGE_HOURS).buckets(interval)
        hours = await self._hours(basin, Span(buckets.start, buckets.stop))
        series: dict[str, dict[int, int]] = {name: {} for name in always}
        for number, hour in hours.items():
            for name, amounts in hour.amounts.items():
                kind, _, label = name.partition("/")
                if kind == metric_set:
                    _add(series.setdefault(label, {}), number, amounts, interval)
        names = [*always, *sorted(series.keys() - set(always))]
        shown = [(name, [(ts, series[name].get(ts, 0)) for ts in buckets]) for name in names]
        return tuple(
            Accumulation(metric_set if name == "bytes" else name, unit, interval, tuple(points))
            for name, points in shown
            if name in always or any(amount for _, amount in points)
        )

    async def basin_storage(self, basin: str, span: Span) -> tuple[Metric, ...]:
        """Return the bytes of records in the basin, for each hour in which upkeep measured them."""
        buckets = self._recorded(span, USAGE_HOURS).buckets(Interval.HOUR)
        hours = await self._hours(basin, Span(buckets.start, buckets.stop))
        points = [
            (ts, hour.storage)
            for ts in buckets
            if (hour := hours.get(ts // _HOUR)) and hour.storage is not None
        ]
        return (Gauge(BasinMetrics.STORAGE, Unit.BYTES, tuple(points)),)

    async def stream_storage(self, stream: StreamRow, span: Span) -> tuple[Metric, ...]:
        """Return the bytes of records in the stream at the end of each minute, for the last day."""
        recorded = self._recorded(span, LEVEL_HOURS)
        created = stream.created_at // 1000
        buckets = Span(max(recorded.start, created), recorded.end).buckets(Interval.MINUTE)
        changes = await self._changes(stream.id, buckets.start // _HOUR)
        level, points, following = changes[0][1], [], 1
        for ts in buckets:
            while following < len(changes) and changes[following][0] <= ts:
                level = changes[following][1]
                following += 1
            points.append((ts, level))
        return (Gauge(BasinMetrics.STORAGE, Unit.BYTES, tuple(points)),)

    def _recorded(self, span: Span, hours: int) -> Span:
        """Return the part of the span that is neither too old nor in the future."""
        horizon = (self._now // _HOUR - hours + 1) * _HOUR
        end = min(span.end, self._now + 1)
        return Span(min(max(span.start, horizon), end), end)

    async def _hours(self, basin: str, span: Span) -> dict[int, Hour]:
        return await self._keeper.load(basin, span.start // _HOUR, -(-span.end // _HOUR))

    async def _changes(self, stream_id: int, first_hour: int) -> list[tuple[int, int]]:
        """Return the level before `first_hour`, and all later changes with their times."""
        held_bytes = self._keeper.held_bytes
        courses: list[tuple[int, LevelRow]] = []
        bounds = keys.level(stream_id, first_hour), keys.levels_end(stream_id)
        async with aclosing(self._mount.engine.scan(*bounds, first=LEVEL_HOURS)) as pages:
            async for page in pages:
                courses += [(keys.hour(key), rows.decode(value, LevelRow)) for key, value in page]
        row = await held_bytes.row(stream_id)
        courses.append((row.hour, row.course))
        before = courses[0][1].opening
        changes = [(0, before), *_moments(courses)]
        if more := held_bytes.unsettled(stream_id, row):
            changes.append((self._now // _MINUTE * _MINUTE, row.size + more))
        return changes


def _moments(courses: Iterable[tuple[int, LevelRow]]) -> list[tuple[int, int]]:
    return [
        (hour * _HOUR + minute * _MINUTE, level)
        for hour, course in courses
        for minute, level in sorted(course.levels.items())
    ]


def _add(sums: dict[int, int], hour: int, amounts: dict[int, int], interval: Interval) -> None:
    """Add the amounts of an hour's minutes to their intervals."""
    start = hour * _HOUR
    if interval is Interval.MINUTE:
        for minute, amount in amounts.items():
            ts = start + minute * _MINUTE
            sums[ts] = sums.get(ts, 0) + amount
    else:
        ts = start // interval.seconds * interval.seconds
        sums[ts] = sums.get(ts, 0) + sum(amounts.values())
