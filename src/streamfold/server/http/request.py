"""A request and its answer as handlers see them, whatever the `Exchange` below is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from streamfold.server.http.connections import Running
from streamfold.server.http.exchange import Exchange
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
from streamfold.server.http.response_stream import ResponseStream
from streamfold.wire.text import ascii_url, from_bytes

#: Bytes up to which an answer is not watched, by version of HTTP. One over HTTP/2 may be stuck for each
#: request, one over HTTP/1 for each connection.
WHOLE_MAX: Final = {"1": 32 << 10, "2": 16 << 10}
#: Bytes up to which it does even when memory is short: acknowledgements and the like.
TINY: Final = 1 << 10
#: Bytes of memory up to which an answer may have some that is kept for first answers: four times its
#: body, while it is made.
FIRST_MAX: Final = 512 << 10
#: Bytes that are reserved for a list of a thousand items while it is made.
LIST_ROOM: Final = FIRST_MAX

_ALONE: Final = Running(1, 1)
_UNAUTHENTICATED: Final = 401


class Request:
    """One request; answer it once, by `respond` or by `open`."""

    __slots__ = (
        "_budget",
        "_exchange",
        "_reservation",
        "_to_come",
        "_unread",
        "_upload",
        "_workers",
        "added_headers",
        "ambiguous",
        "check_active",
        "connection",
        "declared_size",
        "guarded",
        "headers",
        "hidden_prefix",
        "http_version",
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
        exchange: Exchange,
        request_budget: RequestBudget,
        response_budget: ResponseBudget,
        offload_pool: OffloadPool,
    ) -> None:
        self._exchange = exchange
        self.method = exchange.method
        self.connection = exchange.connection
        #: The path as the client wrote it, still percent-encoded.
        self.raw_path = from_bytes(exchange.raw_path)
        self.raw_query = exchange.raw_query
        #: "1.0", "1.1" or "2".
        self.http_version = exchange.http_version
        self._budget = request_budget
        self._unread = response_budget
        self._workers = offload_pool
        self._upload: Upload | None = None
        #: By name in lower case; the last one where there are several. `header` has them as text.
        self.headers = exchange.headers
        #: Whether a header that may come once came twice: a proxy may have checked the other one.
        self.ambiguous = bool(exchange.repeated) and is_ambiguous(exchange.repeated)
        length = self.headers.get(b"content-length")
        #: Bytes of the body, if the client said how many there are.
        self.declared_size = None if length is None else parse_content_length(length)
        #: Whether there may be more of the body than was returned.
        self._to_come = True
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
        #: Raises NotActiveError if another server may be active by now. A session calls it for each
        #: thing that its client asks for.
        self.check_active: Callable[[], None] = _is_alone
        #: Memory for the answer.
        self._reservation: Reservation | None = None

    @property
    def query(self) -> str:
        return from_bytes(self.raw_query)

    @property
    def client(self) -> str:
        """The address at the other end of the connection."""
        return self.connection.address

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
        return ascii_url(f"{self._exchange.scheme}://{host}{path}" if host else path)

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
        declared, body = self.declared_size, self._exchange.body
        if declared is not None and declared > limit:
            return None
        if not self._to_come:
            return []
        if body is not None and len(body) <= RESERVED_FROM:
            # In fewer steps: nearly all are like this.
            self._to_come = False
            self.received = len(body)
            return [body] if body else []
        upload = self._upload = Upload(self._budget, self.connection.client)
        if declared is not None and declared > RESERVED_FROM:
            await upload.reserve(declared)
        if body is not None:
            self._to_come = False
            self.received = len(body)
            return [body]
        upload.task = self.task
        return await self._gather(limit, declared, upload)

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
                if upload is not None:
                    self._release_upload()
                    upload = None
                chunk = await self._piece()
            else:
                if upload is None:
                    upload = self._upload = Upload(self._budget, self.connection.client)
                    await upload.reserve(reserve)
                chunk = await self._paced_piece(upload, _current_task())
            if chunk:
                yield chunk

    async def _paced_piece(self, upload: Upload, task: asyncio.Task[Any]) -> bytes:
        upload.wait(task)
        try:
            piece = await self._piece()
        except BaseException:
            upload.give_up()
            raise
        upload.came(len(piece))
        return piece

    async def _piece(self) -> bytes:
        """The next piece of the body; empty at its end."""
        piece = self._exchange.body
        if piece is None:
            piece = await self._exchange.piece()
            self._to_come = bool(piece)
        else:
            self._to_come = False
        self.received += len(piece)
        return piece

    async def hold_file(self) -> None:
        """Wait until the body that `chunks` reads may keep a file open; RetryLaterError if that
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
        self._exchange.close()
        if self._upload is not None:
            self._release_upload()
        if self._reservation is not None:
            self.release_answer()

    async def gone(self) -> None:
        """Return once the client has hung up; drops what is left of the body, which may tell."""
        self._discard_body()
        await self._exchange.gone()

    def ignore_body(self) -> None:
        """Drop what is left of the body while a long answer is sent.

        Over HTTP/2 it would fill the window, up to `door.STREAM_WINDOW` bytes that nothing counts, for
        as long as the client does not take the answer.
        """
        if self.http_version == "2":
            self._discard_body()

    def _discard_body(self) -> None:
        if self._to_come and self._exchange.body is None:
            self._to_come = False
            self._exchange.discard_body()

    @property
    def reserved(self) -> int:
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
            self._exchange.respond(status, [*headers, *self.added_headers], body)
            return
        self._start(status, (*headers, (b"content-length", b"%d" % len(body))))
        self.ignore_body()
        stream = ResponseStream(self, self._exchange, self._unread)
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
        counted = SAMPLE if sampled else size
        # The answer exists already: waiting here would not save memory.
        if self._reservation is None:
            self._reservation = response_budget.room.reserve_at_once(self.connection, counted)
        else:
            self._reservation.resize(counted)
        return True

    async def open(self, status: int, headers: Headers) -> ResponseStream:
        """Answer with a stream; status and headers go out at once."""
        self._start(status, headers)
        return ResponseStream(self, self._exchange, self._unread)

    def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        self._exchange.start(status, [*headers, *self.added_headers])

    async def _gather(self, limit: int, declared: int | None, upload: Upload) -> list[bytes] | None:
        """The pieces of the body; None as soon as it is known to have more than `limit` bytes."""
        parts = []
        while self.received != declared and (piece := await self._paced_piece(upload, self.task)):
            if self.received > limit:
                return None
            parts.append(piece)
            if declared is None and self.received > RESERVED_FROM:
                await upload.reserve(limit)
        self._to_come = False
        if declared is not None and self.received < declared:
            raise _hung_up()
        return parts


def _is_alone() -> None:
    """No other server can be active: the store has no lease."""


def _hung_up() -> ClientHangupError:
    return ClientHangupError("the client hung up before the end of its request")


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a body is read by a task")
    return task
