"""Basins, streams, access tokens, usage metrics and locations: everything but records."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from streamfold.errors import InvalidError
from streamfold.model.access_tokens import AccessToken, Right
from streamfold.model.configs import SYSTEM_DEFAULTS, StorageClass
from streamfold.model.grants import Grant
from streamfold.model.metrics import Interval, Label, Metric
from streamfold.model.names import BasinName, StreamName, StreamRef
from streamfold.model.resources import BasinInfo, Origin, Page, Provision, StreamInfo
from streamfold.server.auth import Access
from streamfold.server.http.bodies import (
    JSON,
    answer,
    answer_json,
    read_json,
    read_optional_json,
)
from streamfold.server.http.headers import text_of
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.store.catalog.account import Account
from streamfold.store.store import StreamStore
from streamfold.wire.s2 import account as wire
from streamfold.wire.s2 import headers, resources, urls
from streamfold.wire.s2.account import LocationInfo
from streamfold.wire.s2.urls import parse_basin, parse_new_basin, parse_stream, parse_token_id

#: Parsed names to cache: requests repeat the same few names.
NAMES_KEPT: Final = 4096
_BASIN: Final = headers.BASIN.encode()


class BasinEndpoints:
    """Handlers of everything below /v1/basins."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._store = store
        self._access = access

    async def list(self, request: Request) -> None:
        grant = await self._access.allow(request, Right.LIST_BASINS)
        query = urls.parse_basin_list_query(request.query)
        seen = grant.list_basins(query.prefix, query.start_after, query.limit)
        page: Page[BasinInfo] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            page = grant.show_basins(await self._store.list_basins(**seen._asdict()))
        await answer(request, resources.encode_basin_page(page))

    async def create(self, request: Request) -> None:
        token = headers.parse_request_token(request.header(headers.REQUEST_TOKEN))
        await self._access.allow_some(request, Right.CREATE_BASIN)
        body = resources.decode_create_basin(await read_json(request))
        await self._access.allow(request, Right.CREATE_BASIN, body.name)
        info, result = await self._store.create_basin(
            body.name, body.config, location=body.location, request_token=token
        )
        await _answer_provisioned(request, resources.encode_basin_info(info), result, 201)

    async def ensure(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        grant = await self._access.allow(request, Right.CREATE_BASIN, basin)
        grant.require(Right.RECONFIGURE_BASIN, basin)
        if not await self._store.has_basin(basin):
            parse_new_basin(segment)
        body = resources.decode_ensure_basin(await read_optional_json(request))
        info, result = await self._store.ensure_basin(basin, body.config, location=body.location)
        await _answer_provisioned(
            request,
            resources.encode_basin_info(info),
            result,
            201 if result is Provision.CREATED else 200,
        )

    async def config(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Right.GET_BASIN_CONFIG, basin)
        await answer(request, resources.encode_basin_config(await self._store.basin_config(basin)))

    async def reconfigure(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Right.RECONFIGURE_BASIN, basin)
        change = resources.decode_basin_reconfiguration(await read_json(request))
        config = await self._store.reconfigure_basin(basin, change)
        await answer(request, resources.encode_basin_config(config))

    async def delete(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Right.DELETE_BASIN, basin)
        await self._store.delete_basin(basin)
        await request.respond(202)


async def _answer_provisioned(
    request: Request, encoded: bytes, result: Provision, status: int
) -> None:
    said = (headers.PROVISION_RESULT.encode(), result.encode())
    await answer(request, encoded, status, (JSON, said))


class StreamEndpoints:
    """Handlers of everything below /v1/streams except records."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._store = store
        self._access = access

    async def list(self, request: Request) -> None:
        basin = basin_of(request)
        grant = await self._access.allow(request, Right.LIST_STREAMS, basin)
        query = urls.parse_stream_list_query(request.query)
        seen = grant.list_streams(query.prefix, query.start_after, query.limit)
        page: Page[StreamInfo] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            page = grant.show_streams(await self._store.list_streams(basin, **seen._asdict()))
        await answer(request, resources.encode_stream_page(page))

    async def create(self, request: Request) -> None:
        basin = basin_of(request)
        token = headers.parse_request_token(request.header(headers.REQUEST_TOKEN))
        allowed = Right.CREATE_STREAM
        await self._access.allow_some(request, allowed, basin)
        body = resources.decode_create_stream(await read_json(request))
        grant = await self._access.allow(request, allowed, basin, body.name)
        stream = grant.full_stream_name(body.name)
        info, result = await self._store.create_stream(
            basin, stream, body.config, request_token=token
        )
        await _answer_provisioned(
            request, resources.encode_stream_info(replace(info, name=body.name)), result, 201
        )

    async def ensure(self, request: Request, segment: str) -> None:
        await self._allowed(request, Right.CREATE_STREAM, segment)
        basin, stream = await self._allowed(request, Right.RECONFIGURE_STREAM, segment)
        config = resources.decode_stream_config(await read_optional_json(request))
        info, result = await self._store.ensure_stream(basin, stream, config)
        status = 201 if result is Provision.CREATED else 200
        await _answer_provisioned(
            request,
            resources.encode_stream_info(replace(info, name=stream_of(segment))),
            result,
            status,
        )

    async def config(self, request: Request, segment: str) -> None:
        ref = await self._allowed(request, Right.GET_STREAM_CONFIG, segment)
        config = await self._store.stream_config(*ref)
        await answer(request, resources.encode_stream_config(config))

    async def reconfigure(self, request: Request, segment: str) -> None:
        basin, stream = await self._allowed(request, Right.RECONFIGURE_STREAM, segment)
        change = resources.decode_stream_reconfiguration(await read_json(request))
        config = await self._store.reconfigure_stream(basin, stream, change)
        await answer(request, resources.encode_stream_config(config))

    async def delete(self, request: Request, segment: str) -> None:
        ref = await self._allowed(request, Right.DELETE_STREAM, segment)
        await self._store.delete_stream(*ref)
        await request.respond(202)

    async def forks(self, request: Request, segment: str) -> None:
        """Return the stream's origin and a page of those forks that the caller may see."""
        basin, name = basin_of(request), stream_of(segment)
        grant = await self._access.allow(request, Right.GET_STREAM_CONFIG, basin, name)
        start_after, limit = urls.parse_fork_list_query(request.query)
        await request.reserve_answer(LIST_ROOM)
        full_name = grant.full_stream_name(name)
        page = await self._store.stream(basin, full_name).forks(start_after, limit)
        shown = []
        for fork in page.forks:
            named = grant.visible_stream_name(Right.GET_STREAM_CONFIG, basin, fork.name)
            if named is not None:
                times = {"created_at": fork.created_at, "deleted_at": fork.deleted_at}
                forked_at = _shown_origin(grant, basin, fork.origin)
                shown.append({"stream": named, "origin": forked_at} | times)
        origin = _shown_origin(grant, basin, page.origin) if page.origin else None
        await answer_json(request, {"origin": origin, "forks": shown, "next": page.following})

    async def producers(self, request: Request, segment: str) -> None:
        """Return a page of the producers that append to the stream."""
        ref = await self._allowed(request, Right.GET_STREAM_CONFIG, segment)
        start_after, limit = urls.parse_producer_list_query(request.query)
        await request.reserve_answer(LIST_ROOM)
        page = await self._store.stream(*ref).producers(start_after, limit)
        await answer_json(request, {"producers": page.items, "has_more": page.has_more})

    async def _allowed(
        self, request: Request, operation: Right, segment: str
    ) -> tuple[BasinName, StreamName]:
        """Return the request's stream. Raises if the caller may not perform the operation on it."""
        basin, stream = basin_of(request), stream_of(segment)
        grant = await self._access.allow(request, operation, basin, stream)
        return basin, grant.full_stream_name(stream)


def _shown_origin(grant: Grant, basin: str, origin: Origin) -> dict[str, Any]:
    """Return where a fork starts. Omits the source's name if the caller may not see it."""
    source = grant.visible_stream_name(Right.GET_STREAM_CONFIG, basin, origin.stream)
    return {"stream": source, "seq_num": origin.seq_num, "sub_offset": origin.sub_offset}


def basin_of(request: Request) -> BasinName:
    """Return the basin that the request's header names."""
    return _parse_basin(request.headers.get(_BASIN))


@lru_cache(NAMES_KEPT)
def parse_ref(basin: bytes | None, segment: str) -> StreamRef:
    """Return the stream ref from the request's basin header and a path segment."""
    return StreamRef(_parse_basin(basin), stream_of(segment))


@lru_cache(NAMES_KEPT)
def stream_of(segment: str) -> StreamName:
    """Parse a stream name from a path segment."""
    return parse_stream(segment)


@lru_cache(NAMES_KEPT)
def _parse_basin(value: bytes | None) -> BasinName:
    return headers.parse_basin(None if value is None else text_of(value))


class LocationEndpoints:
    """Handles requests for this server's only location."""

    def __init__(self, name: str) -> None:
        self.only = LocationInfo(
            name,
            is_private=True,
            storage_classes=tuple(StorageClass),
            default_storage_class=SYSTEM_DEFAULTS.storage_class,
        )

    def check(self, name: str) -> None:
        """Raise for any other location."""
        if name != self.only.name:
            raise InvalidError(f"location {name[:80]!r} is unknown: choose from {self.only.name}")


class AccountEndpoints:
    """Handlers of everything below /v1/access-tokens, /v1/metrics and /v1/locations."""

    def __init__(self, account: Account, access: Access, locations: LocationEndpoints) -> None:
        self._account = account
        self._access = access
        self._locations = locations

    async def list_tokens(self, request: Request) -> None:
        grant = await self._access.allow(request, Right.LIST_ACCESS_TOKENS)
        query = urls.parse_token_list_query(request.query)
        seen = grant.list_access_tokens(query.prefix, query.start_after, query.limit)
        page: Page[AccessToken] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            tokens = await self._account.list_access_tokens(**seen._asdict())
            page = grant.show_access_tokens(tokens)
        await answer(request, wire.encode_access_token_page(page.items, has_more=page.has_more))

    async def issue_token(self, request: Request) -> None:
        allowed = Right.ISSUE_ACCESS_TOKEN
        await self._access.allow_some(request, allowed)
        token = wire.decode_issue_access_token(await read_json(request))
        grant = await self._access.allow(request, allowed, token_id=token.id)
        secret = await self._account.issue_access_token(token, grant)
        await answer(request, wire.encode_issued_access_token(secret.text), 201)

    async def revoke_token(self, request: Request, segment: str) -> None:
        token_id = parse_token_id(segment)
        await self._access.allow(request, Right.REVOKE_ACCESS_TOKEN, token_id=token_id)
        await self._account.revoke_access_token(token_id)
        await request.respond(204)

    async def account_metrics(self, request: Request) -> None:
        grant = await self._access.allow(request, Right.ACCOUNT_METRICS)
        query = urls.parse_metrics_query(request.query)
        metrics = await self._account.account_metrics(*_asked(query))
        await _show(request, tuple(_of_visible_basins(grant, metric) for metric in metrics))

    async def basin_metrics(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Right.BASIN_METRICS, basin)
        query = urls.parse_metrics_query(request.query)
        await _show(request, await self._account.basin_metrics(basin, *_asked(query)))

    async def stream_metrics(self, request: Request, basin_part: str, stream_part: str) -> None:
        basin, name = parse_basin(basin_part), parse_stream(stream_part)
        grant = await self._access.allow(request, Right.STREAM_METRICS, basin, name)
        query = urls.parse_metrics_query(request.query)
        metrics = await self._account.stream_metrics(
            basin, grant.full_stream_name(name), *_asked(query)
        )
        await _show(request, metrics)

    async def list_locations(self, request: Request) -> None:
        await self._access.allow(request, Right.LIST_LOCATIONS)
        await answer(request, wire.encode_locations([self._locations.only]))

    async def default_location(self, request: Request) -> None:
        await self._access.allow(request, Right.GET_DEFAULT_LOCATION)
        await answer(request, wire.encode_location(self._locations.only))

    async def set_default_location(self, request: Request) -> None:
        await self._access.allow(request, Right.SET_DEFAULT_LOCATION)
        self._locations.check(wire.decode_default_location(await read_json(request)))
        await answer(request, wire.encode_location(self._locations.only))


def _asked(
    query: urls.MetricsQuery,
) -> tuple[str, int | None, int | None, Interval | None]:
    return query.metric_set, query.start, query.end, query.interval


def _of_visible_basins(grant: Grant, metric: Metric) -> Metric:
    """Remove the names of basins that the caller may not see."""
    if not isinstance(metric, Label):
        return metric
    return replace(metric, values=tuple(filter(grant.basins.contains, metric.values)))


async def _show(request: Request, metrics: tuple[Metric, ...]) -> None:
    await answer(request, wire.encode_metrics(metrics))
