"""Live reads as server-sent events: each batch as a data event, followed by its position."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Final

from streamfold.errors import (
    PositionTrimmedError,
    StoreClosingError,
    StreamDeletingError,
    StreamNotFoundError,
    UnauthenticatedError,
)
from streamfold.server.auth import ActiveGrant
from streamfold.server.durable_streams.content import bodies_of, messages_of
from streamfold.server.durable_streams.paths import StreamPath
from streamfold.server.durable_streams.reads import Query, check_start, start_of
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.headers import Headers
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.problems import drop_traceback
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import SHARED_AHEAD, ResponseStream
from streamfold.server.live_reads import OWN_BATCH, LiveReads, SharedEncodings
from streamfold.store.log.sealing import SealingKey
from streamfold.store.read.reader import Reader
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import StreamStore, wall_clock
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_json, is_text, join_messages
from streamfold.wire.durable_streams.offsets import format_offset

#: Seconds until a connection ends. Clients reconnect at once, and caches can then merge them.
LIFETIME: Final = 60.0
#: Seconds of silence before a keep-alive comment: proxies drop idle connections.
KEEP_ALIVE: Final = 15.0
_COMMENT: Final = b":\n\n"
_HEADERS: Final[Headers] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_BASE64: Final[Headers] = ((responses.DATA_ENCODING_HEADER.encode(), responses.BASE64.encode()),)
#: Errors that end the response silently. The client gets the error when it reconnects.
_RAISED_AT_RECONNECT: Final = (
    PositionTrimmedError,
    StoreClosingError,
    StreamDeletingError,
    StreamNotFoundError,
    UnauthenticatedError,
)


class Events:
    """Serves live reads as events."""

    def __init__(self, store: StreamStore, drain_gate: DrainGate) -> None:
        self._store = store
        self._live = LiveReads(drain_gate, (KEEP_ALIVE, KEEP_ALIVE), LIFETIME)
        self._shared = SharedEncodings()

    async def serve(
        self,
        request: Request,
        stream_path: StreamPath,
        query: Query,
        key: SealingKey | None,
        active_grant: ActiveGrant,
    ) -> None:
        """Respond with events until the stream, the connection or the caller's token ends."""

        def encode(reading: Reader) -> ContentEvents:
            return ContentEvents(reading, query.cursor, self._shared)

        opening = self._open(request, stream_path, query, key)
        await self._live.serve(request, opening, active_grant, encode)

    @asynccontextmanager
    async def _open(
        self, request: Request, stream_path: StreamPath, query: Query, key: SealingKey | None
    ) -> AsyncIterator[Reader]:
        start = start_of(query.start)
        async with self._store.stream(stream_path.basin, stream_path.stream).reading(
            start, key, before_own_batch=partial(request.reserve_answer, OWN_BATCH)
        ) as reading:
            check_start(reading, start)
            yield reading


class ContentEvents:
    """Encodes batches as content, each followed by a control event with the client's position."""

    def __init__(self, reading: Reader, cursor: str | None, shared: SharedEncodings) -> None:
        self._reading = reading
        self._cursor = cursor
        self._shared = shared
        self._content_type = self.form = reading.status.traits.content_type
        self.headers = _HEADERS if is_text(self.form) else (*_HEADERS, *_BASE64)
        #: Position and closed flag in the last control event, if it was at the tail. None
        #: otherwise.
        self._told: tuple[int, bool] | None = None
        #: Whether the client has received everything and is waiting.
        self._resting = False

    def is_heavy(self, batch: ReadBatch) -> bool:
        return batch.metered > LIGHT_BYTES

    def encode(self, batch: ReadBatch) -> tuple[bytes, ...]:
        if batch.count:
            return self._events(self._shared.get(batch, self.form, self._data))
        resting, self._resting = self._resting, True
        return self._news() or ((_COMMENT,) if resting else ())

    async def encode_heavy(self, request: Request, batch: ReadBatch) -> tuple[bytes, ...]:
        work = partial(request.offload, self._data, batch)
        return self._events(await self._shared.get_heavy(batch, self.form, work))

    async def finish(self, stream: ResponseStream) -> None:
        if news := self._news():
            await stream.send(*news)
        await stream.close()

    async def fail(self, stream: ResponseStream, error: Exception) -> None:
        if not isinstance(error, _RAISED_AT_RECONNECT):
            raise error
        drop_traceback(error)
        await stream.close()

    def _events(self, data: bytes) -> tuple[bytes, ...]:
        self._resting = self._resting and self._reading.at_tail
        if data:
            control = self._control()
            return (data, control) if len(data) > SHARED_AHEAD else (_joined(data, control),)
        return self._news() if self._reading.at_tail else ()

    def _news(self) -> tuple[bytes, ...]:
        """Return the control event for a client at the tail, unless it already has an equal one."""
        return () if self._told == self._position() else (self._control(),)

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


@lru_cache(maxsize=64)
def _control_event(seq_num: int, cursor: str, at_tail: bool, closed: bool) -> bytes:
    """Encode a control event once for all followers at the same position."""
    return responses.control_event(format_offset(seq_num), cursor, at_tail, closed)


@lru_cache(maxsize=8)
def _joined(data: bytes, control: bytes) -> bytes:
    """Join both events into one object that all followers at the same position share.

    The door then receives that object only once.
    """
    return data + control
