"""Encodes errors and read sessions for S2 clients: as a response, as frames, or as events.

Server-sent events carry ids, so a browser can resume a session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from streamfold.errors import RetryLaterError, StoreClosingError
from streamfold.model.positions import STREAM_START
from streamfold.server.http.bodies import JSON
from streamfold.server.http.exchange import Buffer
from streamfold.server.http.headers import Headers
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.problems import drop_traceback, log_failure, may_change
from streamfold.server.http.request import Request
from streamfold.server.http.response_stream import ResponseStream
from streamfold.server.live_reads import SharedEncodings
from streamfold.store.read.requests import ReadBatch
from streamfold.store.store import wall_clock
from streamfold.wire.compression import Compression
from streamfold.wire.s2 import frames, sse
from streamfold.wire.s2.errors import Failure, describe_failure
from streamfold.wire.s2.frames import encode_frame
from streamfold.wire.s2.headers import RETRY_AFTER_MS
from streamfold.wire.s2.records_json import RecordFormat, encode_read_batch
from streamfold.wire.s2.records_proto import (
    FRAME_PAYLOAD_MAX,
    encode_frame_batches,
    encode_frame_parts,
)
from streamfold.wire.s2.sse import EventId

#: Milliseconds after which a client rejected by a drain may find the next server.
DRAINED_RETRY_MS = b"500"
#: Pause before other rejected requests may be retried: in milliseconds, and in seconds for clients
#: that only know HTTP.
_RETRY_MS, _RETRY = b"1000", b"1"


async def write_problem(request: Request, error: Exception) -> None:
    """Respond to a request that failed before its response began."""
    failure = describe_failure(error, request.hidden_prefix, changes=may_change(request))
    headers = [JSON]
    if isinstance(error, RetryLaterError):
        pause = DRAINED_RETRY_MS if isinstance(error, StoreClosingError) else _RETRY_MS
        headers += [(RETRY_AFTER_MS.encode(), pause), (b"retry-after", _RETRY)]
    await request.respond(failure.status, headers, failure.body)


async def end_frames(stream: ResponseStream, error: Exception, *, changes: bool = False) -> None:
    """End a failed frame session.

    Nothing may follow. `changes`: whether the session appends, rather than only reads.
    """
    failure = report_failure(error, stream.hidden_prefix, changes=changes)
    await stream.send(frames.encode_terminal(failure))
    await stream.close()


async def end_events(stream: ResponseStream, error: Exception) -> None:
    """End a failed session of server-sent events, without [DONE]."""
    await stream.send(sse.encode_error(report_failure(error, stream.hidden_prefix)))
    await stream.close()


def report_failure(error: Exception, hidden_prefix: str, *, changes: bool = False) -> Failure:
    """Describe an error for the client, log the details it may not see, and free the traceback."""
    log_failure(error)
    drop_traceback(error)
    return describe_failure(error, hidden_prefix, changes=changes)


#: Bytes from which a batch part is worth sending directly from memory, without a copy.
_LARGE_PART: Final = 16 << 10
#: Headers of every frame session. Proxies must neither buffer nor transform the response.
FRAME_HEADERS: Final[Headers] = (
    (b"content-type", b"s2s/proto"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_HEADERS: Final[Headers] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class FrameEncoding:
    """Encodes batches as frames, compressed as the client requested."""

    headers = FRAME_HEADERS

    def __init__(self, compression: Compression, shared: SharedEncodings) -> None:
        self._compression = self.form = compression
        self._shared = shared

    def is_heavy(self, batch: ReadBatch) -> bool:
        if self._compression is Compression.NONE:
            return sum(map(len, batch.parts)) > FRAME_PAYLOAD_MAX  # must be split between records
        return batch.metered > LIGHT_BYTES

    def encode(self, batch: ReadBatch) -> tuple[Buffer, ...]:
        plain = self._compression is Compression.NONE
        if plain and batch.metered > _LARGE_PART * len(batch.parts):
            return encode_frame_parts(batch.parts, batch.tail)
        return (self._shared.get(batch, self._compression, self._frames),)

    async def encode_heavy(self, request: Request, batch: ReadBatch) -> tuple[bytes, ...]:
        work = partial(request.offload, self._frames, batch)
        return (await self._shared.get_heavy(batch, self._compression, work),)

    def _frames(self, batch: ReadBatch) -> bytes:
        messages = encode_frame_batches(batch.payload(), batch.tail)
        return b"".join([encode_frame(message, self._compression) for message in messages])

    async def finish(self, stream: ResponseStream) -> None:
        await stream.close()

    async def fail(self, stream: ResponseStream, error: Exception) -> None:
        await end_frames(stream, error)


class EventEncoding:
    """Encodes batches as events. Their ids count the records and bytes sent on this connection."""

    headers = _HEADERS

    def __init__(
        self,
        record_format: RecordFormat,
        shared: SharedEncodings,
        now: Callable[[], int] = wall_clock,
    ) -> None:
        self._format = self.form = record_format
        self._shared = shared
        self._count = 0
        self._metered = 0
        self._now = now

    def is_heavy(self, batch: ReadBatch) -> bool:
        return batch.metered > LIGHT_BYTES

    def encode(self, batch: ReadBatch) -> tuple[bytes, ...]:
        if not batch.count:
            return (sse.encode_ping(self._now(), batch.tail or STREAM_START),)
        return self._event(batch, self._shared.get(batch, self._format, self._json))

    async def encode_heavy(self, request: Request, batch: ReadBatch) -> tuple[bytes, ...]:
        work = partial(request.offload, self._json, batch)
        return self._event(batch, await self._shared.get_heavy(batch, self._format, work))

    def _event(self, batch: ReadBatch, encoded: bytes) -> tuple[bytes, ...]:
        self._count += batch.count
        self._metered += batch.metered
        event_id = EventId(batch.end_seq_num - 1, self._count, self._metered)
        return sse.batch_head(event_id), encoded, sse.EVENT_END

    def _json(self, batch: ReadBatch) -> bytes:
        return encode_read_batch(batch.payload(), self._format, batch.tail)

    async def finish(self, stream: ResponseStream) -> None:
        await stream.send(sse.DONE)
        await stream.close()

    async def fail(self, stream: ResponseStream, error: Exception) -> None:
        await end_events(stream, error)
