"""Creates, shows and lists buckets; a bucket is a basin."""

from __future__ import annotations

from typing import Final

import msgspec

from streamfold.errors import InvalidError, NotFoundError
from streamfold.model.access_tokens import Operation
from streamfold.model.names import BasinName, parse_stream_prefix
from streamfold.model.resources import Page, StreamInfo
from streamfold.server.auth import Access
from streamfold.server.durable_streams import problems
from streamfold.server.durable_streams.paths import suggest_path
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.store.catalog.listing import LIST_MAX
from streamfold.store.store import StreamStore
from streamfold.wire.text import parse_parameters, parse_unsigned

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
