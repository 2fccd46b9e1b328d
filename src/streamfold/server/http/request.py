"""A request and its answer as handlers see them, independent of granian.

Underneath is granian's ASGI interface, not RSGI, although RSGI is a quarter faster. Read in the source
of granian 2.8.7 and tried out, RSGI cannot serve S2:

- its `path` is percent-decoded (and lossily), so that `a%2Fb` looks like `a/b`;
- its response stream is an unbounded queue, so that a client that stops reading fills the memory;
- a request body that breaks off looks like one that ended, so that half a batch could be appended.

ASGI has `raw_path`, a short queue of messages, and `http.disconnect`. Two details matter here:
`send` does not report a client that has gone (only `receive` does), and the head of a response goes out
with its first body message, so a stream is opened with an empty one.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
)
from typing import Any, Final, Protocol, TypeAlias

from streamfold.server.http.connections import Running, client_of
from streamfold.server.http.headers import (
    CHALLENGE,
    Headers,
    encoded_name,
    is_ambiguous,
    parse_content_length,
    text_of,
)
from streamfold.server.http.offload import Arguments, OffloadPool, Result
from streamfold.server.http.problems import ClientHangupError
from streamfold.server.http.request_limits import RESERVED_FROM, RequestBudget, Upload
from streamfold.server.http.response_limits import ANSWER_COST, SAMPLE, ResponseBudget
from streamfold.server.http.response_shares import Reservation
from streamfold.server.http.response_stream import (
    BODY,
    MESSAGES_BELOW,
    PIECE,
    START,
    Message,
    ResponseStream,
    Send,
)
from streamfold.wire.text import ascii_url, from_bytes


class Arriving(Protocol):
    """A message of the client that may still be on its way, as granian has it."""

    def __await__(self) -> Generator[Any, Any, Message]: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


Receive: TypeAlias = Callable[[], Arriving]

#: Bytes up to which an answer goes as one message, by version of HTTP. One over HTTP/2 may be stuck for
#: each request, one over HTTP/1 for each connection.
WHOLE_MAX: Final = {"1": 32 << 10, "2": 16 << 10}
#: Bytes up to which it does even when memory is short: acknowledgements and the like.
TINY: Final = 1 << 10
#: Bytes of memory up to which an answer may have some that is kept for first answers: four times its
#: body, while it is made.
FIRST_MAX: Final = 512 << 10
#: Bytes that are reserved for a list of a thousand items while it is made.
LIST_ROOM: Final = FIRST_MAX

#: Seconds after which a reset that made a body look empty has been reported, unless the server is
#: overloaded: it takes less than a millisecond.
_RESET_REPORTED: Final = 0.1

_DISCONNECT = "http.disconnect"
_ALONE: Final = Running(1, 1, 0)
#: Methods of requests that have no body, unless they declare its size.
_BODILESS: Final = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
_UNAUTHENTICATED: Final = 401


class Request:
    """One request; answer it once, by `respond` or by `open`."""

    __slots__ = (
        "_budget",
        "_early",
        "_ignoring",
        "_receive",
        "_reservation",
        "_scope",
        "_send",
        "_to_come",
        "_unread",
        "_upload",
        "_workers",
        "added_headers",
        "ambiguous",
        "connection",
        "declared_size",
        "guarded",
        "headers",
        "hidden_prefix",
        "http_version",
        "large",
        "method",
        "public_url",
        "raw_path",
        "raw_query",
        "received",
        "running",
        "sent",
        "status",
        "task",
    )

    #: The task that answers this request.
    task: asyncio.Task[None]

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        request_budget: RequestBudget,
        response_budget: ResponseBudget,
        offload_pool: OffloadPool,
    ) -> None:
        self._scope = scope
        self.method: str = scope["method"]
        #: What requests on the same connection have in common: the client's address and port.
        self.connection: tuple[str, str] = scope["client"]
        #: The path as the client wrote it, still percent-encoded.
        self.raw_path: str = from_bytes(scope["raw_path"])
        self.raw_query: bytes = scope["query_string"]
        #: "1.0", "1.1" or "2".
        self.http_version: str = scope["http_version"]
        self._budget = request_budget
        self._unread = response_budget
        self._workers = offload_pool
        self._upload: Upload | None = None
        self._receive = receive
        self._send = send
        #: By name in lower case; the last one where there are several. `header` has them as text.
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        #: Whether a header that may come once came twice: a proxy may have checked the other one.
        self.ambiguous = len(self.headers) != len(scope["headers"]) and is_ambiguous(
            scope["headers"]
        )
        length = self.headers.get(b"content-length")
        #: Bytes of the body, if the client said how many there are.
        self.declared_size = None if length is None else parse_content_length(length)
        #: Whether a body follows that is not small, or may not be.
        self.large = (
            self.method not in _BODILESS
            if self.declared_size is None
            else self.declared_size > RESERVED_FROM
        )
        #: The first message of the body, which may still be on its way; None if it was not asked for.
        self._early: Arriving | None = None
        self._to_come = True
        #: Reads what is left of the body, and drops it.
        self._ignoring: asyncio.Task[None] | None = None
        #: Headers of every answer to this request, whichever handler sends it.
        self.added_headers: tuple[tuple[bytes, bytes], ...] = ()
        #: The URL by which clients reach this server, if configured: scheme, host, optional path.
        self.public_url: str | None = None
        #: The prefix that the caller's stream names lack, and that no answer may reveal.
        self.hidden_prefix = ""
        #: Bytes of bodies so far.
        self.received = 0
        self.sent = 0
        #: Status of the answer; 0 until the answer begins.
        self.status = 0
        #: Whether a `WaitGuard` ends this request when its client hangs up.
        self.guarded = False
        #: Requests of the same client that were under way when this one came.
        self.running = _ALONE
        #: Memory for the answer.
        self._reservation: Reservation | None = None

    @property
    def query(self) -> str:
        return from_bytes(self.raw_query)

    @property
    def client(self) -> str:
        """The address at the other end of the connection."""
        return self.connection[0]

    def offload(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Awaitable[Result]:
        """The result of a function that takes long, called in a thread."""
        return self._workers.run(self.connection, function, *args, **kwargs)

    def url_of(self, path: str) -> str:
        """The address of a path on this server, as clients reach it: by the configured URL, if any.

        All of it is ASCII that may stand in a header, whatever the client sent.
        """
        if self.public_url is not None:
            return self.public_url + ascii_url(path)
        host = self.header("host") or self.header(":authority") or ""
        return ascii_url(f"{self._scope['scheme']}://{host}{path}" if host else path)

    def header(self, name: str) -> str | None:
        """The value of a header, by its name in lower case; the last one where there are several."""
        value = self.headers.get(encoded_name(name))
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
        upload = self._upload = Upload(self._budget, client_of(self.connection[0]))
        if declared is not None and declared > RESERVED_FROM:
            await upload.reserve(declared)
        if self._early is not None and self._early.done() and self._budget.waiting:
            # One that was asked for before may have come, too, while its task has yet to resume: let
            # it go first, so that appends keep their order.
            await asyncio.sleep(0)
        # As `_paced_chunk` does, in fewer steps: most bodies are one small chunk.
        upload.task = self.task
        self._budget.wait(upload)
        try:
            chunk = self._taken(await self._message())
        except BaseException:
            upload.give_up()
            raise
        upload.came(0 if chunk is None else len(chunk))
        if chunk is not None and len(chunk) == declared:
            if not upload.reserved:
                self._upload = None  # it holds nothing to release
            self._to_come = False  # nothing can follow: one trip to granian's thread less
            return [chunk]
        return await self._gather(chunk, limit, declared, upload)

    async def has_no_body(self) -> bool:
        """Whether a body of undeclared size is empty; ClientHangupError if it seems to be only because
        the client reset its request. An overloaded server may miss that.
        """
        if await self.body_parts(0) is None:
            return False
        try:
            async with asyncio.timeout(_RESET_REPORTED):
                await self.gone()
        except TimeoutError:
            return True
        raise _hung_up()

    async def chunks(
        self, reserve: int = 0, paused: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives; RequestTimeoutError if that is too slow.

        `reserve` bytes of memory are held for it. Where `paused` allows it, the client may pause
        between pieces.
        """
        upload: Upload | None = None
        while self._to_come:
            if paused():
                self._release_upload()
                upload = None
                chunk = self._taken(await self._message())
            else:
                if upload is None:
                    upload = self._upload = Upload(self._budget, client_of(self.connection[0]))
                    await upload.reserve(reserve)
                chunk = await self._paced_chunk(upload, _current_task())
            if chunk is not None:
                yield chunk

    async def _paced_chunk(self, upload: Upload, task: asyncio.Task[Any]) -> bytes | None:
        upload.wait(task)
        try:
            chunk = self._taken(await self._message())
        except BaseException:
            upload.give_up()
            raise
        upload.came(0 if chunk is None else len(chunk))
        return chunk

    def ask_for_body(self) -> None:
        """Have the body sent that `body` will return.

        For small bodies, as soon as their requests arrive: one right after the other, they wake
        granian's thread once. Asked for by its handler, each would wake it. Never while a large body is
        on its way on the same connection: this request would overtake that one.
        """
        self._early = self._receive()

    def _message(self) -> Arriving:
        """The next message of the client."""
        early, self._early = self._early, None
        return self._receive() if early is None else early

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
        if self._ignoring is not None:
            self._ignoring.cancel()
        if self._early is not None:
            # Nobody read the body. Until it came, granian would keep the HTTP/2 stream open for it.
            self._early.cancel()
        if self._upload is not None:
            self._release_upload()
        if self._reservation is not None:
            self.release_answer()

    async def gone(self) -> None:
        """Return once the client has hung up; for requests whose body is ignored."""
        while (await self._message())["type"] != _DISCONNECT:
            pass

    def ignore_body(self) -> None:
        """Drop what is left of the body while a long answer is sent.

        Over HTTP/2 it would fill the window, up to `listener.STREAM_WINDOW` bytes that nothing counts,
        for as long as the client does not take the answer.
        """
        if self._to_come and self._ignoring is None and self.http_version.startswith("2"):
            self._ignoring = asyncio.create_task(self.gone())

    @property
    def held(self) -> int:
        """Bytes of memory that are reserved for the answer."""
        return 0 if self._reservation is None else self._reservation.size

    async def reserve_answer(self, size: int) -> None:
        """Wait until there is memory for an answer of `size` bytes, if nothing is reserved."""
        if self._reservation is None:
            small = size <= FIRST_MAX
            self._reservation = await self._reserve(size, first=small)

    async def make_answer(
        self, room: int, make: Callable[[], Awaitable[Result]], size_of: Callable[[Result], int]
    ) -> Result:
        """What `make` returns, with `room` bytes reserved meanwhile, and `size_of` it from then on.

        `make` may be called twice: memory that is kept for first answers is for small ones only.
        """
        self._reservation = await self._reserve(room, first=True)
        made = await make()
        if self._reservation.first and size_of(made) > FIRST_MAX:
            del made
            self.release_answer()
            self._reservation = await self._reserve(room, first=False)
            made = await make()
        self._reservation.resize(min(room, size_of(made)))
        return made

    def _reserve(self, size: int, *, first: bool) -> Awaitable[Reservation]:
        """Wait for memory; ClientHangupError if the client hangs up meanwhile."""
        # The client's end is reported once: to the guard if there is one, which ends this wait as well.
        gone = None if self.guarded else self.gone
        return self._unread.reserve(self.connection, size, first=first, gone=gone)

    def release_answer(self) -> None:
        """Give back the memory for the answer."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def shrink_answer(self, size: int) -> None:
        """Keep what an answer of `size` bytes needs of its memory, and give back the rest."""
        if self._reservation is not None and self._reservation.size > size:
            self._reservation.resize(size)

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        """Answer with a whole body; one that is long is handed over as the client takes it."""
        if self.method == "HEAD":
            body = b""  # no lower layer removes it, and over HTTP/2 it would break the connection
        if status == _UNAUTHENTICATED:
            headers = (*headers, CHALLENGE)
        if not self._watches(len(body)):
            self.sent = len(body)
            if self._reservation is not None:
                self.release_answer()
            self.status = status
            whole = [*headers, *self.added_headers]
            await self._send({"type": START, "status": status, "headers": whole})
            await self._send({"type": BODY, "body": body, "more_body": False})
            return
        await self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        self.ignore_body()
        stream = ResponseStream(self, self._send, self._unread, events=False)
        await stream.send(body)
        await stream.close()

    def _watches(self, size: int) -> bool:
        """Whether to send an answer in pieces and count it until it is taken; reserves memory then."""
        response_budget, version = self._unread, self.http_version[0]
        sampled = False
        if size <= WHOLE_MAX[version]:
            sampled = size > 0 and version == "2" and response_budget.is_sample(size + ANSWER_COST)
            if not sampled and (size <= TINY or not response_budget.room.pressed):
                return False
        counted = SAMPLE if sampled else size + min(size, MESSAGES_BELOW * PIECE)
        # The answer exists already: waiting here would not save memory.
        if self._reservation is None:
            self._reservation = response_budget.room.reserve_at_once(self.connection, counted)
        else:
            self._reservation.resize(counted)
        return True

    async def open(self, status: int, headers: Headers) -> ResponseStream:
        """Answer with a stream; status and headers go out at once."""
        await self._start(status, headers)
        await self._send({"type": BODY, "body": b"", "more_body": True})
        events = (b"content-type", b"text/event-stream") in headers
        return ResponseStream(self, self._send, self._unread, events=events)

    def _start(self, status: int, headers: Headers) -> Awaitable[None]:
        self.status = status
        whole = [*headers, *self.added_headers]
        return self._send({"type": START, "status": status, "headers": whole})

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
    def end_is_certain(self) -> bool:
        """Whether a body that breaks off is distinguishable from one that ends.

        Over HTTP/2 only its declared size shows that: hyper reports a cancelled stream as ended.
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


def _hung_up() -> ClientHangupError:
    return ClientHangupError("the client hung up before the end of its request")


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a body is read by a task")
    return task
