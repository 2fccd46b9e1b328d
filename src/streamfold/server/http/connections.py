"""Limits that all clients share: connections, and how long one may stay without a request.

granian does not report its connections (upstream defect 9), so on Linux the process scans its own
sockets in `/proc/self/fd`. On other systems the number is capped as well, but silent connections
stay.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address
from threading import Lock
from time import monotonic, perf_counter
from typing import Final, NamedTuple, TypeAlias

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.http.response_stream import ResponseStream

logger = logging.getLogger(__name__)

if sys.platform != "win32":
    import resource


#: Connections at once; further ones wait. A follower needs one, and each costs a few KiB when idle.
CONNECTIONS_MAX: Final = 16_384
#: Bytes that an HTTP/1 connection buffers each way. The head of a request must fit. Each buffer of a
#: body is one trip between threads: with half of this, a session of large batches takes 0.6 to 0.9 of
#: what it takes now.
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
_CROWDED: Final = 0.9
#: Seconds between two scans, and the least multiple of a scan's own duration between two.
_LOOK_INTERVAL: Final = 1.0
_LOOK_SHARE: Final = 20

#: Where Linux lists the descriptors of this process.
DESCRIPTORS: Final = "/proc/self/fd"

#: Address and port of a client, both as text, as granian reports them.
Peer: TypeAlias = tuple[str, str]


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns the limit."""
    if sys.platform == "win32":
        return _DESCRIPTORS_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of %d open files cannot be raised: %s", soft, error)
        else:
            return wanted
    return min(soft, wanted) if soft != resource.RLIM_INFINITY else wanted


def connections_max(descriptors: int, memory: int, *, tls: bool = False) -> int:
    """How many connections a process may have with so many descriptors and bytes of memory.

    Half of the descriptors with TLS: the rest is for what is accepted before the accept gate closes.
    """
    free = descriptors - _kept_back(descriptors)
    buffered = memory // _BUFFERS_PART // (2 * BUFFER_MAX)
    return max(1, min(CONNECTIONS_MAX, buffered, free // 2 if tls else free))


def upload_files_max(descriptors: int) -> int:
    """How many files uploads may keep open in a process that can open so many descriptors."""
    return _kept_back(descriptors) // _UPLOADS_PART


def _kept_back(descriptors: int) -> int:
    least, most = _KEPT_BACK
    return max(least, min(most, descriptors // 4))


class _Socket(NamedTuple):
    """A connection as the process sees it; a later one of the same peer has another inode."""

    descriptor: int
    inode: str
    peer: Peer


@dataclass(slots=True)
class _Usage:
    #: Whose connection it is (`client_of`).
    client: str
    #: Requests under way, and those of them with large bodies.
    requests: int = 0
    large: int = 0
    #: When the last one ended.
    idle_since: float = 0.0


class Running(msgspec.Struct, frozen=True, gc=False):
    """Numbers of requests under way, including the one that just arrived."""

    on_connection: int
    of_client: int
    #: Those on the connection with large bodies.
    large: int


class Connections:
    """Closes connections without a request: new ones soon, others later, both sooner if crowded.

    Silence never closes a connection with a request under way: sessions may be silent.
    """

    def __init__(
        self,
        most: int = CONNECTIONS_MAX,
        first_request: float = FIRST_REQUEST,
        idle: float = IDLE,
    ) -> None:
        self.most = most
        #: Connections at the last scan, and how many were closed so far because they were silent.
        self.open = 0
        self.closed = 0
        self._first_request = first_request
        self._idle = idle
        self._usage: dict[Peer, _Usage] = {}
        #: Requests under way of each client that has any.
        self._of_client: dict[str, int] = {}
        self._first_seen: dict[tuple[str, Peer], float] = {}
        self._to_cut: set[Peer] = set()
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._cutter: _Cutter | None = None

    def begin(self, peer: Peer, *, large: bool) -> Running:
        """Count a request on the connection of `peer`; `large` if its body is."""
        usage = self._usage.get(peer)
        if usage is None:
            usage = self._usage[peer] = _Usage(client_of(peer[0]))
        usage.requests += 1
        if large:
            usage.large += 1
        client = usage.client
        of_client = self._of_client[client] = self._of_client.get(client, 0) + 1
        return Running(usage.requests, of_client, usage.large)

    def end(self, peer: Peer, *, large: bool) -> None:
        usage = self._usage[peer]
        if large:
            usage.large -= 1
        left = self._of_client[usage.client] - 1
        if left:
            self._of_client[usage.client] = left
        else:
            del self._of_client[usage.client]
        usage.requests -= 1
        if not usage.requests:
            usage.idle_since = monotonic()

    def cut(self, peer: Peer) -> None:
        """Close the connection of `peer`, whatever it is doing."""
        self._to_cut.add(peer)
        self._wake.set()

    def start(self, port: int) -> None:
        """Watch the connections to `port` from now on."""
        if sys.platform == "linux":
            self._cutter = _Cutter(port)
            self._looking = asyncio.create_task(self._keep_looking(port, self._cutter))

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._cutter is not None:
            self._cutter.close()

    async def _keep_looking(self, port: int, cutter: _Cutter) -> None:
        failing = False
        while True:
            began = perf_counter()
            try:
                await self._look(port, cutter)
                failing = False
            except Exception:
                # Without this task nothing bounds the connections, so it survives any failure.
                if not failing:
                    logger.exception("cannot scan the connections to port %d; retrying", port)
                failing = True
            pause = max(_LOOK_INTERVAL, (perf_counter() - began) * _LOOK_SHARE)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _look(self, port: int, cutter: _Cutter) -> None:
        started = monotonic()
        sockets = await asyncio.to_thread(_sockets, port)
        victims, silent = self._choose(sockets, started)
        self.closed += silent
        if victims:
            await asyncio.to_thread(cutter.cut, victims)

    def _choose(self, sockets: list[_Socket], started: float) -> tuple[list[_Socket], int]:
        """The sockets to close, and the number of those that are silent."""
        self.open = len(sockets)
        self._forget(sockets, started)
        share = 0.1 if len(sockets) >= self.most * _CROWDED else 1.0
        to_cut, self._to_cut = self._to_cut, set()
        named = [one for one in sockets if one.peer in to_cut]
        silent = [
            one
            for one in sockets
            if one.peer not in to_cut and self._is_silent(one, started, share)
        ]
        return named + silent, len(silent)

    def _is_silent(self, one: _Socket, now: float, share: float) -> bool:
        usage = self._usage.get(one.peer)
        if usage is None:
            return now - self._first_seen[one.inode, one.peer] > self._first_request * share
        return not usage.requests and now - usage.idle_since > self._idle * share

    def _forget(self, sockets: list[_Socket], now: float) -> None:
        """Forget connections, except open ones and those that arrived since the scan began."""
        seen = self._first_seen
        self._first_seen = {
            (one.inode, one.peer): seen.get((one.inode, one.peer), now) for one in sockets
        }
        peers = {one.peer for one in sockets}
        gone = [
            peer
            for peer, usage in self._usage.items()
            if peer not in peers and not usage.requests and usage.idle_since < now
        ]
        for peer in gone:
            del self._usage[peer]


@lru_cache(CONNECTIONS_MAX)
def client_of(address: str) -> str:
    """What the addresses of one client have in common: all of IPv4, and the first half of IPv6."""
    if ":" not in address:
        return address
    parsed = IPv6Address(address)
    # A socket for both versions sees clients over IPv4 with addresses that begin with ::ffff:.
    return str(parsed.ipv4_mapped or parsed.packed[:8])


def _sockets(port: int) -> list[_Socket]:
    """The connections that clients have to `port`."""
    return [one for number in _descriptors() if (one := _look_at(number, port)) is not None]


def _descriptors() -> Iterable[int]:
    """The descriptors that are open, or that may be when none is left to list them with."""
    try:
        return [int(name) for name in os.listdir(DESCRIPTORS)]  # noqa: PTH208 - names alone
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return range(min(_DESCRIPTORS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _look_at(descriptor: int, port: int) -> _Socket | None:
    """The connection behind a descriptor, if any; the descriptor may close or change any time."""
    try:
        inode = os.readlink(f"{DESCRIPTORS}/{descriptor}")  # noqa: PTH115 - many, and quickly
        if not inode.startswith("socket:"):
            return None
        # Without a family the constructor would query it; these two calls do not need it.
        one = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return None
    try:
        if one.getsockname()[1] != port:
            return None
        host, its_port = one.getpeername()[:2]
        return _Socket(descriptor, inode, (host, str(its_port)))
    except (OSError, IndexError):
        return None
    finally:
        one.detach()


class _Cutter:
    """Shuts connections down, so that granian closes them, even when no descriptor is left.

    It opens the descriptors that it needs in advance. `close` may come from another thread than `cut`.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._copy = os.dup(self._null)
        self._lock = Lock()
        self._closed = False

    def cut(self, victims: list[_Socket]) -> None:
        with self._lock:
            if self._closed:
                return
            for victim in victims:
                try:
                    self._shut_down(victim)
                except OSError as error:
                    logger.debug("a connection was gone before it was closed: %s", error)
            os.dup2(self._null, self._copy, inheritable=False)

    def _shut_down(self, victim: _Socket) -> None:
        # The copy stays the same connection even if the original descriptor is reused.
        os.dup2(victim.descriptor, self._copy, inheritable=False)
        if _look_at(self._copy, self._port) == victim._replace(descriptor=self._copy):
            one = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=self._copy)
            try:
                one.shutdown(socket.SHUT_RDWR)
            finally:
                one.detach()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._null)
            os.close(self._copy)


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
        self._client_limits = client_limits

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        client_limits = self._client_limits
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
