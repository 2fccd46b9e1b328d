"""The routes of the S2 face."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from streamfold.model.access_tokens import Operation
from streamfold.server.auth import Access
from streamfold.server.http.drain import DrainGate
from streamfold.server.http.request import Request
from streamfold.server.http.router import Handler, Router
from streamfold.server.live_reads import LiveReads
from streamfold.server.metrics import AppendMetrics
from streamfold.server.s2.appends import Appends
from streamfold.server.s2.records import Records
from streamfold.server.s2.resources import Account, Basins, Locations, Streams, basin_of
from streamfold.server.s2.snapshots import StreamSnapshots
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
    """Route everything below /v1."""
    appends, followers = Appends(store, instruments), LiveReads(drain_gate, heartbeat)
    locations = Locations(store.location)
    _add_records(router, Records(store, access, drain_gate, appends, followers), store.usage)
    _add_streams(router, Streams(store, access), store.usage)
    StreamSnapshots(store, access).add_to(router)
    _add_basins(router, Basins(store, access), store.usage)
    _add_account(router, Account(store.account, access, locations), store.usage)


#: Returns the basin that a successful request is charged to.
ChargedBasin: TypeAlias = Callable[[Request, tuple[str, ...]], str | None]


def _of_account(request: Request, segments: tuple[str, ...]) -> str | None:
    return None


def _named_by_header(request: Request, segments: tuple[str, ...]) -> str | None:
    return basin_of(request)


def _named_by_path(request: Request, segments: tuple[str, ...]) -> str | None:
    return parse_basin(segments[0]) if segments else None


def _counted(
    usage: UsageRecorder, operation: Operation, handler: Handler, charged: ChargedBasin
) -> Handler:
    """`handler`, with each success charged to the basin of the request."""

    async def counted(request: Request, *segments: str) -> None:
        await handler(request, *segments)
        if request.status < 400:
            usage.record_operation(operation, charged(request, segments))

    return counted


def _add_records(router: Router, records: Records, usage: UsageRecorder) -> None:
    path = "/v1/streams/{}/records"
    # Appends and reads are counted by the store, when they are durable and when they are read.
    router.add("POST", path, Operation.APPEND, records.append)
    router.add("GET", path, Operation.READ, records.read)
    tail = _counted(usage, Operation.CHECK_TAIL, records.tail, _named_by_header)
    # The published description of streams has the last two paths.
    for where in (f"{path}/tail", "/v1/streams/{}/tail", "/streams/{}/tail"):
        router.add("GET", where, Operation.CHECK_TAIL, tail)
    # Counts each tail by itself.
    router.add("POST", "/v1/tails", Operation.CHECK_TAIL, records.tails)


def _add_streams(router: Router, streams: Streams, usage: UsageRecorder) -> None:
    path = "/v1/streams/{}"
    for method, where, operation, handler in (
        ("GET", "/v1/streams", Operation.LIST_STREAMS, streams.list),
        ("POST", "/v1/streams", Operation.CREATE_STREAM, streams.create),
        ("GET", path, Operation.GET_STREAM_CONFIG, streams.config),
        ("PUT", path, Operation.CREATE_STREAM, streams.ensure),
        ("PATCH", path, Operation.RECONFIGURE_STREAM, streams.reconfigure),
        ("DELETE", path, Operation.DELETE_STREAM, streams.delete),
        ("GET", f"{path}/forks", Operation.GET_STREAM_CONFIG, streams.forks),
        ("GET", f"{path}/producers", Operation.GET_STREAM_CONFIG, streams.producers),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _named_by_header))


def _add_basins(router: Router, basins: Basins, usage: UsageRecorder) -> None:
    path = "/v1/basins/{}"
    for method, where, operation, handler in (
        ("GET", "/v1/basins", Operation.LIST_BASINS, basins.list),
        ("POST", "/v1/basins", Operation.CREATE_BASIN, basins.create),
        ("GET", path, Operation.GET_BASIN_CONFIG, basins.config),
        ("PUT", path, Operation.CREATE_BASIN, basins.ensure),
        ("PATCH", path, Operation.RECONFIGURE_BASIN, basins.reconfigure),
        ("DELETE", path, Operation.DELETE_BASIN, basins.delete),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _named_by_path))


def _add_account(router: Router, account: Account, usage: UsageRecorder) -> None:
    tokens, metrics, locations = "/v1/access-tokens", "/v1/metrics", "/v1/locations"
    default = f"{locations}/default"
    for method, where, operation, handler in (
        ("GET", tokens, Operation.LIST_ACCESS_TOKENS, account.list_tokens),
        ("POST", tokens, Operation.ISSUE_ACCESS_TOKEN, account.issue_token),
        ("DELETE", f"{tokens}/{{}}", Operation.REVOKE_ACCESS_TOKEN, account.revoke_token),
        ("GET", metrics, Operation.ACCOUNT_METRICS, account.account_metrics),
        ("GET", locations, Operation.LIST_LOCATIONS, account.list_locations),
        ("GET", default, Operation.GET_DEFAULT_LOCATION, account.default_location),
        ("PUT", default, Operation.SET_DEFAULT_LOCATION, account.set_default_location),
    ):
        router.add(method, where, operation, _counted(usage, operation, handler, _of_account))
    of_basin = _counted(usage, Operation.BASIN_METRICS, account.basin_metrics, _named_by_path)
    router.add("GET", f"{metrics}/{{}}", Operation.BASIN_METRICS, of_basin)
    of_stream = _counted(usage, Operation.STREAM_METRICS, account.stream_metrics, _named_by_path)
    router.add("GET", f"{metrics}/{{}}/{{}}", Operation.STREAM_METRICS, of_stream)
