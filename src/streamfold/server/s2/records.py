"""Records: append, read and check the tail, in unary requests or in sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from streamfold.model.access_tokens import Right
from streamfold.model.grants import ROOT, Grant
from streamfold.model.names import BasinName, parse_stream_name
from streamfold.model.positions import StreamPosition
from streamfold.records import AppendInput
from streamfold.server.auth import Access, AppendRights
from streamfold.server.http.bodies import (
    JSON,
    PROTO,
    Body,
    answer,
    body_too_large,
    compression_of,
    read_json,
)
from streamfold.server.http.drain import DrainGate, WaitGuard
from streamfold.server.http.headers import text_of
from streamfold.server.http.offload import LIGHT_BYTES
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import memoize_short
from streamfold.server.live_reads import OWN_BATCH, LiveEncoding, LiveReads, SharedEncodings
from streamfold.server.metrics import AppendMetrics
from streamfold.server.s2.appends import AppendSession, append_request
from streamfold.server.s2.resources import basin_of, stream_of
from streamfold.server.s2.responses import (
    FRAME_HEADERS,
    EventEncoding,
    FrameEncoding,
    report_failure,
)
from streamfold.server.s2.stream_refs import StreamRequest, asking_for_key, parse_stream_request
from streamfold.store.append_queues import Submission
from streamfold.store.log.admission import AppendRequest
from streamfold.store.read.requests import ReadBatch, ReadRequest, ReadStart
from streamfold.store.store import StreamStore
from streamfold.wire.s2 import headers, records_json, records_proto
from streamfold.wire.s2.errors import Failure
from streamfold.wire.s2.headers import (
    BODY_MAX,
    Encoding,
    Negotiated,
    negotiate_append,
    negotiate_read,
)
from streamfold.wire.s2.records_json import RecordFormat
from streamfold.wire.s2.sse import EventId
from streamfold.wire.s2.urls import ReadQuery, parse_read_query

_PROTO_HEAD: Final = (PROTO,)
_JSON_HEAD: Final = (JSON,)
_FORMAT: Final = headers.FORMAT.encode()
# Looked up once: in Python 3.11, each lookup of an enum member takes as long as a call.
_PROTO: Final = Encoding.PROTO
_JSON: Final = Encoding.JSON
_RAW: Final = RecordFormat.RAW
#: Tails that a request looks up together, so that streams not in memory load concurrently, and the
#: number of such groups that all requests may look up at once. The rest wait without tasks of their
#: own.
_TAILS_TOGETHER, _TAIL_GROUPS = 64, 4


class Records:
    """Handlers of everything below /v1/streams/{stream}/records, and of /v1/tails."""

    def __init__(
        self,
        store: StreamStore,
        access: Access,
        drain_gate: DrainGate,
        instruments: AppendMetrics,
        followers: LiveReads,
    ) -> None:
        self._store = store
        self._access = access
        self._gate = drain_gate
        self._instruments = instruments
        self._followers = followers
        self._shared = SharedEncodings()
        self._tail_groups = asyncio.Semaphore(_TAIL_GROUPS)

    async def append(self, request: Request, segment: str) -> None:
        request_headers = request.headers
        negotiated = _negotiate_append(
            (request_headers.get(b"content-type", b""), request_headers.get(b"accept", b""))
        )
        grant = ROOT if self._access.open else await self._access.grant(request)
        stream_request = parse_stream_request(request, segment, grant)
        rights = AppendRights.of(grant, stream_request.ref)
        if negotiated.session:
            await self._open_append_session(request, stream_request, rights)
            return
        encoding, record_format = _PROTO, _RAW
        if negotiated.request is not _PROTO:
            encoding = _JSON
            if _FORMAT in request_headers:
                record_format = headers.parse_format(text_of(request_headers[_FORMAT]))
        compression = compression_of(request)
        parts = await request.body_parts(BODY_MAX)
        if parts is None:
            raise body_too_large(encoding, BODY_MAX)
        body = _AppendBody(parts, compression, encoding, record_format)
        submission = self._submit(request, stream_request, rights, body)
        try:
            ack = await submission.ack
        except BaseException:
            del submission  # the error refers to this frame and is part of the ack: break the cycle
            raise
        self._instruments.observe(submission, ack)
        if negotiated.response is _PROTO:
            answer_body = records_proto.encode_append_ack(ack.start, ack.end, ack.tail)
            await request.respond(200, _PROTO_HEAD, answer_body)
        else:
            answer_body = records_json.encode_append_ack(ack.start, ack.end, ack.tail)
            await request.respond(200, _JSON_HEAD, answer_body)

    def _submit(
        self,
        request: Request,
        stream_request: StreamRequest,
        rights: AppendRights,
        body: _AppendBody,
    ) -> Submission:
        """Submit an append.

        A body that takes long to parse is parsed in a thread and keeps its place.
        """
        plain = body.inflate_light()
        if plain is not None and body.is_light(plain):
            append = append_request(stream_request, rights, body.parse(plain))
            return self._store.stream(*stream_request.ref).submit(append)

        async def parse() -> AppendRequest:
            append = await request.offload(body.inflate_and_parse)
            return append_request(stream_request, rights, append)

        return self._store.stream(*stream_request.ref).submit(asyncio.ensure_future(parse()))

    async def _open_append_session(
        self, request: Request, stream_request: StreamRequest, rights: AppendRights
    ) -> None:
        stream = self._store.stream(*stream_request.ref)
        with asking_for_key(stream_request):
            await stream.open(
                stream_request.sealing_key, create_with=stream_request.create_with, on_append=True
            )
        async with self._access.active_grant(request, stream_request.grant) as active_grant:
            session = AppendSession(
                request,
                stream,
                partial(append_request, stream_request, rights),
                active_grant,
                self._instruments,
                self._gate,
            )
            await session.run(await request.open(200, FRAME_HEADERS))

    async def read(self, request: Request, segment: str) -> None:
        negotiated = negotiate_read(request.header("content-type"), request.header("accept"))
        stream_request = parse_stream_request(request, segment, await self._access.grant(request))
        stream_request.grant.require(Right.READ, *stream_request.ref)
        query = parse_read_query(request.query)
        match negotiated.response:
            case Encoding.S2S:
                accepted = headers.parse_accept_encoding(request.header("accept-encoding"))
                await self._follow(
                    request, stream_request, query, FrameEncoding(accepted, self._shared)
                )
            case Encoding.SSE:
                await self._read_events(request, stream_request, query)
            case _:
                await self._read_once(request, stream_request, query, negotiated.response)

    async def tail(self, request: Request, segment: str) -> None:
        basin, stream = basin_of(request), stream_of(segment)
        grant = await self._access.allow(request, Right.CHECK_TAIL, basin, stream)
        tail = await self._store.check_tail(basin, grant.full_stream_name(stream))
        await answer(request, records_json.encode_tail(tail))

    async def tails(self, request: Request) -> None:
        """Return the tails of many streams, each as `tail` would return it alone."""
        basin = basin_of(request)
        await self._access.allow_some(request, Right.CHECK_TAIL, basin)
        streams = records_json.decode_tails_input(await read_json(request))
        grant = await self._access.grant(request)  # again, now that the body has arrived
        await request.reserve_answer(LIST_ROOM)
        tails: list[StreamPosition | Failure] = []
        for first in range(0, len(streams), _TAILS_TOGETHER):
            async with self._tail_groups, asyncio.TaskGroup() as group:
                lookups = [
                    group.create_task(self._tail_of(request, grant, basin, stream))
                    for stream in streams[first : first + _TAILS_TOGETHER]
                ]
            tails += [lookup.result() for lookup in lookups]
        await answer(request, records_json.encode_tails(streams, tails))
        for tail in tails:
            if isinstance(tail, StreamPosition):
                self._store.usage.record_operation(Right.CHECK_TAIL, basin)

    async def _tail_of(
        self, request: Request, grant: Grant, basin: BasinName, name: str
    ) -> StreamPosition | Failure:
        try:
            stream = grant.full_stream_name(parse_stream_name(name))
            grant.require(Right.CHECK_TAIL, basin, stream)
            return await self._store.check_tail(basin, stream)
        except Exception as error:
            return report_failure(error, request.hidden_prefix)

    async def _read_once(
        self, request: Request, stream_request: StreamRequest, query: ReadQuery, response: Encoding
    ) -> None:
        record_format = headers.parse_format(request.header(headers.FORMAT))
        read_request = _read_request(query.unary())
        read = partial(
            self._store.stream(*stream_request.ref).read,
            read_request,
            stream_request.sealing_key,
            create_with=stream_request.create_with,
        )
        with asking_for_key(stream_request):
            if read_request.wait:
                batch = await self._wait_for_batch(request, stream_request, read)
                await request.reserve_answer(_answer_size(batch))
            else:
                batch = await request.make_answer(OWN_BATCH, read, _answer_size)
        if response is Encoding.PROTO:
            body = records_proto.encode_read_batch(batch.payload(), batch.tail)
            await answer(request, body, headers=(PROTO,))
        else:
            encode = partial(
                records_json.encode_read_batch, batch.payload(), record_format, batch.tail
            )
            heavy = batch.metered > LIGHT_BYTES
            await answer(request, await request.offload(encode) if heavy else encode())

    async def _wait_for_batch(
        self,
        request: Request,
        stream_request: StreamRequest,
        read: Callable[[], Coroutine[object, object, ReadBatch]],
    ) -> ReadBatch:
        async with (
            self._access.active_grant(request, stream_request.grant) as active_grant,
            WaitGuard(request, self._gate),
        ):
            batch = await active_grant.during(read())
            await active_grant.require()
            return batch

    async def _read_events(
        self, request: Request, stream_request: StreamRequest, query: ReadQuery
    ) -> None:
        record_format = headers.parse_format(request.header(headers.FORMAT))
        last = request.header(headers.LAST_EVENT_ID)
        if last is not None:
            query = query.resumed(EventId.parse(last))
        await self._follow(
            request, stream_request, query, EventEncoding(record_format, self._shared)
        )

    async def _follow(
        self,
        request: Request,
        stream_request: StreamRequest,
        query: ReadQuery,
        encoding: LiveEncoding,
    ) -> None:
        opening = self._store.stream(*stream_request.ref).follow(
            _read_request(query),
            stream_request.sealing_key,
            create_with=stream_request.create_with,
            before_own_batch=partial(request.reserve_answer, OWN_BATCH),
        )
        with asking_for_key(stream_request):
            async with self._access.active_grant(request, stream_request.grant) as active_grant:
                await self._followers.serve(request, opening, active_grant, lambda _: encoding)


class _AppendBody(Body, frozen=True, gc=False):
    """The body of an append request as it arrived."""

    #: How record bytes are encoded, if the body is JSON.
    record_format: RecordFormat

    def is_light(self, body: bytes) -> bool:
        """Return whether parsing takes a few milliseconds at most."""
        if self.encoding is _PROTO:
            return records_proto.is_light(body)
        return records_json.is_light(body)

    def parse(self, body: bytes) -> AppendInput:
        """Parse the inflated body."""
        if self.encoding is _PROTO:
            return records_proto.decode_append_body(body)
        return records_json.decode_append_body(body, self.record_format)

    def inflate_and_parse(self) -> AppendInput:
        return self.parse(self.inflated())


@memoize_short
def _negotiate_append(content_type_and_accept: tuple[bytes, bytes]) -> Negotiated:
    return negotiate_append(*map(text_of, content_type_and_accept))


def _answer_size(batch: ReadBatch) -> int:
    """Return the maximum bytes of a batch and its encoding."""
    return min(OWN_BATCH, 4 * batch.metered)


def _read_request(query: ReadQuery) -> ReadRequest:
    """Convert a query to the store's read request."""
    return ReadRequest(
        ReadStart(query.kind, query.start),
        count=query.max_records,
        bytes=query.max_bytes,
        until=query.until,
        clamp=query.clamp,
        wait=query.wait,
    )
