"""Metrics of storage: flushes, what waits for them, and the space that is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamfold.server.metrics import LATENCY_BUCKETS, Histogram
from streamfold.store.log.committer import CommitReport
from streamfold.store.store import StreamStore

#: Seconds: from back-to-back commits to a server that is hardly used.
INTERVAL_BUCKETS: Final = (*LATENCY_BUCKETS, 30.0, 60.0, 300.0)
#: Bytes, from one small record to all that one commit can carry.
FLUSH_BUCKETS: Final = tuple(1 << power for power in range(8, 28, 2))


class StoreMetrics(Collector):
    """Storage as the store sees it."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._space = store.space
        self._queue = store.queue
        self._duration = Histogram(
            "streamfold_flush_duration_seconds",
            "Time from the start of a commit until it is durable",
            LATENCY_BUCKETS,
        )
        self._interval = Histogram(
            "streamfold_flush_interval_seconds",
            "Time from the start of a commit to the start of the next",
            INTERVAL_BUCKETS,
        )
        self._bytes = Histogram(
            "streamfold_flush_bytes", "Bytes of keys and values in a commit", FLUSH_BUCKETS
        )
        store.on_commit(self._observe)

    def _observe(self, report: CommitReport) -> None:
        self._duration.observe(report.duration)
        self._bytes.observe(report.size)
        if report.interval is not None:
            self._interval.observe(report.interval)

    def collect(self) -> Iterator[Metric]:
        yield self._duration.family()
        yield self._interval.family()
        yield self._bytes.family()
        yield GaugeMetricFamily(
            "streamfold_flush_queue_bytes",
            "Metered bytes of records accepted and not yet durable",
            value=self._queue.used,
        )
        yield GaugeMetricFamily(
            "streamfold_flush_queue_waiting",
            "Appends that wait for room among them",
            value=self._queue.waiting,
        )
        yield self._use()
        yield from self._room()

    def _use(self) -> Metric:
        gauge = GaugeMetricFamily(
            "streamfold_store_bytes",
            "Bytes of rows that can be read (live), of deleted rows still stored (dead), and of all "
            "files of the store (disk)",
            labels=("state",),
        )
        if (use := self._store.storage_use) is not None:
            gauge.add_metric(("live",), use.live)
            gauge.add_metric(("dead",), use.dead)
            gauge.add_metric(("disk",), use.disk)
        return gauge

    def _room(self) -> Iterator[Metric]:
        full = self._space.full
        yield GaugeMetricFamily(
            "streamfold_storage_full",
            "1 while appends are refused because local disk is full",
            value=float(full),
        )
        if self._space.bounded:
            yield GaugeMetricFamily(
                "streamfold_storage_free_bytes", "Bytes free on local disk", value=self._space.free
            )
            yield GaugeMetricFamily(
                "streamfold_storage_reserve_bytes",
                "Bytes that must be free for appends to be taken",
                value=self._space.reserve,
            )
