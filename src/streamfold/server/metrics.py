"""Append metrics under s2-lite's names, and storage metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamfold.server.http.drain import DrainGate
from streamfold.store.append_queues import Submission
from streamfold.store.log.committer import CommitReport
from streamfold.store.log.shares import AppendAck
from streamfold.store.store import StreamStore

#: Seconds: from a commit in memory to a struggling object store.
LATENCY_BUCKETS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: Records, up to the largest batch.
RECORDS_BUCKETS: Final = (1, 10, 50, 100, 250, 500, 1000)
#: Metered bytes, up to the largest batch.
BYTES_BUCKETS: Final = (512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20)


#: Values gathered before they are counted together.
_UNCOUNTED_MAX: Final = 4096
#: Seconds: from back-to-back commits to a nearly idle server.
INTERVAL_BUCKETS: Final = (*LATENCY_BUCKETS, 30.0, 60.0, 300.0)
#: Bytes: from one small record to the largest commit.
FLUSH_BUCKETS: Final = tuple(1 << power for power in range(8, 28, 2))
#: Documents `streamfold_standby`, which active servers report as 0.
STANDBY: Final = "1 while another server is active"


class Histogram:
    """A histogram that counts many values at once. For one event loop, without a lock.

    Counting values one by one, as prometheus_client does, would add 10 % to an append.
    """

    __slots__ = ("_bounds", "_counts", "_name", "_text", "_total", "_uncounted")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._uncounted: list[float] = []

    def observe(self, value: float) -> None:
        self._uncounted.append(value)
        if len(self._uncounted) >= _UNCOUNTED_MAX:
            self._count()

    def observe_all(self, values: Sequence[float]) -> None:
        self._uncounted += values
        self._count()

    def _count(self) -> None:
        indices = np.searchsorted(
            self._bounds, self._uncounted
        )  # to the left: bounds are inclusive
        counts = np.bincount(indices, minlength=len(self._counts)).tolist()
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._total += sum(self._uncounted)
        self._uncounted.clear()

    def family(self) -> HistogramMetricFamily:
        """Return the current state with Prometheus' cumulative counts."""
        self._count()
        buckets, seen = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return HistogramMetricFamily(self._name, self._text, buckets, self._total)


class AppendMetrics(Collector):
    """Waiting times, durations and sizes of appends."""

    def __init__(self) -> None:
        self.permit_latency = Histogram(
            "s2_append_permit_latency_seconds",
            "Time until a batch has its slot in its stream",
            LATENCY_BUCKETS,
        )
        self.ack_latency = Histogram(
            "s2_append_ack_latency_seconds",
            "Time from there until the batch is durable",
            LATENCY_BUCKETS,
        )
        self.batch_records = Histogram(
            "s2_append_batch_records", "Records in a batch", RECORDS_BUCKETS
        )
        self.batch_bytes = Histogram(
            "s2_append_batch_bytes", "Metered bytes in a batch", BYTES_BUCKETS
        )
        #: For each append: seconds until accepted, records, bytes, and seconds from then until durable.
        self._uncounted: list[float] = []

    def observe(self, submission: Submission, ack: AppendAck) -> None:
        """Count a durable append."""
        submitted_at, accepted_at = submission.submitted_at, submission.accepted_at
        if accepted_at is None:
            return
        count = ack.end.seq_num - ack.start.seq_num
        waited, took = accepted_at - submitted_at, perf_counter() - accepted_at
        self._uncounted += (waited, count, submission.metered, took)
        if len(self._uncounted) >= _UNCOUNTED_MAX:
            self._count()

    def _count(self) -> None:
        self.permit_latency.observe_all(self._uncounted[0::4])
        self.batch_records.observe_all(self._uncounted[1::4])
        self.batch_bytes.observe_all(self._uncounted[2::4])
        self.ack_latency.observe_all(self._uncounted[3::4])
        self._uncounted.clear()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        self._count()
        yield self.permit_latency.family()
        yield self.ack_latency.family()
        yield self.batch_records.family()
        yield self.batch_bytes.family()


class FollowerMetrics(Collector):
    """The number of readers that follow streams."""

    def __init__(self, drain_gate: DrainGate) -> None:
        self._gate = drain_gate

    def collect(self) -> Iterator[GaugeMetricFamily]:
        text = "Readers that follow a stream: read sessions, server-sent events and long-polls"
        yield GaugeMetricFamily("streamfold_followers", text, float(self._gate.waits))


class StoreMetrics(Collector):
    """Storage metrics. `url` is the storage address, or None if readers may not see it."""

    def __init__(self, store: StreamStore, url: str | None) -> None:
        self._store = store
        self._url = url
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
        if self._url is not None:
            where = GaugeMetricFamily(
                "streamfold_storage_info", "Where the store is", labels=("url",)
            )
            where.add_metric((self._url,), 1)
            yield where
        yield GaugeMetricFamily("streamfold_standby", STANDBY, value=0)
        yield GaugeMetricFamily(
            "streamfold_storage_open",
            "1 while storage is open, 0 while it is reopened after a failure",
            value=float(self._store.storage_open),
        )
        yield CounterMetricFamily(
            "streamfold_storage_failures",
            "Failures after which storage was closed and reopened",
            value=self._store.storage_failures,
        )
        yield self._damage()
        yield self._use()
        yield from self._room()

    def _damage(self) -> Metric:
        report = self._store.damage
        gauge = GaugeMetricFamily(
            "streamfold_damage",
            "Places that cannot be read, streams that have any, and damaged files of the database, as "
            "far as they were met since storage was opened",
            labels=("of",),
        )
        gauge.add_metric(("places",), len(report.places) + report.unlisted)
        gauge.add_metric(("streams",), report.streams)
        gauge.add_metric(("files",), len(report.files))
        return gauge

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
            "1 while appends are refused because local disk, or memory, is full",
            value=float(full),
        )
        if self._space.bounded:
            yield GaugeMetricFamily(
                "streamfold_storage_free_bytes",
                "Bytes free on local disk, or in memory",
                value=self._space.free,
            )
            yield GaugeMetricFamily(
                "streamfold_storage_reserve_bytes",
                "Bytes that must be free for appends to be taken",
                value=self._space.reserve,
            )
