"""Records: append, read, check the tail; one by one, or by opening a session."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from streamfold.model.access_tokens import Operation
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
from streamfold.server.http.offload import LIGHT_BYTES, ArrivalOrder
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import memoize_short
from streamfold.server.live_reads import OWN_BATCH, LiveEncoding, LiveReads, SharedEncodings
from streamfold.server.s2.appends import Appends, AppendSession, Ticket
from streamfold.server.s2.resources import basin_of, stream_of
from streamfold.server.s2.responses import (
    FRAME_HEADERS,
    EventEncoding,
    FrameEncoding,
    report_failure,
)
from streamfold.server.s2.stream_refs import StreamRequest, open_stream, parse_stream_request
from streamfold.store.read.reader import OpenStream
from streamfold.store.read.requests import ReadBatch, ReadRequest, ReadStart, StartKind
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
# Looked up once: in Python 3.11 each lookup of a member takes as long as a call.
_PROTO: Final = Encoding.PROTO
_JSON: Final = Encoding.JSON
_RAW: Final = RecordFormat.RAW
#: Tails that a request looks up together, so that streams that are not in memory load together; and
#: groups that all requests look up at once. The rest wait, without tasks of their own.
_TAILS_TOGETHER, _TAIL_GROUPS = 64, 4


class Records:
    """Handlers of everything below /v1/streams/{stream}/records, and of /v1/tails."""

    def __init__(
        self,
        store: StreamStore,
        access: Access,
        drain_gate: DrainGate,
        appends: Appends,
        followers: LiveReads,
    ) -> None:
        self._store = store
        self._access = access
        self._gate = drain_gate
        self._appends = appends
        self._followers = followers
        self._shared = SharedEncodings()
        self._order = ArrivalOrder()
        self._tail_groups = asyncio.Semaphore(_TAIL_GROUPS)

    async def append(self, request: Request, segment: str) -> None:
        given = request.headers
        negotiated = _negotiate_append((given.get(b"content-type", b""), given.get(b"accept", b"")))
        grant = ROOT if self._access.open else await self._access.grant(request)
        stream_request = parse_stream_request(request, segment, grant)
        rights = AppendRights.of(grant, stream_request.ref)
        if negotiated.session:
            await self._open_append_session(request, stream_request, rights)
            return
        encoding, record_format = _PROTO, _RAW
        if negotiated.request is not _PROTO:
            encoding = _JSON
            if _FORMAT in given:
                record_format = headers.parse_format(text_of(given[_FORMAT]))
        compression = compression_of(request, encoding)
        parts = await request.body_parts(BODY_MAX)
        if parts is None:
            raise body_too_large(encoding, BODY_MAX)
        unparsed = _Unparsed(parts, compression, encoding, record_format)
        wanted, ticket = unparsed.parse_light(), None
        if wanted is not None and self._order.nothing_waits:
            ticket = self._appends.try_submit(stream_request, rights, wanted)
        if ticket is None:
            ticket = await self._submit(request, stream_request, rights, unparsed, wanted)
        ack = await ticket.ack
        ticket.observe()
        if negotiated.response is _PROTO:
            body = records_proto.encode_append_ack(ack.start, ack.end, ack.tail)
            await request.respond(200, _PROTO_HEAD, body)
        else:
            body = records_json.encode_append_ack(ack.start, ack.end, ack.tail)
            await request.respond(200, _JSON_HEAD, body)

    async def _submit(
        self,
        request: Request,
        stream_request: StreamRequest,
        rights: AppendRights,
        unparsed: _Unparsed,
        wanted: AppendInput | None,
    ) -> Ticket:
        """Submit an append in the order of arrival: a later one never overtakes a large one.

        `wanted` is what it asks for, if it parses at once.
        """
        arrival = (request.connection, *stream_request.ref)
        if wanted is not None:
            await self._order.reached(arrival)
            return await self._appends.submit(stream_request, rights, wanted)
        async with self._order.turn(arrival):
            wanted = await request.offload(unparsed.parse)
            return await self._appends.submit(stream_request, rights, wanted)

    async def _open_append_session(
        self, request: Request, stream_request: StreamRequest, rights: AppendRights
    ) -> None:
        async with open_stream(self._store, stream_request, on_append=True):
            pass  # the stream exists, and the key fits
        async with self._access.active_grant(request, stream_request.grant) as active_grant:
            session = AppendSession(
                request, stream_request, rights, active_grant, self._appends, self._gate
            )
            await session.run(await request.open(200, FRAME_HEADERS))

    async def read(self, request: Request, segment: str) -> None:
        negotiated = negotiate_read(request.header("content-type"), request.header("accept"))
        stream_request = parse_stream_request(request, segment, await self._access.grant(request))
        stream_request.grant.require(Operation.READ, *stream_request.ref)
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
        grant = await self._access.allow(request, Operation.CHECK_TAIL, basin, stream)
        tail = await self._store.check_tail(basin, grant.full_stream_name(stream))
        await answer(request, records_json.encode_tail(tail))

    async def tails(self, request: Request) -> None:
        """Answer with the tails of many streams, each as `tail` would answer for it alone."""
        basin = basin_of(request)
        await self._access.allow_some(request, Operation.CHECK_TAIL, basin)
        streams = records_json.decode_tails_input(await read_json(request))
        grant = await self._access.grant(request)  # as it is now that the body has arrived
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
                self._store.usage.record_operation(Operation.CHECK_TAIL, basin)

    async def _tail_of(
        self, request: Request, grant: Grant, basin: BasinName, name: str
    ) -> StreamPosition | Failure:
        try:
            stream = grant.full_stream_name(parse_stream_name(name))
            grant.require(Operation.CHECK_TAIL, basin, stream)
            return await self._store.check_tail(basin, stream)
        except Exception as error:
            return report_failure(error, request.hidden_prefix)

    async def _read_once(
        self, request: Request, stream_request: StreamRequest, query: ReadQuery, response: Encoding
    ) -> None:
        record_format = headers.parse_format(request.header(headers.FORMAT))
        wanted = _wanted(query.unary())
        async with open_stream(self._store, stream_request, on_append=False) as stream:
            if wanted.wait:
                batch = await self._wait_for_batch(request, stream_request, stream, wanted)
                await request.reserve_answer(_answer_size(batch))
            else:
                read = partial(stream.read, wanted, stream_request.sealing_key)
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
        stream: OpenStream,
        wanted: ReadRequest,
    ) -> ReadBatch:
        async with (
            self._access.active_grant(request, stream_request.grant) as active_grant,
            WaitGuard(request, self._gate),
        ):
            reading = stream.read(wanted, stream_request.sealing_key)
            batch = await active_grant.during(reading)
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
        presentation: LiveEncoding,
    ) -> None:
        async with (
            open_stream(self._store, stream_request, on_append=False) as stream,
            self._access.active_grant(request, stream_request.grant) as active_grant,
        ):
            opening = stream.follow(_wanted(query), stream_request.sealing_key)
            await self._followers.serve(request, opening, active_grant, presentation)


class _Unparsed(Body, frozen=True, gc=False):
    """An append as it arrived."""

    #: How the bytes of records are written, if it is JSON.
    record_format: RecordFormat

    def parse_light(self) -> AppendInput | None:
        """What it asks for, if that takes milliseconds at most; None if it is work for a thread."""
        body = self.inflate_light()
        if body is None:
            return None
        if self.encoding is _PROTO:
            return records_proto.decode_light_body(body)
        return records_json.decode_light_body(body, self.record_format)

    def parse(self) -> AppendInput:
        body = self.inflated()
        if self.encoding is Encoding.PROTO:
            return records_proto.decode_append_body(body)
        return records_json.decode_append_body(body, self.record_format)


@memoize_short
def _negotiate_append(content_type_and_accept: tuple[bytes, bytes]) -> Negotiated:
    return negotiate_append(*map(text_of, content_type_and_accept))


def _answer_size(batch: ReadBatch) -> int:
    """Bytes that a batch and its encoding take, at most."""
    return min(OWN_BATCH, 4 * batch.metered)


def _wanted(query: ReadQuery) -> ReadRequest:
    """The read request for the store."""
    return ReadRequest(
        ReadStart(StartKind(query.kind.value), query.start),
        count=query.max_records,
        bytes=query.max_bytes,
        until=query.until,
        clamp=query.clamp,
        wait=query.wait,
    )
