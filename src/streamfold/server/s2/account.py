"""Access tokens, usage metrics and locations."""

from __future__ import annotations

from streamfold.errors import InvalidError
from streamfold.model.access_tokens import AccessToken, Operation
from streamfold.model.configs import SYSTEM_DEFAULTS, StorageClass
from streamfold.model.metrics import Interval, Metric
from streamfold.model.resources import Page
from streamfold.server.auth import Access
from streamfold.server.http.bodies import answer, read_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.store.catalog.account import Account as StoreAccount
from streamfold.wire.s2 import account as wire
from streamfold.wire.s2 import urls
from streamfold.wire.s2.account import Location
from streamfold.wire.s2.urls import parse_basin, parse_stream, parse_token_id


class Locations:
    """The only location that this server has."""

    def __init__(self, name: str) -> None:
        self.only = Location(
            name,
            is_private=True,
            storage_classes=tuple(StorageClass),
            default_storage_class=SYSTEM_DEFAULTS.storage_class,
        )

    def check(self, name: str) -> None:
        """Refuse any other location."""
        if name != self.only.name:
            raise InvalidError(f"location {name[:80]!r} is unknown: choose from {self.only.name}")


class Account:
    """Handlers of everything below /v1/access-tokens, /v1/metrics and /v1/locations."""

    def __init__(self, account: StoreAccount, access: Access, locations: Locations) -> None:
        self._account = account
        self._access = access
        self._locations = locations

    async def list_tokens(self, request: Request) -> None:
        grant = await self._access.allow(request, Operation.LIST_ACCESS_TOKENS)
        query = urls.parse_token_list_query(request.query)
        seen = grant.list_access_tokens(query.prefix, query.start_after, query.limit)
        page: Page[AccessToken] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            found = await self._account.list_access_tokens(**seen._asdict())
            page = grant.show_access_tokens(found)
        await answer(request, wire.encode_access_token_page(page.items, has_more=page.has_more))

    async def issue_token(self, request: Request) -> None:
        allowed = Operation.ISSUE_ACCESS_TOKEN
        await self._access.allow_some(request, allowed)
        wanted = wire.decode_issue_access_token(await read_json(request))
        grant = await self._access.allow(request, allowed, token_id=wanted.id)
        secret = await self._account.issue_access_token(wanted, grant)
        await answer(request, wire.encode_issued_access_token(secret.text), 201)

    async def revoke_token(self, request: Request, segment: str) -> None:
        token_id = parse_token_id(segment)
        await self._access.allow(request, Operation.REVOKE_ACCESS_TOKEN, token_id=token_id)
        await self._account.revoke_access_token(token_id)
        await request.respond(204)

    async def account_metrics(self, request: Request) -> None:
        await self._access.allow(request, Operation.ACCOUNT_METRICS)
        query = urls.parse_metrics_query(request.query)
        await _show(request, await self._account.account_metrics(*_asked(query)))

    async def basin_metrics(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Operation.BASIN_METRICS, basin)
        query = urls.parse_metrics_query(request.query)
        await _show(request, await self._account.basin_metrics(basin, *_asked(query)))

    async def stream_metrics(self, request: Request, basin_part: str, stream_part: str) -> None:
        basin, name = parse_basin(basin_part), parse_stream(stream_part)
        grant = await self._access.allow(request, Operation.STREAM_METRICS, basin, name)
        query = urls.parse_metrics_query(request.query)
        metrics = await self._account.stream_metrics(
            basin, grant.full_stream_name(name), *_asked(query)
        )
        await _show(request, metrics)

    async def list_locations(self, request: Request) -> None:
        await self._access.allow(request, Operation.LIST_LOCATIONS)
        await answer(request, wire.encode_locations([self._locations.only]))

    async def default_location(self, request: Request) -> None:
        await self._access.allow(request, Operation.GET_DEFAULT_LOCATION)
        await answer(request, wire.encode_location(self._locations.only))

    async def set_default_location(self, request: Request) -> None:
        await self._access.allow(request, Operation.SET_DEFAULT_LOCATION)
        self._locations.check(wire.decode_default_location(await read_json(request)))
        await answer(request, wire.encode_location(self._locations.only))


def _asked(
    query: urls.MetricsQuery,
) -> tuple[str, int | None, int | None, Interval | None]:
    return query.metric_set, query.start, query.end, query.interval


async def _show(request: Request, metrics: tuple[Metric, ...]) -> None:
    await answer(request, wire.encode_metrics(metrics))
