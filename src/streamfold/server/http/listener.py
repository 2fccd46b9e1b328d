"""The listening socket, and granian on it: HTTP/1.1 and HTTP/2 on one port, TLS with ALPN.

granian's worker runs in a thread of its own and calls into the event loop that is running already,
which is the store's. `granian.server.embed` does the same; it is not used because it binds with
SO_REUSEPORT (two servers on one port would share its connections), does not report which port 0
became, and replaces the logging configuration of the process. The parts below it that are used here
are not granian's public API, so its version is pinned to one minor.

granian counts a connection only after its TLS handshake (upstream defect 8). Handshakes that never
end could therefore take all descriptors, and once none is left, granian neither ends them nor
accepts others. So the kernel stops first: while too many descriptors are open, the listening socket
demands that packets are signed (RFC 2385) with a key that nobody has, and the kernel drops all others.
Clients send theirs again after a second, and connect once the key is gone. A packet filter would do
the same, but recent kernels reserve it for processes with CAP_NET_ADMIN.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from granian._granian import ASGIWorker, CallbackScheduler, SocketHolder, WorkerSignal
from granian.http import HTTP1Settings, HTTP2Settings

from streamfold.errors import InvalidError
from streamfold.server.http.connections import BUFFER_MAX, DESCRIPTORS, ClientLimits
from streamfold.server.http.offload import OffloadPool
from streamfold.server.http.request import Request
from streamfold.server.http.response_limits import WRITE_DEADLINE

logger = logging.getLogger(__name__)

if sys.platform != "win32":
    import resource


#: Connections per second that are assumed to come at most.
_ACCEPTED_PER_SECOND: Final = 50_000
#: Seconds between two counts: as long as these need to use up what is left, within these bounds.
_COUNT_INTERVAL: Final = (0.001, 0.1)

#: An option of Linux that Python has no name for: the key of all peers within a prefix, none if empty.
_TCP_MD5SIG_EXT: Final = 32
#: `struct tcp_md5sig`: family, address (after two fields that IPv6 alone has), the flag for a prefix,
#: its length, the length of the key, an interface, the key.
_SIGNATURE: Final = struct.Struct("=H6x16s104xBBHi80s")
_PREFIX: Final = 1
#: Every IPv6 address, and every IPv4 address as a socket for IPv6 names them.
_ANY_ADDRESS: Final = (bytes(16), bytes(10) + b"\xff\xff" + bytes(4))
#: Connections that wait to be accepted.
BACKLOG: Final = 1024
#: Descriptors for storage beside those for connections that wait, once all others are taken.
_STORAGE_SPARE: Final = 16
#: Requests at once on one HTTP/2 connection; official clients open another when they need more.
STREAMS_MAX: Final = 128
#: Bytes that a client may send ahead of what was read: of one request, and of a connection.
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 4 << 20
#: Bytes of an HTTP/2 frame that a client may send: each is one trip between threads.
FRAME_MAX: Final = 256 << 10
#: Bytes of all headers of a request.
HEADERS_MAX: Final = 64 << 10
#: Bytes that an answer over HTTP/2 may have in its connection's buffer for it to take more: as few as
#: possible, so that an answer whose end was taken has been written (`response_stream.MESSAGES_BELOW`).
SEND_BUFFER: Final = 1
#: Milliseconds between pings, which detect followers that vanished; seconds to answer one.
PING_INTERVAL: Final = 20_000
PING_TIMEOUT: Final = 20
Handler = Callable[[Request], Awaitable[None]]


class AcceptGate:
    """Keeps new connections out while the process has `most` more descriptors open than at the start.

    It counts in a thread, since the event loop may be busy for longer than an attack takes. If an
    attack takes all descriptors nevertheless, the gate releases `spare` ones that it kept. They must
    suffice for all connections that wait to be accepted: only then granian looks at its handshakes.

    On systems other than Linux it does nothing.
    """

    def __init__(self, listening: socket.socket, most: int, spare: int) -> None:
        self._socket = listening
        self._most = most
        self._spare_count = spare
        self._spare: list[int] = []
        self._closed = False
        self._stopping = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        if sys.platform == "linux":
            self._thread = Thread(target=self._run, name="accept-gate", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop counting, and close the socket."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        most = _count_descriptors(0) + self._most
        pause, failing = 0.0, False
        while not self._stopping.wait(pause):
            try:
                pause = self._adjust(most)
                failing = False
            except Exception:
                # Without this thread nothing bounds handshakes, so it survives any failure.
                if not failing:
                    logger.exception("cannot count the connections that are accepted; retrying")
                pause, failing = _COUNT_INTERVAL[1], True
        self._give_spare()

    def _adjust(self, most: int) -> float:
        """Open or close the gate; returns the seconds until the next count."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        count = _count_descriptors(limit)
        used = count - len(self._spare)
        # There must be room for the spare ones, too: those that were released are taken back first.
        closed = used >= min(most, limit - self._spare_count)
        if count >= limit:
            self._give_spare()
        elif not closed:
            self._take_spare()
        if closed != self._closed:
            self._demand_signatures(os.urandom(16) if closed else b"")
            self._closed = closed
        shortest, longest = _COUNT_INTERVAL
        return max(shortest, min(longest, (limit - count) / _ACCEPTED_PER_SECOND))

    def _take_spare(self) -> None:
        while len(self._spare) < self._spare_count:
            self._spare.append(os.dup(self._socket.fileno()))

    def _give_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

    def _demand_signatures(self, key: bytes) -> None:
        """Have the kernel drop packets of new clients that are not signed with this key, if any."""
        family = self._socket.family
        for address in _ANY_ADDRESS if family == socket.AF_INET6 else _ANY_ADDRESS[:1]:
            option = _SIGNATURE.pack(family, address, _PREFIX, 0, len(key), 0, key)
            self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, option)


def _count_descriptors(most: int) -> int:
    """How many descriptors the process has open; `most` if it has none left to count them with."""
    # Linux has the number here from 6.2 on, and 0 before.
    if count := os.stat(DESCRIPTORS).st_size:  # noqa: PTH116 - many times per second
        return count
    try:
        return len(os.listdir(DESCRIPTORS))  # noqa: PTH208 - likewise
    except OSError:
        return most


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise InvalidError unless a server can use them: granian would end the process."""
        try:
            # Without a password, Python would ask for one on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.key, password=""
            )
        except (ssl.SSLError, OSError) as error:
            raise InvalidError(
                f"the certificate {self.certificate} and the key {self.key} cannot be used: "
                f"{error.strerror or error}. Give PEM files of a chain, the server's own certificate "
                "first, and of its key without a password"
            ) from None


class Listener:
    """Calls a handler for every request, in the running event loop, until it is stopped."""

    def __init__(
        self,
        bound: socket.socket,
        handler: Handler,
        tls: TlsFiles | None = None,
        client_limits: ClientLimits | None = None,
    ) -> None:
        self.port: int = bound.getsockname()[1]
        self._socket = bound
        self._handler = handler
        self._tls = tls
        self._client_limits = client_limits or ClientLimits()
        self._workers = OffloadPool()
        self._signal = WorkerSignal()
        self._stopped = asyncio.Event()
        self._gate: AcceptGate | None = None

    def start(self) -> None:
        """Listen; connections are accepted from here on."""
        self._loop = loop = asyncio.get_running_loop()
        self._signal.add_cb(lambda: loop.call_soon_threadsafe(self._stopped.set))
        # The last three are for tasks that granian runs itself, which it does not here.
        scheduler = _Scheduler(loop, self._begin, None, None, None)
        if self._tls is not None:
            most, spare = self._client_limits.connections.most, self._backlog + _STORAGE_SPARE
            self._gate = AcceptGate(self._socket.dup(), most, spare)
            self._gate.start()
        self._worker().serve_async(scheduler, loop, self._signal)
        self._client_limits.connections.start(self.port)

    async def stop(self, max_wait: float) -> None:
        """Stop accepting, send GOAWAY, and wait until the connections are closed."""
        await self._client_limits.connections.stop()
        if self._gate is not None:
            self._gate.stop()
        self._signal.set()
        try:
            async with asyncio.timeout(max_wait):
                await self._stopped.wait()
        except TimeoutError:
            logger.warning("connections are still open after %.1f s: leaving them", max_wait)
        self._workers.close()

    def _begin(self, watcher: Any) -> None:
        """Start a task for a request; granian keeps it alive."""
        proto, client_limits = watcher.proto, self._client_limits
        request = Request(
            watcher.scope,
            proto.receive,
            proto.send,
            client_limits.request_budget,
            client_limits.unread,
            self._workers,
        )
        running = client_limits.connections.begin(request.connection, large=request.large)
        if request.declared_size and not running.large:
            request.ask_for_body()
        request.running = running
        request.task = self._loop.create_task(self._answer(request, watcher))
        watcher.taskref(request.task)

    async def _answer(self, request: Request, watcher: Any) -> None:
        try:
            await self._handler(request)
        finally:
            request.finish()
            self._client_limits.connections.end(request.connection, large=request.large)
            watcher.done()

    @property
    def _backlog(self) -> int:
        """Connections that wait to be accepted; all of these are, after the accept gate has closed."""
        most = self._client_limits.connections.most
        return BACKLOG if self._tls is None else max(1, min(BACKLOG, most // 8))

    def _worker(self) -> Any:
        tls = self._tls
        new_worker: Any = ASGIWorker  # its stub is of an earlier version
        return new_worker(
            worker_id=1,
            sock=(None, _hand_over(self._socket, self._backlog)),
            ipc=None,
            backpressure=self._client_limits.connections.most,
            http_mode="auto",
            http1_opts=HTTP1Settings(max_buffer_size=BUFFER_MAX),
            http2_opts=HTTP2Settings(
                initial_connection_window_size=CONNECTION_WINDOW,
                initial_stream_window_size=STREAM_WINDOW,
                keep_alive_interval=PING_INTERVAL,
                keep_alive_timeout=PING_TIMEOUT,
                max_concurrent_streams=STREAMS_MAX,
                max_frame_size=FRAME_MAX,
                max_headers_size=HEADERS_MAX,
                max_send_buffer_size=SEND_BUFFER,
            ),
            ssl_enabled=tls is not None,
            ssl_cert=str(tls.certificate.resolve()) if tls else None,
            ssl_key=str(tls.key.resolve()) if tls else None,
            ssl_protocol_min="tls1.2",
        )


class _Scheduler(CallbackScheduler):
    """What granian's thread calls for every request: it has the event loop call `begin`.

    Like granian's own, but with the task known to the request from the start, and the loop is called
    once for all requests that arrive before it answers.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, begin: Callable[[Any], None], *_: object
    ) -> None:
        super().__init__()
        context = self._ctx  # one for all: copying one for each would cost more than the call
        waiting: deque[Any] = deque()
        called = False

        def begin_all() -> None:
            nonlocal called
            # First: a request that arrives from now on calls again, perhaps once too often,
            # so that none is left behind.
            called = False
            try:
                for _ in range(len(waiting)):
                    begin(waiting.popleft())
            finally:
                if waiting and not called:
                    loop.call_soon(begin_all, context=context)

        def schedule(watcher: Any) -> None:
            nonlocal called
            waiting.append(watcher)
            if not called:
                called = True
                loop.call_soon_threadsafe(begin_all, context=context)

        self._schedule_fn = schedule


def _hand_over(bound: socket.socket, backlog: int) -> Any:
    """The socket as granian takes it; it owns the socket from here on, and closes it."""
    new_holder: Any = SocketHolder
    bound.listen(backlog)
    if sys.platform.startswith(("linux", "freebsd")):
        return new_holder(bound.detach(), False, backlog)
    return new_holder(bound.detach(), False)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address alone; port 0 takes any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: an ack must not wait for the ack of TCP.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # Closes a connection whose client acknowledges nothing, even if this side never reads.
            bound.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(WRITE_DEADLINE * 1000)
            )
        bound.bind((host, port))
        bound.listen(BACKLOG)  # only this reveals whether another process listens here
    except OSError as error:
        bound.close()
        raise InvalidError(
            f"cannot listen at {host} port {port}: {error.strerror}; stop the program that listens "
            "there, or choose another --port"
        ) from None
    return bound
