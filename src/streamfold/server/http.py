"""A request and its answer, without anything of granian: what handlers see of HTTP.

Underneath is granian's ASGI interface, not RSGI, although RSGI is a quarter faster. Read in the source
of granian 2.8.7 and tried out, RSGI cannot serve S2:

- its `path` is percent-decoded (and lossily), so that `a%2Fb` cannot be told from `a/b`;
- its response stream is an unbounded queue, so that a client that stops reading fills the memory;
- a request body that breaks off looks like one that ended, so that half a batch could be appended.

ASGI has `raw_path`, a queue of four messages, and `http.disconnect`. Two of its ways matter here:
`send` says nothing when the client has gone (only `receive` does), and the head of a response goes out
with its first body message, so a stream is opened with an empty one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Final, TypeAlias

from streamfold.server.patience import Patience
from streamfold.server.workers import Arguments, Result, Workers
from streamfold.wire.s2.failures import ClientHangupError

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
#: Names in lower case.
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

#: Bytes handed over at once: four of these wait for a slow client, besides HTTP/2's own 400 KiB.
PIECE: Final = 64 << 10

_DISCONNECT = "http.disconnect"
_BODY = "http.response.body"


#: Names of headers as bytes: the same few dozen, again and again.
_encoded = lru_cache(maxsize=256)(str.encode)


class Request:
    """One request; answer it once, by `respond` or by `open`."""

    __slots__ = (
        "_patience",
        "_receive",
        "_scope",
        "_send",
        "_to_come",
        "_workers",
        "added_headers",
        "headers",
        "hidden_prefix",
        "method",
        "public_url",
        "raw_path",
        "received",
        "sent",
        "status",
        "task",
    )

    #: That answers this request.
    task: asyncio.Task[None]

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        patience: Patience,
        workers: Workers,
    ) -> None:
        self._scope = scope
        self.method: str = scope["method"]
        #: The path as the client wrote it, still percent-encoded.
        self.raw_path: str = scope["raw_path"].decode("latin-1")
        self._patience = patience
        self._workers = workers
        self._receive = receive
        self._send = send
        #: By name in lower case; the last one where there are several. `header` has them as text.
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._to_come = True
        #: Headers that every answer to this request gets, whoever gives it.
        self.added_headers: tuple[tuple[bytes, bytes], ...] = ()
        #: What clients reach this server by, if it was configured: scheme, host, and a path perhaps.
        self.public_url: str | None = None
        #: What the caller's names of streams lack, and what no answer may tell it.
        self.hidden_prefix = ""
        #: Bytes of bodies so far.
        self.received = 0
        self.sent = 0
        #: Of the answer; 0 until there is one.
        self.status = 0

    @property
    def query(self) -> str:
        raw: bytes = self._scope["query_string"]
        return raw.decode("latin-1")

    @property
    def client(self) -> str:
        """The address at the other end of the connection."""
        return str(self._scope["client"][0])

    @property
    def connection(self) -> tuple[str, int]:
        """What requests on the same connection have in common."""
        host, port = self._scope["client"][:2]
        return host, port

    def offload(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Awaitable[Result]:
        """The result of a function that takes long, called in a thread."""
        return self._workers.run(self.connection, function, *args, **kwargs)

    @property
    def http_version(self) -> str:
        return str(self._scope["http_version"])

    def url_of(self, path: str) -> str:
        """The address of a path on this server, as clients reach it: by its own name, if it has one."""
        if self.public_url is not None:
            return self.public_url + path
        host = self.header("host") or self.header(":authority") or ""
        return f"{self._scope['scheme']}://{host}{path}" if host else path

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case; the last one where there are several."""
        value = self.headers.get(_encoded(name))
        return None if value is None else text_of(value)

    async def body(self, limit: int) -> bytes | None:
        """The whole body, or None as soon as it is known to have more than `limit` bytes."""
        declared = self.declared_size
        if declared is not None and declared > limit:
            return None
        self._patience.begin(self.task)
        try:
            chunk = self._taken(await self._receive()) if self._to_come else None
            if chunk is not None and len(chunk) == declared:
                return chunk  # nothing can follow: one trip to granian's thread less
            return await self._gather(chunk, limit, declared)
        except asyncio.CancelledError:
            self._patience.judge(self.task)
            raise
        finally:
            self._patience.end(self.task)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives; the client may send at its leisure."""
        while (chunk := await self._next_chunk()) is not None:
            yield chunk

    async def gone(self) -> None:
        """Return once the client has hung up; for requests whose body is of no interest."""
        while (await self._receive())["type"] != _DISCONNECT:
            pass

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer with a whole body; this does not wait for the client to take it."""
        if self.method == "HEAD":
            body = b""  # nothing below takes it off, and over HTTP/2 it would break the connection
        self.sent = len(body)
        await self._start(status, headers)
        await self._send({"type": _BODY, "body": body, "more_body": False})

    async def open(self, status: int, headers: Headers) -> ResponseStream:
        """Answer with a stream; status and headers go out at once."""
        await self._start(status, headers)
        await self._send({"type": _BODY, "body": b"", "more_body": True})
        return ResponseStream(self, self._send)

    def _start(self, status: int, headers: Headers) -> Awaitable[None]:
        self.status = status
        whole = [*headers, *self.added_headers]
        return self._send({"type": "http.response.start", "status": status, "headers": whole})

    async def _gather(self, chunk: bytes | None, limit: int, declared: int | None) -> bytes | None:
        """The body that begins with `chunk`."""
        parts = []
        while chunk is not None:
            if self.received > limit:
                return None
            parts.append(chunk)
            if self.received == declared:
                break
            chunk = await self._next_chunk()
        if declared is not None and self.received < declared:
            raise _hung_up()
        return b"".join(parts)

    @property
    def declared_size(self) -> int | None:
        """Bytes of the body, if the client said how many there are."""
        declared = self.headers.get(b"content-length")
        return int(declared) if declared is not None else None

    @property
    def end_is_certain(self) -> bool:
        """Whether a body that breaks off can be told from one that ends.

        Over HTTP/2 only its declared size tells: hyper takes a stream that was cancelled for ended.
        """
        return b"content-length" in self.headers or not self.http_version.startswith("2")

    async def _next_chunk(self) -> bytes | None:
        return self._taken(await self._receive()) if self._to_come else None

    def _taken(self, message: Message) -> bytes | None:
        """The chunk that a message brought; None if the body ended before it."""
        if message["type"] == _DISCONNECT:
            raise _hung_up()
        self._to_come = message["more_body"]
        chunk: bytes = message["body"]
        self.received += len(chunk)
        return chunk if chunk or self._to_come else None


def text_of(value: bytes) -> str:
    """The value of a header as text; bytes that are none stay recognizable."""
    return value.decode(errors="surrogateescape")


def _hung_up() -> ClientHangupError:
    return ClientHangupError("the client hung up before the end of its request")


class ResponseStream:
    """A response that is being written; without `close` the client sees it break off."""

    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send

    @property
    def hidden_prefix(self) -> str:
        """What must not be told to the client of the names of its streams."""
        return self._request.hidden_prefix

    def send(self, data: bytes) -> Awaitable[None]:
        """Hand over `data`; waits while the client is behind. Says nothing if it has gone."""
        self._request.sent += len(data)
        if len(data) <= PIECE:
            return self._send({"type": _BODY, "body": data, "more_body": True})
        return self._send_pieces(data)

    async def _send_pieces(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            await self._send({"type": _BODY, "body": piece, "more_body": True})

    async def close(self) -> None:
        """End the response as it should end."""
        await self._send({"type": _BODY, "body": b"", "more_body": False})
