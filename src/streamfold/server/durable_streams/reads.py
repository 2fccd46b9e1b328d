"""Reads: catch-up and long-poll, which end, and live reads as server-sent events."""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache, partial
from typing import Final, NamedTuple

from streamfold.errors import (
    InvalidError,
    PositionTrimmedError,
    StoreClosingError,
    StreamDeletingError,
    StreamfoldError,
    StreamNotFoundError,
    UnauthenticatedError,
)
from streamfold.model.positions import SeqNum
from streamfold.model.resources import StreamStatus
from streamfold.server.auth import ActiveGrant
from streamfold.server.durable_streams import problems
from streamfold.server.durable_streams.content import bodies_of, join, messages_of
from streamfold.server.durable_streams.paths import StreamPath
from streamfold.server.http.bodies import NO_STORE, answer
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.problems import drop_traceback
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import SHARED_PIECE, ResponseStream
from streamfold.server.live_reads import OWN_BATCH, ReaderFairness, SharedEncodings
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore, wall_clock
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_json, is_text, join_messages
from streamfold.wire.durable_streams.headers import STREAM_CLOSED, UP_TO_DATE
from streamfold.wire.durable_streams.offsets import (
    ReadFrom,
    Sentinel,
    format_offset,
    parse_position,
    parse_read_offset,
)
from streamfold.wire.durable_streams.state_protocol import STAMP_BYTES
from streamfold.wire.text import parse_parameters

#: Metered bytes, and records, after which a page ends; the batch that reaches it is part of it. Clients
#: that read slowly hold a whole page each; some clients never ask for the second one.
PAGE_BYTES: Final = 3 << 20
PAGE_RECORDS: Final = 100_000
#: Bytes that are held while a page is made: what was read, its parts, and both joined.
PAGE_ROOM: Final = 4 * PAGE_BYTES
#: Clients and proxies may cache what can no longer change; they revalidate a page at the tail.
_IMMUTABLE: Final = b"max-age=60, stale-while-revalidate=300"
#: Seconds after which a connection ends. Clients reconnect at once, and caches can then merge them.
LIFETIME: Final = 60.0
#: Seconds of silence before a keep-alive comment: proxies drop idle connections.
KEEP_ALIVE: Final = 15.0
_COMMENT: Final = b":\n\n"
#: Errors that end the response silently: the client reconnects, and gets the error then.
_TOLD_LATER: Final = (
    PositionTrimmedError,
    StoreClosingError,
    StreamDeletingError,
    StreamNotFoundError,
    UnauthenticatedError,
)


class Query(NamedTuple):
    """The query of a read."""

    start: ReadFrom
    live: str | None
    cursor: str | None


def parse_query(query: str) -> Query:
    """What a read asks for; unknown parameters are ignored."""
    given = parse_parameters(query)
    start = parse_read_offset(given.get("offset", []), parse_position)
    live = given.get("live", [None])[-1]
    if live not in (None, "long-poll", "sse"):
        raise InvalidError(f"live {live!r} is unknown: use long-poll or sse, or omit it")
    if live is not None and start is Sentinel.ABSENT:
        raise InvalidError(f"a live read ({live}) needs an offset: -1 for the start, or now")
    return Query(start, live, given.get("cursor", [None])[-1])


def start_of(start: ReadFrom) -> int | None:
    """The position to read from; None for the tail."""
    if start is Sentinel.NOW:
        return None
    return 0 if isinstance(start, Sentinel) else int(start)


class BeyondTailError(StreamfoldError):
    """The read starts beyond the tail of the stream."""

    code = "offset_beyond_tail"

    def __init__(self, seq_num: int, tail: int) -> None:
        super().__init__(
            f"the read starts at {seq_num}, beyond the tail {tail}: start at the tail or before it"
        )
        self.tail = tail


class Page(NamedTuple):
    body: bytes
    start: int
    end: int
    up_to_date: bool
    closed: bool


async def read_page(request: Request, reading: Reader, content_type: str) -> Page:
    """What can be read now, up to a page."""
    start, size, count, batches, pace = reading.seq_num, 0, 0, list[ReadBatch](), ReaderFairness()
    growth = STAMP_BYTES if is_json(content_type) else 0
    while size < PAGE_BYTES and count < PAGE_RECORDS and (batch := await reading.read()):
        batches.append(batch)
        size += batch.metered + growth * batch.count
        count += batch.count
        await pace.after(batch)
    if size > LIGHT_BYTES:
        body = await request.offload(join, batches, content_type)
    else:
        body = join(batches, content_type)
    return Page(body, start, reading.seq_num, reading.at_tail, reading.closed)


class Reads:
    """Answers reads that end."""

    def __init__(
        self, store: StreamStore, drain_gate: DrainGate, long_poll: float, *, private: bool
    ) -> None:
        self._store = store
        self._gate = drain_gate
        self._long_poll = long_poll
        self._kept = (b"private, " if private else b"public, ") + _IMMUTABLE

    async def catch_up(
        self, request: Request, stream_path: StreamPath, query: Query, key: SealingKey | None
    ) -> None:
        page, status = await self._page(request, stream_path, start_of(query.start), key)
        headers = [
            (b"content-type", status.traits.content_type.encode()),
            *_position_headers(page),
        ]
        if query.start is Sentinel.NOW:
            await request.respond(200, (*headers, NO_STORE), page.body)
            return
        tag = responses.etag(status.id, page.start, page.end, page.closed)
        headers.append((b"etag", tag.encode()))
        headers.append(self._caching(page, key))
        if responses.matches(request.header("if-none-match"), tag):
            await request.respond(304, headers[1:])
            return
        await answer(request, page.body, headers=headers)

    async def _page(
        self, request: Request, stream_path: StreamPath, start: int | None, key: SealingKey | None
    ) -> tuple[Page, StreamStatus]:
        """What can be read now from `start` on, and the stream when that began."""

        async def read() -> tuple[Page, StreamStatus]:
            source = self._store.durable.reading(stream_path.basin, stream_path.stream, start, key)
            async with source as reading:
                check_start(reading, start)
                status = reading.status
                return await read_page(request, reading, status.traits.content_type), status

        return await request.make_answer(PAGE_ROOM, read, lambda made: 4 * len(made[0].body))

    def _caching(self, page: Page, key: SealingKey | None) -> tuple[bytes, bytes]:
        if key is not None:
            return NO_STORE  # a cache would serve it to clients without the key
        return (b"cache-control", b"no-cache" if page.up_to_date else self._kept)

    async def long_poll(
        self,
        request: Request,
        stream_path: StreamPath,
        query: Query,
        key: SealingKey | None,
        active_grant: ActiveGrant,
    ) -> None:
        """Answer with what arrives before the timeout; UnauthenticatedError if the token ends first."""
        start = start_of(query.start)
        async with (
            WaitGuard(request, self._gate),
            self._store.durable.reading(
                stream_path.basin, stream_path.stream, start, key
            ) as reading,
        ):
            check_start(reading, start)
            content_type = reading.status.traits.content_type
            if reading.resting and not reading.closed:
                await active_grant.during(reading.wait(self._long_poll))
            page, _ = await self._page(request, stream_path, reading.seq_num, key)
            await active_grant.require()
        cursor = responses.next_cursor(query.cursor, wall_clock(), random.randint)
        headers = [*_position_headers(page), NO_STORE]
        if not page.closed:
            headers.append((b"stream-cursor", cursor.encode()))
        if page.end == page.start:
            await request.respond(204, headers)
            return
        await answer(
            request, page.body, headers=((b"content-type", content_type.encode()), *headers)
        )


def check_start(reading: Reader, start: int | None) -> None:
    """Raise if the read starts beyond the tail."""
    tail = reading.status.tail
    if start is not None and start > tail:
        raise BeyondTailError(start, tail)


def _position_headers(page: Page) -> list[tuple[bytes, bytes]]:
    headers = [problems.offset_header(SeqNum(page.end))]
    if page.up_to_date:
        headers.append(UP_TO_DATE)
    if page.closed:
        headers.append(STREAM_CLOSED)
    return headers


@lru_cache(maxsize=64)
def _control_event(seq_num: int, cursor: str, at_tail: bool, closed: bool) -> bytes:
    """Encoded once for all followers at the same position."""
    return responses.control_event(format_offset(seq_num), cursor, at_tail, closed)


class Events:
    """Serves live reads."""

    def __init__(self, store: StreamStore, drain_gate: DrainGate) -> None:
        self._store = store
        self._gate = drain_gate
        self._shared = SharedEncodings()

    async def serve(
        self,
        request: Request,
        stream_path: StreamPath,
        query: Query,
        key: SealingKey | None,
        active_grant: ActiveGrant,
    ) -> None:
        """Answer with events until the stream, the connection or the caller's token ends."""
        start = start_of(query.start)
        async with self._store.durable.reading(
            stream_path.basin, stream_path.stream, start, key
        ) as reading:
            check_start(reading, start)
            content_type = reading.status.traits.content_type
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            headers.append((b"x-accel-buffering", b"no"))
            if not is_text(content_type):
                encoding = responses.BASE64.encode()
                headers.append((responses.DATA_ENCODING_HEADER.encode(), encoding))
            reading.before_own_batch = partial(request.reserve_answer, OWN_BATCH)
            stream = await request.open(200, headers)
            connection = _Connection(
                request, reading, stream, content_type, query.cursor, self._shared
            )
            try:
                async with WaitGuard(request, self._gate) as watch:
                    await connection.run(watch, active_grant)
            except _TOLD_LATER as error:
                drop_traceback(error)
            await stream.close()


class _Connection:
    def __init__(
        self,
        request: Request,
        reading: Reader,
        stream: ResponseStream,
        content_type: str,
        cursor: str | None,
        shared: SharedEncodings,
    ) -> None:
        self._request = request
        self._reading = reading
        self._stream = stream
        self._content_type = content_type
        self._cursor = cursor
        self._shared = shared
        self._told: tuple[int, bool] | None = None

    async def run(self, watch: WaitGuard, active_grant: ActiveGrant) -> None:
        """Send what the stream holds and what is appended, until the stream or this connection ends."""
        loop, pace = asyncio.get_running_loop(), ReaderFairness()
        ends = loop.time() + LIFETIME
        while True:
            watch.interruptible = False
            while batch := await self._reading.read():
                await active_grant.require()
                await self._send_data(batch)
                await pace.after(batch)
            await active_grant.require()
            await self._send_position()
            if self._reading.resting:
                await self._stream.settle()
            if self._reading.closed or loop.time() >= ends:
                return
            watch.interruptible = True
            quiet = min(KEEP_ALIVE, max(0.0, ends - loop.time()))
            if not await active_grant.during(self._reading.wait(quiet)):
                watch.interruptible = False
                await self._stream.send(_COMMENT)

    async def _send_data(self, batch: ReadBatch) -> None:
        if batch.metered <= SHARED_PIECE or self._stream.held:
            await self._send_encoded(batch)
            return
        async with self._stream.sharing((self._content_type, *batch.identity), 3 * batch.metered):
            await self._send_encoded(batch)

    async def _send_encoded(self, batch: ReadBatch) -> None:
        if batch.metered > LIGHT_BYTES:
            work = partial(self._request.offload, self._data, batch)
            data = await self._shared.get_heavy(batch, self._content_type, work)
        else:
            data = self._shared.get(batch, self._content_type, self._data)
        if data:
            await self._stream.send(data, self._control())

    async def _send_position(self) -> None:
        """Report to a client that it is at the tail, unless the last data event did."""
        if self._told != self._position():
            await self._stream.send(self._control())

    def _position(self) -> tuple[int, bool]:
        return self._reading.seq_num, self._reading.closed

    def _control(self) -> bytes:
        seq_num, closed = position = self._position()
        at_tail = self._reading.at_tail
        self._told = position if at_tail else None
        cursor = responses.next_cursor(self._cursor, wall_clock(), random.randint)
        return _control_event(seq_num, cursor, at_tail, closed)

    def _data(self, batch: ReadBatch) -> bytes:
        if is_json(self._content_type):
            messages = messages_of(batch)
            return responses.data_event(join_messages(messages)) if messages else b""
        parts = bodies_of(batch)
        if not parts:
            return b""
        body = b"".join(parts)
        return (
            responses.data_event(body)
            if is_text(self._content_type)
            else responses.base64_event(body)
        )
