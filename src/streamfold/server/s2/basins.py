"""Basins: create, ensure, configure, delete, list."""

from __future__ import annotations

from streamfold.model.access_tokens import Operation
from streamfold.model.resources import BasinInfo, Page, Provision
from streamfold.server.auth.access import Access
from streamfold.server.http.bodies import JSON, answer, read_json, read_optional_json
from streamfold.server.http.request import LIST_ROOM, Request
from streamfold.store.store import StreamStore
from streamfold.wire.s2 import headers, resources, urls
from streamfold.wire.s2.urls import parse_basin, parse_new_basin


class Basins:
    """Handlers of everything below /v1/basins."""

    def __init__(self, store: StreamStore, access: Access) -> None:
        self._store = store
        self._access = access

    async def list(self, request: Request) -> None:
        grant = await self._access.allow(request, Operation.LIST_BASINS)
        query = urls.parse_basin_list_query(request.query)
        seen = grant.list_basins(query.prefix, query.start_after, query.limit)
        page: Page[BasinInfo] = Page((), has_more=False)
        if seen is not None:
            await request.reserve_answer(LIST_ROOM)
            page = grant.show_basins(await self._store.list_basins(**seen._asdict()))
        await answer(request, resources.encode_basin_page(page))

    async def create(self, request: Request) -> None:
        token = headers.parse_request_token(request.header(headers.REQUEST_TOKEN))
        await self._access.allow_some(request, Operation.CREATE_BASIN)
        wanted = resources.decode_create_basin(await read_json(request))
        await self._access.allow(request, Operation.CREATE_BASIN, wanted.name)
        info, result = await self._store.create_basin(
            wanted.name, wanted.config, location=wanted.location, request_token=token
        )
        await _provisioned(request, info, result, 201)

    async def ensure(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        grant = await self._access.allow(request, Operation.CREATE_BASIN, basin)
        grant.require(Operation.RECONFIGURE_BASIN, basin)
        if not await self._store.durable.has_basin(basin):
            parse_new_basin(segment)
        wanted = resources.decode_ensure_basin(await read_optional_json(request))
        info, result = await self._store.ensure_basin(
            basin, wanted.config, location=wanted.location
        )
        await _provisioned(request, info, result, 201 if result is Provision.CREATED else 200)

    async def config(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Operation.GET_BASIN_CONFIG, basin)
        await answer(request, resources.encode_basin_config(await self._store.basin_config(basin)))

    async def reconfigure(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Operation.RECONFIGURE_BASIN, basin)
        change = resources.decode_basin_reconfiguration(await read_json(request))
        config = await self._store.reconfigure_basin(basin, change)
        await answer(request, resources.encode_basin_config(config))

    async def delete(self, request: Request, segment: str) -> None:
        basin = parse_basin(segment)
        await self._access.allow(request, Operation.DELETE_BASIN, basin)
        await self._store.delete_basin(basin)
        await request.respond(202)


async def _provisioned(request: Request, info: BasinInfo, result: Provision, status: int) -> None:
    said = (headers.PROVISION_RESULT.encode(), result.encode())
    await answer(request, resources.encode_basin_info(info), status, (JSON, said))
