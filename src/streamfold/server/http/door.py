"""The door: HTTP/1.1 and HTTP/2 on one port, TLS with ALPN, by `native/src/door`.

A thread of the native part runs all connections. It queues requests, pieces of their bodies, and news
of answers and connections, and wakes the event loop once for all of them. What the server answers is
queued as well, and handed over once per iteration of the loop. So nothing that clients do, and no
number of them, costs more than that.

The native part decides nothing: it obeys the numbers below, and those of `connections.Connections`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamfold._native import Door
from streamfold.errors import InvalidError
from streamfold.server.http.connections import BUFFER_MAX, CROWDED, ClientLimits, Connection
from streamfold.server.http.exchange import Buffer
from streamfold.server.http.headers import Headers
from streamfold.server.http.offload import OffloadPool
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request import Request
from streamfold.server.http.response_limits import WRITE_DEADLINE

logger = logging.getLogger(__name__)

#: Connections that wait to be accepted.
BACKLOG: Final = 1024
#: Requests at once on one HTTP/2 connection; official clients open another when they need more.
STREAMS_MAX: Final = 128
#: Bytes that a client may send ahead of what was read: of one request, and of a connection.
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 4 << 20
#: Bytes of an HTTP/2 frame that a client may send.
FRAME_MAX: Final = 256 << 10
#: Bytes of all headers of a request.
HEADERS_MAX: Final = 64 << 10
#: Seconds between pings, which detect followers that vanished, and to answer one.
PING_INTERVAL: Final = 20.0
PING_TIMEOUT: Final = 20.0
#: Declared bytes up to which a body arrives with its head: most appends. Each further piece is a trip
#: between threads, and appends of one connection must not overtake each other on it.
WHOLE_BODY: Final = 64 << 10
#: Seconds that such a body may take. A request whose body is late arrives without it, so that it can be
#: refused, and judged by its pace.
PROMPT: Final = 0.02
#: Bytes of bodies that may wait for the event loop; further ones arrive in pieces, when they are read.
WAITING_BODIES: Final = 32 << 20
#: Bytes of a body that are requested ahead of what was read.
_READ_AHEAD: Final = 256 << 10

Handler = Callable[[Request], Awaitable[None]]

#: The kinds of events, as native/src/door/python.rs numbers them.
_REQUEST, _PIECE, _BODY_END, _GONE, _TAKEN, _OPENED, _CLOSED, _STOPPED = range(8)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise InvalidError unless a server can use them."""
        try:
            # Without a password, Python would ask for one on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certificate, self.key, password=""
            )
        except (ssl.SSLError, OSError) as error:
            raise self.refusal(error.strerror or str(error)) from None

    def refusal(self, reason: str) -> InvalidError:
        return InvalidError(
            f"the certificate {self.certificate} and the key {self.key} cannot be used: "
            f"{reason}. Give PEM files of a chain, the server's own certificate "
            "first, and of its key without a password"
        )


@dataclass(frozen=True, slots=True)
class _Limits:
    """The numbers that the native part obeys, by the names that it reads."""

    connections: int
    first_request: float
    idle: float
    crowded: float = CROWDED
    buffer: int = BUFFER_MAX
    headers: int = HEADERS_MAX
    streams: int = STREAMS_MAX
    stream_window: int = STREAM_WINDOW
    connection_window: int = CONNECTION_WINDOW
    frame: int = FRAME_MAX
    ping_interval: float = PING_INTERVAL
    ping_timeout: float = PING_TIMEOUT
    whole_body: int = WHOLE_BODY
    prompt: float = PROMPT
    waiting_bodies: int = WAITING_BODIES


class DoorExchange:
    """An `Exchange` that came through the door."""

    __slots__ = (
        "_door",
        "_gone",
        "_handed",
        "_id",
        "_over",
        "_pieces",
        "_read_ahead",
        "_reader",
        "_taker",
        "body",
        "connection",
        "headers",
        "http_version",
        "method",
        "raw_path",
        "raw_query",
        "repeated",
        "scheme",
    )

    def __init__(
        self,
        door: OpenDoor,
        id_: int,
        connection: Connection,
        method: str,
        raw_path: bytes,
        raw_query: bytes,
        http_version: str,
        headers: Mapping[bytes, bytes],
        repeated: Collection[bytes],
        body: bytes | None,
    ) -> None:
        self._door = door
        self._id = id_
        self.connection = connection
        self.method = method
        self.scheme = door.scheme
        self.raw_path = raw_path
        self.raw_query = raw_query
        self.http_version = http_version
        self.headers = headers
        self.repeated = repeated
        self.body = body
        #: Pieces that nobody has read yet; an empty one is the end, None that the body broke off.
        self._pieces: deque[bytes | None] = deque()
        #: Bytes that were requested and have not come.
        self._read_ahead = 0
        self._reader: asyncio.Future[None] | None = None
        #: Done once the client has hung up; None until somebody asks.
        self._gone: asyncio.Future[None] | None = None
        #: Bytes of the answer that were handed over.
        self._handed = 0
        self._taker: asyncio.Future[None] | None = None
        #: Whether the door has forgotten the request.
        self._over = False

    async def piece(self) -> bytes:
        if self._read_ahead < _READ_AHEAD // 2:
            self._door.ask(self._id, _READ_AHEAD - self._read_ahead)
            self._read_ahead = _READ_AHEAD
        while not self._pieces:
            self._reader = self._door.loop.create_future()
            await self._reader
        piece = self._pieces[0]
        if piece is None:
            raise ClientHangupError("the client hung up before the end of its request")
        if piece:
            self._pieces.popleft()
            self._read_ahead = max(0, self._read_ahead - len(piece))
        return piece

    def discard_body(self) -> None:
        self._door.discard_body(self._id)

    async def gone(self) -> None:
        if self._gone is None:
            self._gone = self._door.loop.create_future()
            if None in self._pieces:
                self._gone.set_result(None)
        await asyncio.shield(self._gone)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._door.respond(self._id, status, headers, body)
        self._forget()

    def start(self, status: int, headers: Headers) -> None:
        self._door.start_answer(self._id, status, headers)

    def send(self, data: Buffer) -> None:
        self._handed += len(data)
        self._door.send(self._id, data if isinstance(data, bytes) else bytes(data))

    def end(self) -> None:
        self._door.end(self._id)

    @property
    def delivered(self) -> int:
        return self._door.delivered(self._id)

    async def unread(self, at_most: int) -> None:
        if self._handed - self.delivered <= at_most:
            return
        self._taker = self._door.loop.create_future()
        self._door.watch(self._id, at_most)
        await self._taker

    def close(self) -> None:
        if not self._over:
            self._door.close_exchange(self._id)
            self._forget()

    def _forget(self) -> None:
        self._over = True
        self._door.forget(self._id)

    # What the door reports

    def on_piece(self, data: bytes | None) -> None:
        """A piece of the body came, or its end, or it broke off."""
        self._pieces.append(data)
        _resolve(self._reader)

    def on_gone(self) -> None:
        self.on_piece(None)
        _resolve(self._gone)

    def on_taken(self) -> None:
        _resolve(self._taker)


def _resolve(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class OpenDoor:
    """Calls a handler for every request, in the running event loop, until it is stopped."""

    def __init__(
        self,
        door: Door,
        handler: Handler,
        tls: TlsFiles | None = None,
        client_limits: ClientLimits | None = None,
    ) -> None:
        self.port = door.port
        self.scheme = "http" if tls is None else "https"
        self._native = door
        self._handler = handler
        self._tls = tls
        self._client_limits = client_limits or ClientLimits()
        self._connections = self._client_limits.connections
        self._workers = OffloadPool()
        self._exchanges: dict[int, DoorExchange] = {}
        self._started = False
        self._stopped = asyncio.Event()
        self._closed = False
        #: Whether what was queued is about to be handed over.
        self._waking = False
        #: Queue a step of an answer, which is taken after the current iteration of the event loop.
        self.respond = self._queueing(door.respond)
        self.start_answer = self._queueing(door.start_answer)
        self.end = self._queueing(door.end)
        self.watch = self._queueing(door.watch)
        self.ask = self._queueing(door.ask)
        self.discard_body = self._queueing(door.discard_body)
        self.close_exchange = self._queueing(door.close_exchange)
        self.cut = self._queueing(door.cut)
        self.delivered = door.taken
        #: What was sent last, and to whom: followers of one stream get the same object, one after the
        #: other, which is one step for the door.
        self._shared: bytes | None = None
        self._followers: list[int] = []

    def _queueing(self, step: Callable[..., None]) -> Callable[..., None]:
        def queue(*arguments: Any) -> None:
            if self._closed:
                return  # and with it everything that the step could be about
            if self._shared is not None:
                self._send_shared()
            step(*arguments)
            self._wake_soon()

        return queue

    def send(self, id_: int, data: bytes) -> None:
        """Queue a part of an answer."""
        if data is not self._shared:
            self._send_shared()
            self._shared = data
            self._wake_soon()
        self._followers.append(id_)

    def _send_shared(self) -> None:
        """Queue what was sent last, for all who get it."""
        if self._shared is not None and not self._closed:
            self._native.send(self._followers, self._shared)
        self._shared = None
        self._followers = []

    def _wake_soon(self) -> None:
        if not self._waking:
            self._waking = True
            self.loop.call_soon(self._wake)

    def forget(self, id_: int) -> None:
        self._exchanges.pop(id_, None)

    def switch(self, handler: Handler) -> None:
        """Call `handler` for the requests that follow."""
        self._handler = handler

    def start(self) -> None:
        """Listen; connections are accepted from here on. Does nothing if they are already."""
        if self._started:
            return
        self._started = True
        self.loop = asyncio.get_running_loop()
        connections, tls = self._connections, self._tls
        limits = _Limits(connections.most, connections.first_request, connections.idle)
        files = None if tls is None else (str(tls.certificate), str(tls.key))
        try:
            self._native.start(limits, files)
        except ValueError as error:
            if tls is None:
                raise
            raise tls.refusal(str(error)) from None
        self.loop.add_reader(self._native.fileno(), self._drain)

    async def stop(self, max_wait: float) -> None:
        """Stop accepting, send GOAWAY, and wait until the connections are closed.

        Does nothing if it has not started, or has stopped.
        """
        if not self._started or self._closed:
            return
        self._native.stop()
        self._native.wake()
        try:
            async with asyncio.timeout(max_wait):
                await self._stopped.wait()
        except TimeoutError:
            logger.warning("connections are still open after %.1f s: closing them", max_wait)
        self._closed = True
        self.loop.remove_reader(self._native.fileno())
        self._native.close()
        self._workers.close()

    def _wake(self) -> None:
        self._waking = False
        self._send_shared()
        if not self._closed:
            self._native.wake()

    def _drain(self) -> None:
        """Take everything that the door has queued, in order."""
        for event in self._native.drain():
            kind, id_ = event[0], event[1]
            if kind == _REQUEST:
                self._begin(*event)
            elif (exchange := self._exchanges.get(id_)) is not None:  # no connection has its id
                if kind == _PIECE:
                    exchange.on_piece(event[2])
                elif kind == _BODY_END:
                    exchange.on_piece(b"")
                elif kind == _GONE:
                    exchange.on_gone()
                elif kind == _TAKEN:
                    exchange.on_taken()
            elif kind == _OPENED:
                self._connections.open(id_, event[2], event[3], self.cut)
            elif kind == _CLOSED:
                self._connections.close(id_, silent=event[2])
            elif kind == _STOPPED:
                self._stopped.set()
            # Everything else is about requests that the server was done with before.

    def _begin(self, _kind: int, id_: int, connection_id: int, *head: Any) -> None:
        """Start a task for a request."""
        connection = self._connections.by_id.get(connection_id)
        if connection is None:  # it was cut when the request was on its way
            self.close_exchange(id_)
            return
        exchange = DoorExchange(self, id_, connection, *head)
        self._exchanges[id_] = exchange
        client_limits = self._client_limits
        request = Request(
            exchange, client_limits.request_budget, client_limits.unread, self._workers
        )
        request.running = self._connections.begin(connection)
        request.task = self.loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            await self._handler(request)
        finally:
            request.finish()
            self._connections.end(request.connection)


def bind(host: str, port: int) -> Door:
    """A door at this address alone, which is not open yet; port 0 takes any free one."""
    try:
        *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        ip = str(address[0]).partition("%")[0]
        scope = address[3] if len(address) == 4 else 0
        return Door(ip, port, scope=scope, backlog=BACKLOG, user_timeout=WRITE_DEADLINE)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidError(
            f"cannot listen at {host} port {port}: {reason}; stop the program that listens "
            "there, or choose another --port"
        ) from None
