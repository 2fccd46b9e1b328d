"""A request and its answer, without anything of granian: what handlers see of HTTP.

Underneath is granian's ASGI interface, not RSGI, although RSGI is a quarter faster. Read in the source
of granian 2.8.7 and tried out, RSGI cannot serve S2:

- its `path` is percent-decoded (and lossily), so that `a%2Fb` cannot be told from `a/b`;
- its response stream is an unbounded queue, so that a client that stops reading fills the memory;
- a request body that breaks off looks like one that ended, so that half a batch could be appended.

ASGI has `raw_path`, a short queue of messages, and `http.disconnect`. Two of its ways matter here:
`send` says nothing when the client has gone (only `receive` does), and the head of a response goes out
with its first body message, so a stream is opened with an empty one.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, Final, TypeAlias

from streamfold.model.positions import U64_MAX
from streamfold.server.intake import RESERVED_FROM, Intake, Upload
from streamfold.server.unread import Unread
from streamfold.server.workers import Arguments, Result, Workers
from streamfold.wire.s2.failures import ClientHangupError
from streamfold.wire.text import ascii_url, from_bytes, parse_unsigned

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
#: Names in lower case.
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

#: Bytes handed over at once, of an answer for which memory is reserved.
PIECE: Final = 64 << 10
#: Bytes handed over at once of other answers, which are batches that many followers get: smaller, since
#: each of them has several in granian's queue. `unread.IN_FLIGHT` counts with it.
SHARED_PIECE: Final = 16 << 10
#: Messages that granian takes before anything of a response has left.
QUEUE: Final = 5

_DISCONNECT = "http.disconnect"
_BODY = "http.response.body"


#: Names of headers as bytes: the same few dozen, again and again.
_encoded = lru_cache(maxsize=256)(str.encode)


class Request:
    """One request; answer it once, by `respond` or by `open`."""

    __slots__ = (
        "_intake",
        "_receive",
        "_scope",
        "_send",
        "_to_come",
        "_unread",
        "_upload",
        "_workers",
        "added_headers",
        "headers",
        "held",
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
        intake: Intake,
        unread: Unread,
        workers: Workers,
    ) -> None:
        self._scope = scope
        self.method: str = scope["method"]
        #: The path as the client wrote it, still percent-encoded.
        self.raw_path: str = from_bytes(scope["raw_path"])
        self._intake = intake
        self._unread = unread
        self._workers = workers
        self._upload: Upload | None = None
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
        #: Bytes of memory that are reserved for the answer.
        self.held = 0

    @property
    def query(self) -> str:
        return from_bytes(self._scope["query_string"])

    @property
    def client(self) -> str:
        """The address at the other end of the connection."""
        return str(self._scope["client"][0])

    @property
    def connection(self) -> tuple[str, str]:
        """What requests on the same connection have in common: the client's address and port."""
        client: tuple[str, str] = self._scope["client"]
        return client

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
        """The address of a path on this server, as clients reach it: by its own name, if it has one.

        All of it is ASCII that may stand in a header, whatever the client sent.
        """
        if self.public_url is not None:
            return self.public_url + ascii_url(path)
        host = self.header("host") or self.header(":authority") or ""
        return ascii_url(f"{self._scope['scheme']}://{host}{path}" if host else path)

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case; the last one where there are several."""
        value = self.headers.get(_encoded(name))
        return None if value is None else text_of(value)

    async def body(self, limit: int) -> bytes | None:
        """The whole body, or None as soon as it is known to have more than `limit` bytes.

        RequestTimeoutError if it arrives too slowly.
        """
        parts = await self.body_parts(limit)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def body_parts(self, limit: int) -> list[bytes] | None:
        """The same in the pieces in which it arrived, for bodies that a thread is to join."""
        declared = self.declared_size
        if declared is not None and declared > limit:
            return None
        if not self._to_come:
            return []
        upload = self._upload = self._intake.upload()
        if declared is not None and declared > RESERVED_FROM:
            await upload.reserve(declared)
        chunk = await self._paced_chunk(upload, self.task)
        if chunk is not None and len(chunk) == declared:
            return [chunk]  # nothing can follow: one trip to granian's thread less
        return await self._gather(chunk, limit, declared, upload)

    async def chunks(
        self, reserve: int = 0, paused: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives; RequestTimeoutError if that is too slow.

        `reserve` bytes of memory are held for it. Where `paused` says so, the client may take its time
        before it sends on.
        """
        upload: Upload | None = None
        while self._to_come:
            if paused():
                self._release_upload()
                upload = None
                chunk = self._taken(await self._receive())
            else:
                if upload is None:
                    upload = self._upload = self._intake.upload()
                    await upload.reserve(reserve)
                chunk = await self._paced_chunk(upload, _current_task())
            if chunk is not None:
                yield chunk

    async def _paced_chunk(self, upload: Upload, task: asyncio.Task[Any]) -> bytes | None:
        upload.wait(task)
        try:
            chunk = self._taken(await self._receive())
        except BaseException:
            upload.give_up()
            raise
        upload.came(0 if chunk is None else len(chunk))
        return chunk

    async def hold_file(self) -> None:
        """Wait until the body that `chunks` reads may keep a file open; UploadsBusyError if that
        takes too long.
        """
        if self._upload is not None:
            await self._upload.hold_file()

    def _release_upload(self) -> None:
        if self._upload is not None:
            self._upload.release()
            self._upload = None

    def finish(self) -> None:
        """Give back all memory that was reserved; call when the request is over."""
        self._release_upload()
        self.release_answer()

    async def gone(self) -> None:
        """Return once the client has hung up; for requests whose body is of no interest."""
        while (await self._receive())["type"] != _DISCONNECT:
            pass

    async def reserve_answer(self, size: int) -> None:
        """Wait until there is memory for an answer of `size` bytes, if not so much is reserved."""
        if size > self.held:
            self.held += await self._unread.reserve(size - self.held)

    def release_answer(self, size: int | None = None) -> None:
        """Keep what an answer of `size` bytes needs of its reservation, and give back the rest."""
        rest = self.held - min(size or 0, self.held)
        if rest:
            self.held -= rest
            self._unread.release(rest)

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer with a whole body; one that is long is handed over as the client takes it."""
        if self.method == "HEAD":
            body = b""  # nothing below takes it off, and over HTTP/2 it would break the connection
        # An HTTP/1 connection has one answer at a time, one of HTTP/2 may have many.
        if len(body) > SHARED_PIECE and (len(body) > PIECE or self.http_version.startswith("2")):
            await self._respond_in_pieces(status, headers, body)
            return
        self.sent = len(body)
        self.release_answer()
        await self._start(status, headers)
        await self._send({"type": _BODY, "body": body, "more_body": False})

    async def _respond_in_pieces(self, status: int, headers: Headers, body: bytes) -> None:
        if self.held:
            # To wait for more while holding some could block all others that do the same.
            more = max(0, len(body) - self.held)
            self._unread.overdraw(more)
            self.held += more
            self.release_answer(len(body))
        else:
            await self.reserve_answer(len(body))
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await ResponseStream(self, self._send, self._unread).send(body, last=True)

    async def open(self, status: int, headers: Headers) -> ResponseStream:
        """Answer with a stream; status and headers go out at once."""
        await self._start(status, headers)
        await self._send({"type": _BODY, "body": b"", "more_body": True})
        return ResponseStream(self, self._send, self._unread)

    def _start(self, status: int, headers: Headers) -> Awaitable[None]:
        self.status = status
        whole = [*headers, *self.added_headers]
        return self._send({"type": "http.response.start", "status": status, "headers": whole})

    async def _gather(
        self, chunk: bytes | None, limit: int, declared: int | None, upload: Upload
    ) -> list[bytes] | None:
        """The body that begins with `chunk`."""
        parts = []
        while chunk is not None:
            if self.received > limit:
                return None
            parts.append(chunk)
            if self.received == declared or not self._to_come:
                break
            if declared is None and self.received > RESERVED_FROM:
                await upload.reserve(limit)
            chunk = await self._paced_chunk(upload, self.task)
        if declared is not None and self.received < declared:
            raise _hung_up()
        return parts

    @property
    def declared_size(self) -> int | None:
        """Bytes of the body, if the client said how many there are."""
        declared = self.header("content-length")
        return None if declared is None else parse_unsigned(declared, U64_MAX)

    @property
    def end_is_certain(self) -> bool:
        """Whether a body that breaks off can be told from one that ends.

        Over HTTP/2 only its declared size tells: hyper takes a stream that was cancelled for ended.
        """
        return b"content-length" in self.headers or not self.http_version.startswith("2")

    def _taken(self, message: Message) -> bytes | None:
        """The chunk that a message brought; None if the body ended before it."""
        if message["type"] == _DISCONNECT:
            raise _hung_up()
        self._to_come = message["more_body"]
        chunk: bytes = message["body"]
        self.received += len(chunk)
        return chunk if chunk or self._to_come else None


#: The value of a header as text.
text_of = from_bytes


def _hung_up() -> ClientHangupError:
    return ClientHangupError("the client hung up before the end of its request")


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a body is read by a task")
    return task


class ResponseStream:
    """A response that is being written; without `close` the client sees it break off."""

    __slots__ = ("_request", "_send", "_unread", "cut_off", "moved", "since", "taken")

    def __init__(self, request: Request, send: Send, unread: Unread) -> None:
        self._request = request
        self._send = send
        self._unread = unread
        # As `unread.Answer` has them.
        self.cut_off = False
        self.since = self.moved = 0.0
        self.taken = 0

    @property
    def hidden_prefix(self) -> str:
        """What must not be told to the client of the names of its streams."""
        return self._request.hidden_prefix

    @property
    def task(self) -> asyncio.Task[None]:
        return self._request.task

    @property
    def request(self) -> Request:
        return self._request

    @property
    def held(self) -> int:
        return self._request.held

    def sharing(self, key: Hashable, size: int) -> AbstractAsyncContextManager[None]:
        """Hold memory for an encoding of about `size` bytes, once for all who send it now."""
        return self._unread.sharing(key, size)

    async def send(self, *parts: bytes, last: bool = False) -> None:
        """Hand over `parts`; returns when the client has taken all of it but a little.

        Says nothing if the client has gone. ClientHangupError if it takes nothing for too long.
        """
        unread, request = self._unread, self._request
        self.since = self.moved = _now()
        self.taken = 0
        unread.begin(self)
        try:
            if sum(map(len, parts)) <= SHARED_PIECE:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                request.sent += len(data)
                await self._send({"type": _BODY, "body": data, "more_body": not last})
            else:
                for piece, more in _pieces(parts, last=last, reserved=bool(request.held)):
                    request.sent += len(piece)
                    await self._send({"type": _BODY, "body": piece, "more_body": more})
                    self.taken += len(piece)
                    self.moved = _now()
        except asyncio.CancelledError:
            if self.cut_off:
                request.task.uncancel()
                raise ClientHangupError(
                    f"the client took nothing of its answer for {_now() - self.moved:.0f} seconds"
                ) from None
            raise
        finally:
            unread.end(self)

    async def close(self) -> None:
        """End the response as it should end."""
        await self._send({"type": _BODY, "body": b"", "more_body": False})


def _now() -> float:
    return asyncio.get_running_loop().time()


def _pieces(parts: Sequence[bytes], *, last: bool, reserved: bool) -> Iterator[tuple[bytes, bool]]:
    """The pieces in which to hand over `parts`, and whether more is to come after each.

    The last bytes go one by one: when granian has taken them all, what is before them has left its
    queue, and the client has taken it. Nothing else would tell. A session that keeps its reservation
    for what comes next need not know.
    """
    size = PIECE if reserved else SHARED_PIECE
    single = b""
    if last or not reserved:
        single = b"".join([part[-QUEUE - 1 :] for part in parts])[-QUEUE - 1 :]
    rest = sum(map(len, parts)) - len(single)
    for part in parts:
        end = min(len(part), rest)
        for at in range(0, end, size):
            yield part[at : min(at + size, end)], True
        rest -= end
    for at in range(len(single)):
        yield single[at : at + 1], not last or at + 1 < len(single)
