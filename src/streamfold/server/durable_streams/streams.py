"""Buckets: create, show, list their streams. Streams: create, append to, close, show, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from streamfold.errors import InvalidError, NotFoundError, StreamClosedError, StreamNotFoundError
from streamfold.model.access_tokens import Right
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
from streamfold.server.durable_streams.content import ContentBody, is_light, read_body, to_batches
from streamfold.server.durable_streams.paths import StreamPath, parse_stream_path, suggest_path
from streamfold.server.http.bodies import NO_STORE, answer_json
from streamfold.server.http.headers import Headers, text_of
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.server.http.router import memoize_short
from streamfold.server.snapshots import PART_LIMITS
from streamfold.store.append_queues import AppendOutcome
from streamfold.store.catalog.creation import FirstContent, ForkSpec, NewStream, prepared
from streamfold.store.catalog.listing import LIST_MAX
from streamfold.store.log.admission import AppendRequest, Content
from streamfold.store.log.sealing import SealingKey
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams import responses
from streamfold.wire.durable_streams.content import is_json
from streamfold.wire.durable_streams.headers import (
    APPEND_HEADERS,
    CONTENT_TYPE,
    STREAM_CLOSED,
    AppendOptions,
    CreateOptions,
    format_expires_at,
    parse_append,
    parse_create,
)
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.text import SHOWN, parse_parameters, parse_unsigned

_CONTENT_TYPE: Final = CONTENT_TYPE.encode()
_APPEND_OPTIONS: Final = frozenset(name.encode() for name in APPEND_HEADERS)
#: Right required for a request on a bucket, by method.
BUCKET_NEEDS: Final = {
    "PUT": Right.CREATE_BASIN,
    "GET": Right.GET_BASIN_CONFIG,
    "HEAD": Right.GET_BASIN_CONFIG,
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
    """Handlers of bucket requests."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._store = store
        self._access = access

    async def handle(self, request: Request, basin: BasinName) -> None:
        """Respond to a request for the bucket itself."""
        needed = BUCKET_NEEDS.get(request.method)
        if needed is None:
            await problems.refuse_method(request, BUCKET_NEEDS)
            return
        await self._access.allow(request, needed, basin)
        if request.method == "PUT":
            await self._store.open_basin(basin)
            await request.respond(201)
        else:
            await self._store.basin_config(basin)
            await answer_json(request, {"bucket_id": basin})

    async def list(self, request: Request, basin: BasinName) -> None:
        """Respond with one page of a bucket's streams, in byte order of their names."""
        grant = await self._access.allow(request, Right.LIST_STREAMS, basin)
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
        listing = StreamList(basin, prefix, len(streams), streams, last, page.has_more)
        await answer_json(request, listing)


class NothingThereError(NotFoundError):
    """Raised if a path cannot name a bucket or a stream."""

    code = "not_found"


def missing(raw_path: str) -> NothingThereError:
    """Build the error for a path that names nothing. Suggests a path if slashes need escaping."""
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
    """Handlers of stream requests."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store

    async def create(
        self,
        request: Request,
        stream_path: StreamPath,
        source: StreamName | None,
        key: SealingKey | None,
        grant: Grant,
    ) -> None:
        """Create a stream. `source` is the full name of the stream that it forks.

        Initial content, or creating the stream closed, requires the right to append as well.
        """
        options = parse_create(request.header)
        ref = StreamRef(stream_path.basin, stream_path.stream)
        if request.declared_size or options.closed:
            grant.require(Right.APPEND, *ref)
        body = await read_body(request)
        if body.size:
            grant.require(Right.APPEND, *ref)
        content: FirstContent = partial(_first_records, request, body)
        if source is None and not await self._store.has_basin(stream_path.basin):
            # A rejected creation leaves nothing behind, not even its bucket.
            content = prepared(await content(options.content_type or OCTETS))
        spec = _stream_spec(options, source, content, key)
        await self._store.open_basin(stream_path.basin)
        status, created = await self._store.stream(stream_path.basin, stream_path.stream).create(
            spec
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
        if _APPEND_OPTIONS.isdisjoint(request.headers):
            options = _content_options(request.headers.get(_CONTENT_TYPE, b""))
        else:
            options = parse_append(request.header)
        body = await read_body(request)
        has_content = bool(body.size)
        if not has_content and not options.closed:
            raise InvalidError("the body is empty: send content, or Stream-Closed: true to close")
        if has_content and options.content_type is None:
            raise InvalidError("content-type is missing: an append names the type of its content")
        claim = _claim(options, has_content=has_content)
        try:
            append = AppendRequest(claim=claim, key=key)
            if has_content:
                # The store rejects a type other than the stream's before it asks for the records.
                append.content = _records(request, body, claim.content_type or "")
            stream = self._store.stream(stream_path.basin, stream_path.stream)
            done = await stream.submit(append).appended()
        except StreamClosedError:
            status = await self._store.stream(stream_path.basin, stream_path.stream).status()
            headers = (problems.offset_header(status.tail), STREAM_CLOSED, NO_STORE)
            await request.respond(409, headers)
            return
        fresh = has_content and claim.producer is not None and not done.repeated
        await request.respond(200 if fresh else 204, _append_headers(done))

    async def head(self, request: Request, stream_path: StreamPath) -> None:
        status = await self._store.stream(stream_path.basin, stream_path.stream).status()
        newest = await self._store.stream(stream_path.basin, stream_path.stream).snapshots.find(
            None
        )
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
        await self._store.stream(stream_path.basin, stream_path.stream).delete()
        await request.respond(204)


def _records(request: Request, body: ContentBody, content_type: str) -> Content:
    """Return the source of an append's records. A body that takes long is parsed in a thread."""
    if is_light(body, content_type):
        return partial(to_batches, body, content_type, allow_empty=False)
    return asyncio.ensure_future(request.offload(to_batches, body, content_type, allow_empty=False))


async def _first_records(
    request: Request, body: ContentBody, content_type: str
) -> Sequence[RecordBatch]:
    """Build a new stream's first records, in a thread if the body is large."""
    if not body.size:
        return []
    if is_light(body, content_type):
        return to_batches(body, content_type, allow_empty=True)
    return await request.offload(to_batches, body, content_type, allow_empty=True)


def _stream_spec(
    options: CreateOptions, source: StreamName | None, content: FirstContent, key: SealingKey | None
) -> NewStream:
    return NewStream(
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
    """Return the stream that a fork names as its source. It must be in the fork's basin."""
    source = parse_stream_path((path, basin))
    if source is None or source.part is not None:
        raise StreamNotFoundError(basin, path)
    if source.basin != basin:
        raise InvalidError(f"a fork stays in its bucket {basin!r}: {path[:SHOWN]!r} is in another")
    return source.stream


def _claim(options: AppendOptions, *, has_content: bool) -> Claim:
    producer = options.producer
    if producer is None and options.stream_seq is None and not options.closed and has_content:
        return _content_alone(options.content_type or "")
    return Claim(
        content_type=media_type(options.content_type or "") if has_content else None,
        producer=Producer(producer.id, producer.epoch, producer.seq) if producer else None,
        stream_seq=options.stream_seq,
        close=options.closed,
    )


@memoize_short
def _content_options(content_type: bytes) -> AppendOptions:
    """Return the options of an append without protocol headers, the most common kind."""
    return AppendOptions(text_of(content_type) or None)


@memoize_short
def _content_alone(content_type: str) -> Claim:
    """Return the claim of an append that specifies only its content type."""
    return Claim(media_type(content_type))


def _append_headers(done: AppendOutcome) -> Headers:
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
