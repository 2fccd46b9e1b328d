"""Keeps the server's own metrics of the last hour, so that charts are complete when a page opens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

from prometheus_client.registry import Collector

from streamfold.model.access_tokens import Right
from streamfold.server.auth import Access
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import PUBLIC, Router

logger = logging.getLogger(__name__)

#: Seconds between readings, and number of readings in an hour.
_INTERVAL: Final = 15.0
_READINGS: Final = 240
#: The metrics that charts show. Other series are only in /metrics.
_NAMES: Final = frozenset((
    "process_resident_memory_bytes", "s2_append_ack_latency_seconds_bucket",
    "s2_append_ack_latency_seconds_count", "s2_append_batch_bytes_sum",
    "s2_append_batch_records_sum", "streamfold_connections", "streamfold_followers",
    "streamfold_store_bytes",
))  # fmt: skip
#: A series: its name and its labels.
Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


class MetricsHistory:
    """Reads the metrics periodically and serves these readings."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._readings: deque[tuple[float, dict[Series, float]]] = deque(maxlen=_READINGS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take a reading now, and more at regular intervals, until the context ends."""
        self._read()
        # Not a task group: it would wrap the exceptions of the body.
        reading = asyncio.create_task(self._read_regularly())
        try:
            yield
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading

    async def _read_regularly(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL)
            try:
                self._read()
            except Exception:  # a gap in a chart must not stop the server
                logger.exception("the server's figures cannot be read")

    def _read(self) -> None:
        values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for collector in self._collectors
            for family in collector.collect()
            for sample in family.samples
            if sample.name in _NAMES
        }
        self._readings.append((time.time(), values))

    def as_json(self) -> dict[str, object]:
        """Return the names and labels of all series, and each reading's time and values."""
        names = list(dict.fromkeys(name for _, values in self._readings for name in values))
        return {
            "series": [{"name": name, "labels": dict(labels)} for name, labels in names],
            "readings": [
                [round(at * 1000), *(values.get(name) for name in names)]
                for at, values in self._readings
            ],
        }


class HistoryHandler:
    """Handles /console/history, which needs the same right as /metrics."""

    def __init__(self, history: MetricsHistory, access: Access, *, open_metrics: bool) -> None:
        self._history = history
        self._access = access
        self._needs = PUBLIC if open_metrics else Right.ACCOUNT_METRICS

    def add_to(self, router: Router, path: str) -> None:
        router.add("GET", path, self._needs, self.show)

    async def show(self, request: Request) -> None:
        if isinstance(self._needs, Right):
            await self._access.allow(request, self._needs)
        await request.reserve_answer(LIST_ROOM)
        await answer_json(request, self._history.as_json())
