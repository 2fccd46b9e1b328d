"""Exports the server's metrics by OTLP. Imported only if the environment asks for it.

Exports the same families, under the same names, as /metrics.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from time import time_ns
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

logger = logging.getLogger(__name__)

#: Milliseconds between exports unless the environment sets them; OpenTelemetry's default.
_INTERVAL: Final = "60000"
#: Seconds for which the last export may delay closing the store.
_LAST_EXPORT: Final = 2.0
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


class MetricsExport:
    """Collects metrics in the event loop, where they are counted, and sends them in a thread."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._exporter = OTLPMetricExporter()
        self._resource = Resource.create()
        self._started_at = time_ns()
        self._interval = int(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", _INTERVAL)) / 1000

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Export regularly while the context lasts, and once more at its end."""
        task = asyncio.create_task(self._export_regularly())
        try:
            yield
        finally:
            task.cancel()
            last = asyncio.create_task(self._export())
            await asyncio.wait({task, last}, timeout=_LAST_EXPORT)
            self._exporter.shutdown()

    async def _export_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._export()

    async def _export(self) -> None:
        result = await asyncio.to_thread(self._exporter.export, self.collect())
        if result is not MetricExportResult.SUCCESS:
            logger.warning("metrics could not be exported by OTLP")

    def collect(self) -> MetricsData:
        """Return the current metrics."""
        now = time_ns()
        families = [family for collector in self._collectors for family in collector.collect()]
        metrics = [_metric(family, self._started_at, now) for family in families]
        scope = ScopeMetrics(InstrumentationScope("streamfold"), metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])


def _metric(family: Family, started_at: int, now: int) -> Metric:
    data: Sum | Gauge | Histogram
    match family.type:
        case "histogram":
            data = Histogram(list(_histograms(family, started_at, now)), _CUMULATIVE)
        case "counter":
            points = list(_numbers(family, started_at, now))
            data = Sum(points, _CUMULATIVE, is_monotonic=True)
        case _:
            data = Gauge(list(_numbers(family, 0, now)))  # a gauge has no start
    return Metric(family.name, family.documentation, family.unit, data)


def _numbers(family: Family, started_at: int, now: int) -> Iterator[NumberDataPoint]:
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield NumberDataPoint(sample.labels, started_at, now, sample.value)


def _histograms(family: Family, started_at: int, now: int) -> Iterator[HistogramDataPoint]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
        groups.setdefault(labels, []).append(sample)
    for labels, samples in groups.items():
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        totals = [int(sample.value) for sample in buckets]
        counts = [total - before for before, total in zip([0, *totals], totals, strict=False)]
        [total] = [sample.value for sample in samples if sample.name.endswith("_sum")]
        bounds = [float(sample.labels["le"]) for sample in buckets[:-1]]
        yield HistogramDataPoint(
            dict(labels), started_at, now, totals[-1], total, counts, bounds,
            min=None, max=None,  # type: ignore[arg-type]  # nobody has kept them
        )  # fmt: skip
