"""The routes of the Durable Streams face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from streamfold.model import grants
from streamfold.model.access_tokens import Right
from streamfold.model.grants import Grant
from streamfold.model.names import BasinName, StreamName
from streamfold.server.auth import Access
from streamfold.server.durable_streams import problems
from streamfold.server.durable_streams.content import whole_updates
from streamfold.server.durable_streams.events import Events
from streamfold.server.durable_streams.paths import (
    CONTROL,
    POSITIONED,
    ROOT,
    StreamPath,
    SubResource,
    parse_bucket,
    parse_stream_path,
)
from streamfold.server.durable_streams.reads import BeyondTailError, Reads, parse_query
from streamfold.server.durable_streams.streams import (
    BUCKET_NEEDS,
    Buckets,
    Streams,
    missing,
    source_of,
)
from streamfold.server.durable_streams.subscriptions import Subscriptions
from streamfold.server.http.bodies import answer_json
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.headers import text_of
from streamfold.server.http.problems import ClientHangupError, answer_problem, drop_traceback
from streamfold.server.http.request import Request
from streamfold.server.http.router import Route
from streamfold.server.snapshots import SnapshotHandler, SnapshotHandlers, SnapshotRequest
from streamfold.store.log.sealing import SealingKey
from streamfold.store.store import StreamStore
from streamfold.wire.durable_streams.headers import parse_trim_on_snapshot
from streamfold.wire.durable_streams.offsets import format_offset
from streamfold.wire.s2 import headers as s2_headers

_ENCRYPTION_KEY: Final = s2_headers.ENCRYPTION_KEY.encode()
#: All subscription routes are below this path.
_CONTROLS = f"{ROOT}{CONTROL}/"
#: Right required for a request on a stream or one of its sub-resources, by method.
_NEEDED = {
    (None, "PUT"): Right.CREATE_STREAM,
    (None, "POST"): Right.APPEND,
    (None, "GET"): Right.READ,
    (None, "HEAD"): Right.CHECK_TAIL,
    (None, "DELETE"): Right.DELETE_STREAM,
    (SubResource.SNAPSHOT, "PUT"): Right.APPEND,
    (SubResource.SNAPSHOT, "GET"): Right.READ,
    (SubResource.SNAPSHOT, "DELETE"): Right.TRIM,
    (SubResource.SNAPSHOTS, "GET"): Right.READ,
    (SubResource.PARTS, "POST"): Right.APPEND,
    (SubResource.PARTS, "GET"): Right.READ,
    (SubResource.PARTS, "DELETE"): Right.APPEND,
    (SubResource.RETENTION, "PUT"): Right.TRIM,
    (SubResource.BOOTSTRAP, "GET"): Right.READ,
}


def _list_routes() -> Iterator[Route]:
    """Yield every bucket and stream route."""
    for method, needed in BUCKET_NEEDS.items():
        yield Route(method, "/{}", needed)
    yield Route("GET", "/{}/streams", Right.LIST_STREAMS)
    for (part, method), needed in _NEEDED.items():
        rest = "" if part is None else f"/{part}/{{}}" if part in POSITIONED else f"/{part}"
        if part is SubResource.PARTS and method == "POST":
            rest = "/snapshot/{}/parts"
        yield Route(method, f"/{{}}/{{}}{rest}", needed)
        yield Route(method, f"{ROOT}{{}}{rest}", needed)


class DurableStreamsFace:
    """Serves every request that names a stream by its URL."""

    def __init__(
        self,
        store: StreamStore,
        drain_gate: DrainGate,
        access: Access,
        subscriptions: Subscriptions,
        default_basin: BasinName,
        long_poll: float,
        *,
        private: bool,
    ) -> None:
        self._store = store
        self._access = access
        self._default_basin = default_basin
        self._streams = Streams(store)
        self._reads = Reads(store, drain_gate, long_poll, private=private)
        self._events = Events(store, drain_gate)
        self._snapshots = SnapshotHandlers(store, format_offset, whole_updates)
        self._buckets = Buckets(store, access)
        self._subscriptions = subscriptions

    @property
    def routes(self) -> Sequence[Route]:
        """Every route, with the right that it requires."""
        return (*_list_routes(), *self._subscriptions.routes)

    def serves(self, raw_path: str) -> bool:
        """Return whether a path without its own route may name a stream or bucket."""
        return raw_path.startswith(ROOT) or not raw_path.startswith("/v1/")

    async def handle(self, request: Request) -> None:
        """Respond to a request, even if it fails before its response begins."""
        request.added_headers = (
            *request.added_headers,
            problems.RESOURCE_POLICY,
            problems.SANDBOX,
        )
        if request.method == "OPTIONS":
            await request.respond(204)
            return
        path = request.raw_path
        try:
            if path.startswith(_CONTROLS):
                await self._subscriptions.handle(request, path[len(_CONTROLS) - 1 :])
                return
            stream_path = parse_stream_path((path, self._default_basin))
            if stream_path is not None:
                path = stream_path.path
                await self._dispatch(request, stream_path)
            else:
                await self._handle_bucket(request)
        except ClientHangupError:
            raise
        except BeyondTailError as error:
            drop_traceback(error)
            problem = {"code": error.code, "message": error.message}
            await answer_json(request, problem, 416, (problems.offset_header(error.tail),))
        except Exception as error:
            await answer_problem(request, error, partial(problems.write_problem, path=path))

    async def _handle_bucket(self, request: Request) -> None:
        bucket = parse_bucket(request.raw_path)
        if bucket is None:
            raise missing(request.raw_path)
        basin, listed = bucket
        if not listed:
            await self._buckets.handle(request, basin)
        elif request.method == "GET":
            await self._buckets.list(request, basin)
        else:
            await problems.refuse_method(request, ("GET",))

    async def _dispatch(self, request: Request, stream_path: StreamPath) -> None:
        method = request.method
        needed = _NEEDED.get((stream_path.part, method))
        if needed is None:
            allowed = (verb for part, verb in _NEEDED if part is stream_path.part)
            await problems.refuse_method(request, allowed)
            return
        stream_path, source, grant = await self._allowed(request, stream_path, needed)
        key = _key(request)
        match stream_path.part, method:
            case None, "PUT":
                await self._streams.create(request, stream_path, source, key, grant)
            case None, "POST":
                await self._streams.append(request, stream_path, key)
            case None, "GET":
                await self._read(request, stream_path, key, grant)
            case None, "HEAD":
                await self._streams.head(request, stream_path)
            case None, _:
                await self._streams.delete(request, stream_path)
            case part, _:
                basin, stream, path, _, position = stream_path
                snapshot_request = SnapshotRequest(basin, stream, path, position, key)
                await self._snapshot_handler(part, method, position)(request, snapshot_request)

    def _snapshot_handler(
        self, part: SubResource, method: str, position: str | None
    ) -> SnapshotHandler:
        match part, method:
            case SubResource.SNAPSHOT, "PUT":
                return self._snapshots.publish
            case SubResource.SNAPSHOT, "DELETE":
                return self._snapshots.refuse_deletion
            case SubResource.SNAPSHOT, _:
                return self._snapshots.newest if position is None else self._snapshots.read
            case SubResource.SNAPSHOTS, _:
                return self._snapshots.list
            case SubResource.PARTS, "POST":
                return self._snapshots.stage_part
            case SubResource.PARTS, "DELETE":
                return self._snapshots.discard_parts
            case SubResource.PARTS, _:
                return self._snapshots.list_parts
            case SubResource.RETENTION, _:
                return self._snapshots.retain
        return self._snapshots.bootstrap

    async def _allowed(
        self, request: Request, stream_path: StreamPath, needed: Right
    ) -> tuple[StreamPath, StreamName | None, Grant]:
        """Check the caller's rights.

        Returns the path with the stream's full name, the full name of a fork's source, and the
        grant.
        """
        if self._access.open and needed is Right.APPEND and stream_path.part is None:
            return stream_path, None, grants.ROOT
        grant = await self._access.allow(request, needed, stream_path.basin, stream_path.stream)
        source = None
        if needed is Right.CREATE_STREAM and not await self._store.has_basin(stream_path.basin):
            grant.require(Right.CREATE_BASIN, stream_path.basin)
        named = request.header("stream-forked-from")
        if needed is Right.CREATE_STREAM and named is not None:
            source = grant.full_stream_name(source_of(named, stream_path.basin))
            grant.require(Right.READ, stream_path.basin, source)
        if grant.stream_prefix:
            stream_path = stream_path._replace(stream=grant.full_stream_name(stream_path.stream))
        publishing = stream_path.part is SubResource.SNAPSHOT and needed is Right.APPEND
        if publishing and parse_trim_on_snapshot(request.header):
            grant.require(Right.TRIM, stream_path.basin, stream_path.stream)
        return stream_path, source, grant

    async def _read(
        self, request: Request, stream_path: StreamPath, key: SealingKey | None, grant: Grant
    ) -> None:
        query = parse_query(request.query)
        if query.live is None:
            await self._reads.catch_up(request, stream_path, query, key)
            return
        async with self._access.active_grant(request, grant) as active_grant:
            live = self._events.serve if query.live == "sse" else self._reads.long_poll
            await live(request, stream_path, query, key, active_grant)


def _key(request: Request) -> SealingKey | None:
    key_text = request.headers.get(_ENCRYPTION_KEY)
    key = s2_headers.parse_encryption_key(text_of(key_text)) if key_text else None
    return None if key is None else SealingKey(key.reveal())
