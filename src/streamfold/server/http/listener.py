"""The listening socket, and granian on it: HTTP/1.1 and HTTP/2 on one port, TLS with ALPN.

granian's worker runs in a thread of its own and calls into the event loop that is running already,
which is the store's. `granian.server.embed` does the same; it is not used because it binds with
SO_REUSEPORT (two servers on one port would share its connections), does not report which port 0 became,
and replaces the logging configuration of the process. The parts below it that are used here
are not granian's public API, so its version is pinned to one minor.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from granian._granian import ASGIWorker, CallbackScheduler, SocketHolder, WorkerSignal
from granian.http import HTTP1Settings, HTTP2Settings

from streamfold.errors import InvalidError
from streamfold.server.http.accept_gate import AcceptGate
from streamfold.server.http.client_limits import ClientLimits
from streamfold.server.http.offload import OffloadPool
from streamfold.server.http.request import Request
from streamfold.server.http.response_limits import WRITE_DEADLINE

logger = logging.getLogger(__name__)

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
#: Bytes that an HTTP/1 connection buffers each way. The head of a request must fit.
BUFFER_MAX: Final = 32 << 10
#: Bytes that an answer over HTTP/2 may have in its connection's buffer for it to take more: as few as
#: possible, so that an answer whose end was taken has been written (`response_stream.MESSAGES_BELOW`).
SEND_BUFFER: Final = 1
#: Milliseconds between pings, which detect followers that vanished; seconds to answer one.
PING_INTERVAL: Final = 20_000
PING_TIMEOUT: Final = 20

Handler = Callable[[Request], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its key, as PEM files."""

    certificate: Path
    key: Path


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
        self._traffic = client_limits or ClientLimits()
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
            most, spare = self._traffic.connections.most, self._backlog + _STORAGE_SPARE
            self._gate = AcceptGate(self._socket.dup(), most, spare)
            self._gate.start()
        self._worker().serve_async(scheduler, loop, self._signal)
        self._traffic.connections.start(self.port)

    async def stop(self, max_wait: float) -> None:
        """Stop accepting, send GOAWAY, and wait until the connections are closed."""
        await self._traffic.connections.stop()
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
        proto, client_limits = watcher.proto, self._traffic
        request = Request(
            watcher.scope,
            proto.receive,
            proto.send,
            client_limits.request_budget,
            client_limits.unread,
            self._workers,
        )
        request.running = client_limits.connections.begin(request.connection)
        request.task = self._loop.create_task(self._answer(request, watcher))
        watcher.taskref(request.task)

    async def _answer(self, request: Request, watcher: Any) -> None:
        try:
            await self._handler(request)
        finally:
            request.finish()
            self._traffic.connections.end(request.connection)
            watcher.done()

    @property
    def _backlog(self) -> int:
        """Connections that wait to be accepted; all of these are, after the accept gate has closed."""
        most = self._traffic.connections.most
        return BACKLOG if self._tls is None else max(1, min(BACKLOG, most // 8))

    def _worker(self) -> Any:
        tls = self._tls
        new_worker: Any = ASGIWorker  # its stub is of an earlier version
        return new_worker(
            worker_id=1,
            sock=(None, _hand_over(self._socket, self._backlog)),
            ipc=None,
            backpressure=self._traffic.connections.most,
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
            f"cannot listen at {host} port {port}: {error.strerror}; choose another --port"
        ) from None
    return bound
