"""What the server measures of its storage."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from streamfold.store.store import StreamStore


class StoreInstruments(Collector):
    """Storage as the store sees it: the room that is left."""

    def __init__(self, store: StreamStore) -> None:
        self._space = store.space

    def collect(self) -> Iterator[Metric]:
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
