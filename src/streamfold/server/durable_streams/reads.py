"""Reads that end: catch-up reads, and long-polls, which first wait at the tail."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from streamfold.errors import (
    InvalidError,
    StreamfoldError,
)
from streamfold.model.positions import SeqNum
from streamfold.model.resources import StreamStatus
from streamfold.server.auth import ActiveGrant
from streamfold.server.durable_streams import problems
from streamfold.server.durable_streams.content import join
from streamfold.server.durable_streams.paths import StreamPath
from streamfold.server.http.bodies import NO_STORE, answer
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.request import Request
from streamfold.server.live_reads import ReaderFairness
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore, wall_clock
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_json
from streamfold.wire.durable_streams.headers import STREAM_CLOSED, UP_TO_DATE
from streamfold.wire.durable_streams.offsets import (
    ReadFrom,
    Sentinel,
    parse_position,
    parse_read_offset,
)
from streamfold.wire.durable_streams.state_protocol import STAMP_BYTES
from streamfold.wire.text import parse_parameters

#: Metered bytes, and records, after which a page ends, including the batch that reaches the limit.
#: Slow clients each hold a whole page, and some clients never ask for the second one.
PAGE_BYTES: Final = 3 << 20
PAGE_RECORDS: Final = 100_000
#: Bytes held while a page is built: the batches read, their parts, and both joined.
PAGE_ROOM: Final = 4 * PAGE_BYTES
#: Clients and proxies may cache pages that can no longer change. They revalidate a page at the
#: tail.
_IMMUTABLE: Final = b"max-age=60, stale-while-revalidate=300"


class Query(NamedTuple):
    """Query parameters of a read."""

    start: ReadFrom
    live: str | None
    cursor: str | None


def parse_query(query: str) -> Query:
    """Parse a read's query. Unknown parameters are ignored."""
    parameters = parse_parameters(query)
    start = parse_read_offset(parameters.get("offset", []), parse_position)
    live = parameters.get("live", [None])[-1]
    if live not in (None, "long-poll", "sse"):
        raise InvalidError(f"live {live!r} is unknown: use long-poll or sse, or omit it")
    if live is not None and start is Sentinel.ABSENT:
        raise InvalidError(f"a live read ({live}) needs an offset: -1 for the start, or now")
    return Query(start, live, parameters.get("cursor", [None])[-1])


def start_of(start: ReadFrom) -> int | None:
    """Return the position to read from, or None for the tail."""
    if start is Sentinel.NOW:
        return None
    return 0 if isinstance(start, Sentinel) else int(start)


class BeyondTailError(StreamfoldError):
    """Raised if a read starts beyond the stream's tail."""

    code = "offset_beyond_tail"

    def __init__(self, seq_num: int, tail: int) -> None:
        super().__init__(
            f"the read starts at {seq_num}, beyond the tail {tail}: start at the tail or before it"
        )
        self.tail = tail


class ReadPage(NamedTuple):
    body: bytes
    start: int
    end: int
    up_to_date: bool
    closed: bool


async def read_page(request: Request, reading: Reader, content_type: str) -> ReadPage:
    """Read the records available now, up to one page."""
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
    return ReadPage(body, start, reading.seq_num, reading.at_tail, reading.closed)


class Reads:
    """Serves reads that end."""

    def __init__(
        self, store: StreamStore, drain_gate: DrainGate, long_poll: float, *, private: bool
    ) -> None:
        self._store = store
        self._gate = drain_gate
        self._long_poll = long_poll
        self._immutable = (b"private, " if private else b"public, ") + _IMMUTABLE

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
    ) -> tuple[ReadPage, StreamStatus]:
        """Read a page from `start` on.

        Also returns the stream's status from when the read began.
        """

        async def read() -> tuple[ReadPage, StreamStatus]:
            source = self._store.stream(stream_path.basin, stream_path.stream).reading(start, key)
            async with source as reading:
                check_start(reading, start)
                status = reading.status
                return await read_page(request, reading, status.traits.content_type), status

        return await request.make_answer(PAGE_ROOM, read, lambda made: 4 * len(made[0].body))

    def _caching(self, page: ReadPage, key: SealingKey | None) -> tuple[bytes, bytes]:
        if key is not None:
            return NO_STORE  # a cache would serve the page to clients without the key
        return (b"cache-control", b"no-cache" if page.up_to_date else self._immutable)

    async def long_poll(
        self,
        request: Request,
        stream_path: StreamPath,
        query: Query,
        key: SealingKey | None,
        active_grant: ActiveGrant,
    ) -> None:
        """Respond with the records that arrive before the timeout.

        Raises UnauthenticatedError if the token becomes invalid first.
        """
        start = start_of(query.start)
        async with (
            WaitGuard(request, self._gate),
            self._store.stream(stream_path.basin, stream_path.stream).reading(
                start, key
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


def _position_headers(page: ReadPage) -> list[tuple[bytes, bytes]]:
    headers = [problems.offset_header(SeqNum(page.end))]
    if page.up_to_date:
        headers.append(UP_TO_DATE)
    if page.closed:
        headers.append(STREAM_CLOSED)
    return headers
