"""An ingester's progress, also as Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric


@dataclass(slots=True)
class IngestTableProgress:
    """Progress of one table."""

    #: waiting, copying or following.
    state: str = "waiting"
    #: For the first copy. The estimate comes from the database and is -1 if unknown.
    rows_copied: int = 0
    rows_estimated: int = -1
    bytes_copied: int = 0
    #: When this process began to copy, in Unix seconds, and the rows that the stream already had.
    copy_began: float = 0.0
    copy_resumed_at: int = 0
    #: Changes since the process started.
    changes: int = 0

    def rows_per_second(self, now: float) -> float:
        return (self.rows_copied - self.copy_resumed_at) / max(now - self.copy_began, 1e-3)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the copy is complete, or None if unknown."""
        rate, left = self.rows_per_second(now), self.rows_estimated - self.rows_copied
        return left / rate if rate > 0 and left >= 0 else None


@dataclass(slots=True)
class IngestProgress:
    """Progress of an ingester."""

    #: starting, copying, following or retrying.
    state: str = "starting"
    tables: dict[str, IngestTableProgress] = field(default_factory=dict)
    #: Position last confirmed to the database.
    confirmed: str = "0/0"
    #: Unix seconds of the newest commit in the streams.
    committed_at: float = 0.0
    #: When the streams last had everything that the database had sent, in Unix seconds.
    caught_up_at: float = field(default_factory=time.time)
    #: Bytes of the database's log that are not confirmed, and that it retains for this ingester.
    lag_bytes: int = 0
    retained_bytes: int = 0
    sessions: int = 0
    #: Sessions that failed and were restarted.
    failures: int = 0
    last_error: str = ""


class ProgressCollector:
    """Collects the metrics of one ingester, for a registry of prometheus_client."""

    def __init__(self, progress: IngestProgress) -> None:
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        progress, label = self._progress, ["table"]
        rows = CounterMetricFamily(
            "streamfold_ingest_rows_copied", "Rows of the first copy.", labels=label
        )
        changes = CounterMetricFamily(
            "streamfold_ingest_changes", "Changes appended by this process.", labels=label
        )
        for name, table in progress.tables.items():
            rows.add_metric([name], table.rows_copied)
            changes.add_metric([name], table.changes)
        yield from (rows, changes)
        yield CounterMetricFamily(
            "streamfold_ingest_sessions",
            "Connections begun: more than one after a failure.",
            value=progress.sessions,
        )
        yield CounterMetricFamily(
            "streamfold_ingest_failures",
            "Connections that failed; the ingester began another.",
            value=progress.failures,
        )
        gauges = {
            "following": ("1 while changes are followed.", progress.state == "following"),
            "lag_bytes": ("Log of the database that is not confirmed.", progress.lag_bytes),
            "lag_seconds": (
                "Seconds since the streams had everything that was sent.",
                max(0.0, time.time() - progress.caught_up_at),
            ),
            "retained_bytes": (
                "Log that the database keeps for the slot.",
                progress.retained_bytes,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"streamfold_ingest_{name}", text, value=float(value))


def serve_metrics(progress: IngestProgress, port: int) -> None:
    """Serve the metrics over HTTP on all addresses, in a thread, until the process ends."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(ProgressCollector(progress))
    start_http_server(port, registry=registry)
