"""Buckets: create, show, list, delete. Streams: create, append to, close, show, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from streamfold.errors import InvalidError, NotFoundError, StreamClosedError, StreamNotFoundError
from streamfold.model.access_tokens import Operation
from streamfold.model.grants import Grant
from streamfold.model.names import BasinName, StreamName, StreamRef, parse_stream_prefix
from streamfold.model.resources import (
    OCTETS,
    Claim,
    Page,
    Producer,
    StreamInfo,
    StreamStatus,
    media_type,
)
from streamfold.records.batch import RecordBatch
from streamfold.server.auth import Access
from streamfold.server.durable_streams import problems
from streamfold.server.durable_streams.content import Body, is_light, read_body, to_batches
from streamfold.server.durable_streams.paths import StreamPath, parse_stream_path, suggest_path
from streamfold.server.http.bodies import NO_STORE, answer_json
from streamfold.server.http.headers import Headers
from streamfold.server.http.offload import ArrivalOrder, ArrivalTurn
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import memoize_short
from streamfold.server.snapshots import PART_LIMITS
from streamfold.store.catalog.listing import LIST_MAX
from streamfold.store.durable_streams import (
    Appended,
    Content,
    ForkSpec,
    StreamSpec,
    prepared,
)
from streamfold.store.log.sealing import SealingKey
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_json
from streamfold.wire.durable_streams.headers import (
    STREAM_CLOSED,
    AppendOptions,
    CreateOptions,
    format_expires_at,
    parse_append,
    parse_create,
)
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.text import SHOWN, parse_parameters, parse_unsigned

#: The right that a request for a bucket needs, by method.
BUCKET_NEEDS: Final = {
    "PUT": Operation.CREATE_BASIN,
    "GET": Operation.GET_BASIN_CONFIG,
    "HEAD": Operation.GET_BASIN_CONFIG,
}


class StreamItem(msgspec.Struct, frozen=True):
    stream_id: str
    created_at_ms: int


class StreamList(msgspec.Struct, frozen=True):
    bucket_id: str
    prefix: str
    stream_count: int
    streams: list[StreamItem]
    next_cursor: str | None
    has_more: bool


class Buckets:
    """Handlers of requests for a bucket."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._store = store
        self._access = access

    async def handle(self, request: Request, basin: BasinName) -> None:
        """Answer a request for the bucket itself."""
        needed = BUCKET_NEEDS.get(request.method)
        if needed is None:
            await problems.refuse_method(request, BUCKET_NEEDS)
            return
        await self._access.allow(request, needed, basin)
        if request.method == "PUT":
            await self._store.durable.ensure_basin(basin)
            await request.respond(201)
        else:
            await self._store.basin_config(basin)
            await answer_json(request, {"bucket_id": basin})

    async def list(self, request: Request, basin: BasinName) -> None:
        """Answer with one page of the streams of a bucket, in byte order of their names."""
        grant = await self._access.allow(request, Operation.LIST_STREAMS, basin)
        query = parse_parameters(request.query)
        prefix = parse_stream_prefix(query.get("prefix", [""])[-1])
        after = parse_stream_prefix(query.get("after", [""])[-1])
        seen = grant.list_streams(prefix, after, _limit(query.get("limit", [str(LIST_MAX)])[-1]))
        page: Page[StreamInfo] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            page = grant.show_streams(await self._store.list_streams(basin, **seen._asdict()))
        streams = [StreamItem(item.name, item.created_at) for item in page.items]
        last = streams[-1].stream_id if streams and page.has_more else None
        found = StreamList(basin, prefix, len(streams), streams, last, page.has_more)
        await answer_json(request, found)


class NothingThereError(NotFoundError):
    """The path cannot name a bucket or a stream."""

    code = "not_found"


def missing(raw_path: str) -> NothingThereError:
    """The error for a path that names nothing; it suggests the path of the stream that was meant."""
    meant = suggest_path(raw_path)
    return NothingThereError(
        f"path {raw_path[:200]!r} names nothing: "
        + (
            f"below a bucket a stream's name is one segment, write its slashes as %2F: {meant[:300]}"
            if meant is not None
            else "a stream is at /{bucket}/{stream}"
        )
    )


def _limit(text: str) -> int:
    limit = parse_unsigned(text, LIST_MAX)
    if not limit:
        raise InvalidError(f"limit {text[:20]!r} must be 1 to {LIST_MAX}")
    return limit


class Streams:
    """Handlers of requests for a stream."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._order = ArrivalOrder()

    async def create(
        self,
        request: Request,
        stream_path: StreamPath,
        source: StreamName | None,
        key: SealingKey | None,
        grant: Grant,
    ) -> None:
        """Create a stream; `source` is the full name of the stream that it forks.

        First content, and a stream that is closed from the start, need the right to append as well.
        """
        options = parse_create(request.header)
        ref = StreamRef(stream_path.basin, stream_path.stream)
        if request.declared_size or options.closed:
            grant.require(Operation.APPEND, *ref)
        body = await read_body(request)
        if body.size:
            grant.require(Operation.APPEND, *ref)
        content: Content = partial(_batches, request, body, None, allow_empty=True)
        if source is None and not await self._store.durable.has_basin(stream_path.basin):
            # A creation that is refused leaves nothing behind, not even its bucket.
            content = prepared(await content(options.content_type or OCTETS))
        spec = _stream_spec(options, source, content, key)
        await self._store.durable.ensure_basin(stream_path.basin)
        status, created = await self._store.durable.create(
            stream_path.basin, stream_path.stream, spec
        )
        headers = [
            (b"content-type", status.traits.content_type.encode()),
            problems.offset_header(status.tail),
            *([STREAM_CLOSED] if status.closed else []),
        ]
        if created:
            headers.append((b"location", request.url_of(stream_path.path).encode()))
        await request.respond(201 if created else 200, headers)

    async def append(
        self, request: Request, stream_path: StreamPath, key: SealingKey | None
    ) -> None:
        options = parse_append(request.header)
        body = await read_body(request)
        if not body.size and not options.closed:
            raise InvalidError("the body is empty: send content, or Stream-Closed: true to close")
        if body.size and options.content_type is None:
            raise InvalidError("content-type is missing: an append names the type of its content")
        claim = _claim(options, has_content=bool(body.size))
        try:
            done = await self._append(request, stream_path, claim, body, key)
        except StreamClosedError:
            status = await self._store.durable.status(stream_path.basin, stream_path.stream)
            headers = (problems.offset_header(status.tail), STREAM_CLOSED, NO_STORE)
            await request.respond(409, headers)
            return
        fresh = bool(body.size) and claim.producer is not None and not done.repeated
        await request.respond(200 if fresh else 204, _append_headers(done))

    async def _append(
        self,
        request: Request,
        stream_path: StreamPath,
        claim: Claim,
        body: Body,
        key: SealingKey | None,
    ) -> Appended:
        """Append in the order of arrival: a later append never overtakes a large one."""
        light = is_light(body, claim.content_type or "")
        if light and body.size and self._order.nothing_waits:
            ref = StreamRef(stream_path.basin, stream_path.stream)
            # The store refuses a type that is not the stream's before it asks for the records.
            records = partial(to_batches, body, allow_empty=False)
            if pending := self._store.durable.try_append(ref, claim, records, key):
                return await pending.durable()
        append = partial(self._store.durable.append, stream_path.basin, stream_path.stream, claim)
        arrival = (request.connection, stream_path.basin, stream_path.stream)
        if light:
            await self._order.reached(arrival)
            return await append(partial(_batches, request, body, None, allow_empty=False), key)
        async with self._order.turn(arrival) as turn:
            return await append(partial(_batches, request, body, turn, allow_empty=False), key)

    async def head(self, request: Request, stream_path: StreamPath) -> None:
        status = await self._store.durable.status(stream_path.basin, stream_path.stream)
        newest = await self._store.durable.snapshot(stream_path.basin, stream_path.stream, None)
        tag = responses.etag(status.id, status.first, status.tail, status.closed)
        headers = [
            (b"content-type", status.traits.content_type.encode()),
            problems.offset_header(status.tail),
            NO_STORE,
            (b"etag", tag.encode()),
            (b"stream-retained-offset", format_offset(status.first).encode()),
            *PART_LIMITS,
            *_lifetime_headers(status),
            *([STREAM_CLOSED] if status.closed else []),
        ]
        if newest is not None:
            headers.append((b"stream-snapshot-offset", format_offset(newest.seq_num).encode()))
            headers.append((b"stream-snapshot-digest", newest.digest.encode()))
        await request.respond(200, headers)

    async def delete(self, request: Request, stream_path: StreamPath) -> None:
        await self._store.durable.delete(stream_path.basin, stream_path.stream)
        await request.respond(204)


async def _batches(
    request: Request, body: Body, turn: ArrivalTurn | None, content_type: str, *, allow_empty: bool
) -> Sequence[RecordBatch]:
    """The records of a body, made in a thread if large; the turn ends when they have their slots."""
    if not body.size:
        return []
    if is_light(body, content_type):
        batches = to_batches(body, content_type, allow_empty=allow_empty)
    else:
        batches = await request.offload(to_batches, body, content_type, allow_empty=allow_empty)
    if turn is not None:
        # The store gives them slots before anything else runs, unless it has to wait for room.
        asyncio.get_running_loop().call_soon(turn.end)
    return batches


def _stream_spec(
    options: CreateOptions, source: StreamName | None, content: Content, key: SealingKey | None
) -> StreamSpec:
    return StreamSpec(
        content_type=options.content_type,
        ttl=options.ttl,
        expires_at=options.expires_at,
        trim_on_snapshot=options.trim_on_snapshot,
        closed=options.closed,
        fork=_fork(options, source),
        content=content,
        key=key,
    )


def _fork(options: CreateOptions, source: StreamName | None) -> ForkSpec | None:
    if source is None:
        return None
    return ForkSpec(source, options.fork_offset, options.fork_sub_offset, is_json)


def source_of(path: str, basin: BasinName) -> StreamName:
    """The stream that a fork names as its source; it must be in the basin of the fork."""
    source = parse_stream_path((path, basin))
    if source is None or source.part is not None:
        raise StreamNotFoundError(basin, path)
    if source.basin != basin:
        raise InvalidError(f"a fork stays in its bucket {basin!r}: {path[:SHOWN]!r} is in another")
    return source.stream


def _claim(options: AppendOptions, *, has_content: bool) -> Claim:
    given = options.producer
    if given is None and options.stream_seq is None and not options.closed and has_content:
        return _content_alone(options.content_type or "")
    return Claim(
        content_type=media_type(options.content_type or "") if has_content else None,
        producer=Producer(given.id, given.epoch, given.seq) if given else None,
        stream_seq=options.stream_seq,
        close=options.closed,
    )


@memoize_short
def _content_alone(content_type: str) -> Claim:
    """The claim of an append that says nothing but the type of its content."""
    return Claim(media_type(content_type))


def _append_headers(done: Appended) -> Headers:
    headers = [problems.offset_header(done.tail)]
    if done.closed:
        headers.append(STREAM_CLOSED)
    if done.producer is not None:
        headers.append((b"producer-epoch", str(done.producer.epoch).encode()))
        headers.append((b"producer-seq", str(done.producer.seq).encode()))
    return headers


def _lifetime_headers(status: StreamStatus) -> Headers:
    if status.traits.ttl is not None:
        return ((b"stream-ttl", str(status.traits.ttl).encode()),)
    if status.traits.expires_at is not None:
        return ((b"stream-expires-at", format_expires_at(status.traits.expires_at).encode()),)
    return ()
