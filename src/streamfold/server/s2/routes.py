"""The routes of the S2 face."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from streamfold.model.access_tokens import Right
from streamfold.server.auth import Access
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.request import Request
from streamfold.server.http.router import Handler, Router
from streamfold.server.live_reads import LiveReads
from streamfold.server.metrics import AppendMetrics
from streamfold.server.s2.records import Records
from streamfold.server.s2.resources import (
    AccountEndpoints,
    BasinEndpoints,
    LocationEndpoints,
    StreamEndpoints,
    basin_of,
)
from streamfold.server.s2.snapshots import SnapshotEndpoints
from streamfold.store.store import StreamStore
from streamfold.store.usage.recorder import UsageRecorder
from streamfold.wire.s2.urls import parse_basin


def add_s2(
    router: Router,
    store: StreamStore,
    drain_gate: DrainGate,
    instruments: AppendMetrics,
    heartbeat: tuple[float, float],
    access: Access,
) -> None:
    """Add all routes below /v1."""
    followers = LiveReads(drain_gate, heartbeat)
    locations = LocationEndpoints(store.location)
    _add_records(router, Records(store, access, drain_gate, instruments, followers), store.usage)
    _add_streams(router, StreamEndpoints(store, access), store.usage)
    SnapshotEndpoints(store, access).add_to(router)
    _add_basins(router, BasinEndpoints(store, access), store.usage)
    _add_account(router, AccountEndpoints(store.account, access, locations), store.usage)


#: Returns the basin that a successful request is charged to.
ChargedBasin: TypeAlias = Callable[[Request, tuple[str, ...]], str | None]


def _of_account(request: Request, segments: tuple[str, ...]) -> str | None:
    return None


def _named_by_header(request: Request, segments: tuple[str, ...]) -> str | None:
    return basin_of(request)


def _named_by_path(request: Request, segments: tuple[str, ...]) -> str | None:
    return parse_basin(segments[0]) if segments else None


def _counted(
    usage: UsageRecorder, operation: Right, handler: Handler, charged: ChargedBasin
) -> Handler:
    """Wrap `handler` to charge each successful request to its basin."""

    async def counted(request: Request, *segments: str) -> None:
        await handler(request, *segments)
        if request.status < 400:
            usage.record_operation(operation, charged(request, segments))

    return counted


def _add_records(router: Router, records: Records, usage: UsageRecorder) -> None:
    path = "/v1/streams/{}/records"
    # The store counts appends when they are durable, and reads when they are served.
    router.add("POST", path, Right.APPEND, records.append)
    router.add("GET", path, Right.READ, records.read)
    tail = _counted(usage, Right.CHECK_TAIL, records.tail, _named_by_header)
    # S2's published API description of streams has the last two paths.
    for where in (f"{path}/tail", "/v1/streams/{}/tail", "/streams/{}/tail"):
        router.add("GET", where, Right.CHECK_TAIL, tail)
    # Not wrapped, since the handler counts each tail itself.
    router.add("POST", "/v1/tails", Right.CHECK_TAIL, records.tails)


def _add_streams(router: Router, streams: StreamEndpoints, usage: UsageRecorder) -> None:
    path = "/v1/streams/{}"
    for method, where, operation, handler in (
        ("GET", "/v1/streams", Right.LIST_STREAMS, streams.list),
        ("POST", "/v1/streams", Right.CREATE_STREAM, streams.create),
        ("GET", path, Right.GET_STREAM_CONFIG, streams.config),
        ("PUT", path, Right.CREATE_STREAM, streams.ensure),
        ("PATCH", path, Right.RECONFIGURE_STREAM, streams.reconfigure),
        ("DELETE", path, Right.DELETE_STREAM, streams.delete),
        ("GET", f"{path}/forks", Right.GET_STREAM_CONFIG, streams.forks),
        ("GET", f"{path}/producers", Right.GET_STREAM_CONFIG, streams.producers),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _named_by_header))


def _add_basins(router: Router, basins: BasinEndpoints, usage: UsageRecorder) -> None:
    path = "/v1/basins/{}"
    for method, where, operation, handler in (
        ("GET", "/v1/basins", Right.LIST_BASINS, basins.list),
        ("POST", "/v1/basins", Right.CREATE_BASIN, basins.create),
        ("GET", path, Right.GET_BASIN_CONFIG, basins.config),
        ("PUT", path, Right.CREATE_BASIN, basins.ensure),
        ("PATCH", path, Right.RECONFIGURE_BASIN, basins.reconfigure),
        ("DELETE", path, Right.DELETE_BASIN, basins.delete),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _named_by_path))


def _add_account(router: Router, account: AccountEndpoints, usage: UsageRecorder) -> None:
    tokens, metrics, locations = "/v1/access-tokens", "/v1/metrics", "/v1/locations"
    default = f"{locations}/default"
    for method, where, operation, handler in (
        ("GET", tokens, Right.LIST_ACCESS_TOKENS, account.list_tokens),
        ("POST", tokens, Right.ISSUE_ACCESS_TOKEN, account.issue_token),
        ("DELETE", f"{tokens}/{{}}", Right.REVOKE_ACCESS_TOKEN, account.revoke_token),
        ("GET", metrics, Right.ACCOUNT_METRICS, account.account_metrics),
        ("GET", locations, Right.LIST_LOCATIONS, account.list_locations),
        ("GET", default, Right.GET_DEFAULT_LOCATION, account.default_location),
        ("PUT", default, Right.SET_DEFAULT_LOCATION, account.set_default_location),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _of_account))
    of_basin = _counted(usage, Right.BASIN_METRICS, account.basin_metrics, _named_by_path)
    router.add("GET", f"{metrics}/{{}}", Right.BASIN_METRICS, of_basin)
    of_stream = _counted(usage, Right.STREAM_METRICS, account.stream_metrics, _named_by_path)
    router.add("GET", f"{metrics}/{{}}/{{}}", Right.STREAM_METRICS, of_stream)
