"""Limits that all clients share: connections, and how long one may stay without a request."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget

logger = logging.getLogger(__name__)

if sys.platform != "win32":
    import resource


#: Connections at once; further ones wait. A follower needs one, and each costs a few KiB when idle.
CONNECTIONS_MAX: Final = 16_384
#: Bytes that an HTTP/1 connection buffers each way. The head of a request must fit.
BUFFER_MAX: Final = 64 << 10
#: Part of the memory that the buffers of all connections may take.
_BUFFERS_PART: Final = 2
#: Descriptors that are kept back for storage, logs and webhooks: a quarter of all, within bounds.
_KEPT_BACK: Final = (64, 1024)
#: Part of these that uploads may hold: most are for the store's own files.
_UPLOADS_PART: Final = 4
#: Descriptors to request where the system sets no limit.
_DESCRIPTORS_MAX: Final = 1 << 20
#: Seconds that a new connection has to send the head of its first request.
FIRST_REQUEST: Final = 15.0
#: Seconds that a connection may stay without a request. Longer than clients keep theirs for reuse,
#: so that none is closed just when its client sends.
IDLE: Final = 120.0
#: Fraction of the connections above which both times shrink to a tenth, so that new clients get in.
CROWDED: Final = 0.9


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit."""
    if sys.platform == "win32":
        return _DESCRIPTORS_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of %d open files cannot be raised: %s", soft, error)
        else:
            return target
    return min(soft, target) if soft != resource.RLIM_INFINITY else target


def connections_max(descriptors: int, memory: int) -> int:
    """How many connections a process may have with so many descriptors and bytes of memory."""
    free = descriptors - _kept_back(descriptors)
    buffered = memory // _BUFFERS_PART // (2 * BUFFER_MAX)
    return max(1, min(CONNECTIONS_MAX, buffered, free))


def upload_files_max(descriptors: int) -> int:
    """How many files uploads may keep open in a process that can open so many descriptors."""
    return _kept_back(descriptors) // _UPLOADS_PART


def _kept_back(descriptors: int) -> int:
    least, most = _KEPT_BACK
    return max(least, min(most, descriptors // 4))


class Connection:
    """A connection that is open, or has requests under way."""

    __slots__ = ("_cut", "address", "client", "id", "port", "requests")

    def __init__(self, id_: int, address: str, port: int, cut: Callable[[int], None]) -> None:
        self.id = id_
        #: Where the other end is.
        self.address = address
        self.port = port
        #: Whose connection it is (`client_of`).
        self.client = client_of(address)
        #: Requests under way.
        self.requests = 0
        self._cut = cut

    def cut(self) -> None:
        """Close it, whatever it is doing."""
        self._cut(self.id)


class Running(msgspec.Struct, frozen=True, gc=False):
    """Numbers of requests under way, including the one that just arrived."""

    on_connection: int
    of_client: int


class Connections:
    """The open connections, and the requests under way of each client.

    The door closes connections without a request: new ones soon, others later, both sooner if crowded.
    Silence never closes a connection with a request under way: sessions may be silent.
    """

    def __init__(
        self,
        most: int = CONNECTIONS_MAX,
        first_request: float = FIRST_REQUEST,
        idle: float = IDLE,
    ) -> None:
        self.most = most
        self.first_request = first_request
        self.idle = idle
        #: Connections that were closed because they were silent.
        self.closed = 0
        self.by_id: dict[int, Connection] = {}
        #: Requests under way of each client that has any.
        self._of_client: dict[str, int] = {}

    def open(self, id_: int, address: str, port: int, cut: Callable[[int], None]) -> Connection:
        """Count a connection that was accepted; `cut` closes the one with an id."""
        connection = self.by_id[id_] = Connection(id_, address, port, cut)
        return connection

    def close(self, id_: int, *, silent: bool) -> None:
        """Forget a connection that was closed; `silent` if the door did that."""
        del self.by_id[id_]
        self.closed += silent

    def begin(self, connection: Connection) -> Running:
        """Count a request."""
        connection.requests += 1
        client = connection.client
        of_client = self._of_client[client] = self._of_client.get(client, 0) + 1
        return Running(connection.requests, of_client)

    def end(self, connection: Connection) -> None:
        connection.requests -= 1
        left = self._of_client[connection.client] - 1
        if left:
            self._of_client[connection.client] = left
        else:
            del self._of_client[connection.client]


@lru_cache(CONNECTIONS_MAX)
def client_of(address: str) -> str:
    """What the addresses of one client have in common: all of IPv4, and the first half of IPv6."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    # A socket for both versions sees clients over IPv4 with addresses that begin with ::ffff:.
    return str(parsed.ipv4_mapped or parsed.packed[:8])


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


class ClientMetrics(Collector):
    """Metrics of the limits: what is in use, what is allowed, and which clients were cut off."""

    def __init__(self, client_limits: ClientLimits) -> None:
        self._client_limits = client_limits

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        client_limits = self._client_limits
        connections, response_budget = client_limits.connections, client_limits.unread
        bodies, files = client_limits.request_budget.room, client_limits.request_budget.files
        for name, text, value in (
            ("connections", "Connections that are open", len(connections.by_id)),
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
