"""The state of all tables as Prometheus metrics, computed on request."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamfold.archive.manifest.positions import LSN
from streamfold.snapshotter.status.table_status import TableStatus, TableWriters

_GAUGES: Final = {
    "snapshot_age_seconds": "Seconds since the last base.",
    "diff_bytes": "Bytes of the last diff, in its first format.",
    "churn_records": "Changes in the diffs since the last base.",
    "buffer_depth": "Records that were read and are in no artifact yet.",
    "manifest_head_position": "Last record that the archive covers.",
    "lag_records": "Records of the stream that are not taken in; absent while unknown.",
    "lag_seconds": "Age of the first record that is not taken in; absent while unknown.",
    "source_head_position": "Newest database commit in the archive, as a byte of its log.",
    "source_lag_bytes": "Database log between the newest known commit and the archive.",
    "source_lag_seconds": "Age of the oldest database commit that the archive lacks.",
    "rows_per_second": "Records taken in per second by the last batch.",
    "ready": "1 when the base is durable and everything is taken in.",
    "up": "1 while the writer of the table runs or tries again, 0 when it stopped.",
}
_SPARK_ROWS = "Records that Spark took in, and rows of the bases that it folded."
_SPARK_BYTES = "Bytes of these records in Arrow form, and of the files of these bases."
#: Counters by name: where the status has them, and their description.
_COUNTERS: Final = {
    "records": ("counts.records", "Records taken in."),
    "dead_letters": ("counts.dead_letters", "Records that could not be decoded."),
    "transactions_cut": ("counts.transactions_cut", "Transactions published in parts."),
    "delta_errors": ("counts.delta_errors", "Failed writes of the Delta log."),
    "failures": ("counts.failures", "Failures of any kind."),
    "table_spark_jobs": ("spark.jobs", "Spark jobs for the table; one may serve several tables."),
    "table_spark_tasks": ("spark.tasks", "Tasks of these jobs."),
    "table_spark_rows": ("spark.rows", _SPARK_ROWS),
    "table_spark_bytes": ("spark.bytes", _SPARK_BYTES),
}
_SPARK: Final = {
    "jobs": "Spark jobs of all tables.",
    "tasks": "Spark tasks of all tables.",
    "rows": _SPARK_ROWS,
    "bytes": _SPARK_BYTES,
}


class TableCollector:
    """Makes metrics from statuses; stateless."""

    def __init__(self, writers: TableWriters) -> None:
        self._writers = writers

    def collect(self) -> Iterable[Metric]:
        statuses = list(self._writers.statuses().values())
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"snapshotter_{name}", text, labels=["table"])
            for status in statuses:
                if (value := _gauge(status, name)) is not None:
                    gauge.add_metric([status.table], value)
            yield gauge
        for name, (path, text) in _COUNTERS.items():
            count = attrgetter(path)
            yield _counter(name, text, [((s.table,), count(s)) for s in statuses])
        counts = [(status.table, status.counts) for status in statuses]
        artifacts = [((t, "snapshot"), c.bases) for t, c in counts]
        artifacts += [((t, "diff"), c.diffs) for t, c in counts]
        uris = [((t, uri), n) for t, c in counts for uri, n in c.destination_errors.items()]
        sinks = [((t, sink), n) for t, c in counts for sink, n in c.event_errors.items()]
        yield _counter("artifacts_written", "Artifacts committed.", artifacts, "kind")
        yield _counter("destination_errors", "Failed writes.", uris, "dest")
        yield _counter("event_errors", "Failed deliveries of events.", sinks, "sink")
        total = self._writers.spark()
        for name, text in _SPARK.items():
            yield CounterMetricFamily(f"snapshotter_spark_{name}", text, value=getattr(total, name))


def _gauge(status: TableStatus, name: str) -> float | None:
    match name:
        case "diff_bytes":
            return status.last_diff.size_bytes if status.last_diff else None
        case "manifest_head_position":
            if status.manifest_head is None or status.position is None:
                return None
            return status.position - status.buffer_depth
        case "source_head_position":
            return float(LSN.rank(status.source_head)) if status.source_head else None
        case "up":
            return float(not status.state.is_final)
    value = getattr(status, name)
    return None if value is None else float(value)


def _counter(
    name: str, text: str, values: Iterable[tuple[tuple[str, ...], int]], *labels: str
) -> Metric:
    counter = CounterMetricFamily(f"snapshotter_{name}", text, labels=["table", *labels])
    for key, value in values:
        counter.add_metric(key, value)
    return counter


def render_metrics(writers: TableWriters) -> bytes:
    """Return all metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector(writers))
    return generate_latest(registry)
