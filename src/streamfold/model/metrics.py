"""Usage metrics as requested and reported: metric sets, time spans, series of points."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from streamfold.errors import InvalidError

#: Maximum seconds that a client's clock may be ahead of ours.
CLOCK_TOLERANCE = 60
#: Maximum seconds of one query: 30 days.
SPAN_MAX = 30 * 86_400


class AccountMetrics(enum.StrEnum):
    """Metric sets of the account."""

    #: Basins that had at least one stream.
    ACTIVE_BASINS = "active-basins"
    #: Operations on basins, tokens and locations, by name.
    ACCOUNT_OPS = "account-ops"
    #: US dollars, by S2's billing categories.
    ESTIMATED_BILLABLE_USAGE = "estimated-billable-usage"


class BasinMetrics(enum.StrEnum):
    """Metric sets of a basin."""

    STORAGE = "storage"
    #: Batches, by storage class.
    APPEND_OPS = "append-ops"
    #: Reads and read sessions.
    READ_OPS = "read-ops"
    READ_THROUGHPUT = "read-throughput"
    APPEND_THROUGHPUT = "append-throughput"
    #: Operations on streams other than appends and reads, by name.
    BASIN_OPS = "basin-ops"


class StreamMetrics(enum.StrEnum):
    """Metric sets of a stream."""

    STORAGE = "storage"


class Unit(enum.StrEnum):
    BYTES = "bytes"
    OPERATIONS = "operations"
    USD = "usd"


class Interval(enum.StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"

    @property
    def seconds(self) -> int:
        return _SECONDS[self]


_SECONDS: Final = {Interval.MINUTE: 60, Interval.HOUR: 3600, Interval.DAY: 86_400}

#: Unix seconds and a value: the total of the interval that begins there, or the level at its end.
Point: TypeAlias = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Scalar:
    name: str
    unit: Unit
    value: float


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Totals per interval."""

    name: str
    unit: Unit
    interval: Interval
    values: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Gauge:
    """Levels at points in time."""

    name: str
    unit: Unit
    values: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    values: tuple[str, ...]


Metric: TypeAlias = Scalar | Accumulation | Gauge | Label


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open span [`start`, `end`) in Unix seconds."""

    start: int
    end: int

    def buckets(self, interval: Interval) -> range:
        """Return the starts of all intervals that overlap the span."""
        width = interval.seconds
        return range(self.start // width * width, self.end, width)


def parse_span(start: int | None, end: int | None, now: int) -> Span:
    """Return the span of a query. `now` is in Unix seconds."""
    if start is None or end is None:
        raise InvalidError("these metrics are a series over time: give both start and end")
    if start > end:
        raise InvalidError(f"start {start} is after end {end}: swap them")
    if end > now + CLOCK_TOLERANCE:
        raise InvalidError(f"end {end} is in the future: it is {now} now")
    if end - start > SPAN_MAX:
        raise InvalidError(
            f"start {start} to end {end} is more than 30 days: ask for at most {SPAN_MAX} seconds"
        )
    return Span(start, end)
