"""The limits that all clients of a server share: connections, and bytes in and out."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from streamfold.server.http.connections import Connections
from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.http.response_stream import ResponseStream


class ClientLimits:
    """The limits of one server."""

    def __init__(
        self,
        request_budget: RequestBudget | None = None,
        connections: Connections | None = None,
        response_budget: ResponseBudget | None = None,
    ) -> None:
        self.request_budget = request_budget or RequestBudget()
        self.connections = connections or Connections()
        self.unread = response_budget or ResponseBudget()
        self.unread.on_cut_off = self._disconnect

    def _disconnect(self, answer: ResponseStream) -> None:
        """Close the connection of a client that does not take its answer.

        Also over HTTP/2: ending the answer alone would leave granian holding its bytes.
        """
        self.connections.cut(answer.request.connection)


class ClientMetrics(Collector):
    """Metrics of the limits: what is in use, what is allowed, and which clients were cut off."""

    def __init__(self, client_limits: ClientLimits) -> None:
        self._traffic = client_limits

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        client_limits = self._traffic
        connections, response_budget = client_limits.connections, client_limits.unread
        bodies, files = client_limits.request_budget.room, client_limits.request_budget.files
        for name, text, value in (
            ("connections", "Connections that are open", connections.open),
            ("connections_max", "Connections that may be open", connections.most),
            (
                "unread_bytes",
                "Bytes held for clients that have not read them",
                response_budget.room.used,
            ),
            (
                "unread_bytes_max",
                "Bytes that may be held for clients",
                response_budget.room.capacity,
            ),
            ("unread_waiting", "Answers that wait for memory", response_budget.room.waiting),
            ("body_bytes", "Bytes reserved for bodies of requests", bodies.used),
            ("body_bytes_max", "Bytes that may be reserved for bodies", bodies.capacity),
            ("upload_files", "Files that uploads keep open", files.used),
            ("upload_files_max", "Files that uploads may keep open", files.capacity),
        ):
            yield GaugeMetricFamily(f"streamfold_{name}", text, value)
        cut_off = CounterMetricFamily(
            "streamfold_cut_off", "Clients that were cut off", labels=("reason",)
        )
        for reason, count in (
            ("silent_connection", connections.closed),
            ("unread_answer", response_budget.cut_off),
            ("slow_body", client_limits.request_budget.cut_off),
        ):
            cut_off.add_metric((reason,), count)
        yield cut_off
