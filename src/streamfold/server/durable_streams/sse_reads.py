"""Live reads as server-sent events: data events, each followed by its position."""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache, partial
from typing import Final

from streamfold.errors import (
    PositionTrimmedError,
    StoreClosingError,
    StreamDeletingError,
    StreamNotFoundError,
    UnauthenticatedError,
)
from streamfold.server.auth.access import ActiveGrant
from streamfold.server.durable_streams.content import bodies, join
from streamfold.server.durable_streams.paths import StreamPath
from streamfold.server.durable_streams.reads import Query, check_start, start_of
from streamfold.server.http.deadlines import WaitGuard
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import SHARED_PIECE, ResponseStream
from streamfold.server.streams.fairness import ReaderFairness
from streamfold.server.streams.live_reads import OWN_BATCH
from streamfold.server.streams.shared_encodings import SharedEncodings
from streamfold.store.durable_streams import Reading
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore, wall_clock
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_text
from streamfold.wire.durable_streams.offsets import format_offset

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
            except _TOLD_LATER:
                pass
            await stream.close()


class _Connection:
    def __init__(
        self,
        request: Request,
        reading: Reading,
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
            while batch := await self._reading.next():
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
        """Send a client that it is at the tail, unless the last data event said so."""
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
        parts = bodies(batch.records())
        if not parts:
            return b""
        body = join(parts, self._content_type)
        return (
            responses.data_event(body)
            if is_text(self._content_type)
            else responses.base64_event(body)
        )
