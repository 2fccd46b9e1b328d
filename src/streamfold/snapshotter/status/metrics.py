"""The state of all tables as Prometheus metrics, computed on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamfold.archive.manifest.positions import LSN
from streamfold.snapshotter.status.table_status import TableStatus, TableWriters

_GAUGES: Final[dict[str, tuple[str, Callable[[TableStatus], float | None]]]] = {
    "snapshotter_snapshot_age_seconds": (
        "Seconds since the last base.",
        lambda status: status.snapshot_age_seconds,
    ),
    "snapshotter_diff_bytes": (
        "Bytes of the last diff, in its first format.",
        lambda status: status.last_diff.size_bytes if status.last_diff else None,
    ),
    "snapshotter_churn_records": (
        "Changes in the diffs since the last base.",
        lambda status: status.churn_records,
    ),
    "snapshotter_buffer_depth": (
        "Records that were read and are in no artifact yet.",
        lambda status: status.buffer_depth,
    ),
    "snapshotter_manifest_head_position": (
        "Last record that the archive covers.",
        lambda status: (
            None
            if status.manifest_head is None or status.position is None
            else float(status.position - status.buffer_depth)
        ),
    ),
    "snapshotter_lag_records": (
        "Records of the stream that are not taken in; absent while unknown.",
        lambda status: status.lag_records,
    ),
    "snapshotter_lag_seconds": (
        "Age of the first record that is not taken in; absent while unknown.",
        lambda status: status.lag_seconds,
    ),
    "snapshotter_source_head_position": (
        "Newest commit of the database in the archive, as a byte of its log.",
        lambda status: None if status.source_head is None else float(LSN.rank(status.source_head)),
    ),
    "snapshotter_source_lag_bytes": (
        "Log of the database between the newest commit known from the stream and the archive.",
        lambda status: status.source_lag_bytes,
    ),
    "snapshotter_source_lag_seconds": (
        "Age of the oldest commit of the database that the archive lacks.",
        lambda status: status.source_lag_seconds,
    ),
    "snapshotter_rows_per_second": (
        "Records taken in per second by the last batch.",
        lambda status: status.rows_per_second,
    ),
    "snapshotter_ready": (
        "1 when the base is durable and everything is taken in.",
        lambda status: float(status.ready),
    ),
    "snapshotter_up": (
        "1 while the writer of the table runs or tries again, 0 when it stopped.",
        lambda status: float(not status.state.is_final),
    ),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[TableStatus], int]]]] = {
    "snapshotter_records": ("Records taken in.", lambda status: status.counts.records),
    "snapshotter_dead_letters": (
        "Records that could not be decoded.",
        lambda status: status.counts.dead_letters,
    ),
    "snapshotter_transactions_cut": (
        "Transactions that were published in parts.",
        lambda status: status.counts.transactions_cut,
    ),
    "snapshotter_delta_errors": (
        "Failed writes of the Delta log.",
        lambda status: status.counts.delta_errors,
    ),
    "snapshotter_failures": ("Failures of any kind.", lambda status: status.counts.failures),
}


class TableCollector:
    """Makes metrics from statuses; stateless."""

    def __init__(self, writers: TableWriters) -> None:
        self._writers = writers

    def collect(self) -> Iterable[Metric]:
        statuses = list(self._writers.statuses().values())
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["table"])
            for status in statuses:
                found = value(status)
                if found is not None:
                    gauge.add_metric([status.table], found)
            yield gauge
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["table"])
            for status in statuses:
                counter.add_metric([status.table], count(status))
            yield counter
        yield from _labelled(statuses)


def _labelled(statuses: list[TableStatus]) -> Iterable[Metric]:
    artifacts = CounterMetricFamily(
        "snapshotter_artifacts_written", "Artifacts committed.", labels=["table", "kind"]
    )
    destinations = CounterMetricFamily(
        "snapshotter_destination_errors", "Failed writes.", labels=["table", "dest"]
    )
    sinks = CounterMetricFamily(
        "snapshotter_event_errors", "Failed deliveries of events.", labels=["table", "sink"]
    )
    for status in statuses:
        counts = status.counts
        artifacts.add_metric([status.table, "snapshot"], counts.bases)
        artifacts.add_metric([status.table, "diff"], counts.diffs)
        for uri, errors in counts.destination_errors.items():
            destinations.add_metric([status.table, uri], errors)
        for sink, errors in counts.event_errors.items():
            sinks.add_metric([status.table, sink], errors)
    yield from (artifacts, destinations, sinks)


def render_metrics(writers: TableWriters) -> bytes:
    """Return all metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector(writers))
    return generate_latest(registry)
