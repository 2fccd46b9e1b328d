"""Queries of stored bytes, for tests."""

from __future__ import annotations

from streamfold.model.metrics import Gauge
from streamfold.store import keys
from streamfold.store.store import StreamStore
from tests.store.conftest import BASIN, EPOCH, STREAM, Bench, Clock

#: Unix seconds at which test clocks start.
NOW = EPOCH // 1000
#: Metered bytes of a record with a body of one byte: 8, and its body.
ONE = 8 + 1


async def levels(store: StreamStore, start: int, end: int, stream: str = STREAM) -> list[float]:
    """The level of each minute; the span must be one of which all is known."""
    [gauge] = await store.account.stream_metrics(BASIN, stream, "storage", start, end)
    assert isinstance(gauge, Gauge)
    assert [ts for ts, _ in gauge.values] == list(range(start // 60 * 60, end, 60))
    return [level for _, level in gauge.values]


async def held_now(store: StreamStore, clock: Clock, stream: str = STREAM) -> float:
    now = clock.now // 1000
    return (await levels(store, now, now + 1, stream))[0]


async def stored(bench: Bench, first: bytes, end: bytes) -> int:
    """How many rows there are from `first` up to `end`."""
    return len([row async for page in bench.engine.scan(first, end) for row in page])


async def stored_levels(bench: Bench) -> int:
    return await stored(bench, keys.level(0, 0), keys.usage("", 0))
