"""Only appends create streams, and only in basins that allow it."""

from __future__ import annotations

import httpx
import pytest
from s2_sdk import AccessTokenScope, Operation, PrefixMatch

from streamfold.model.configs import BasinConfig
from streamfold.server.main import Server
from tests.server.durable_streams.conftest import JSON, browsing
from tests.server.durable_streams.test_access import bearer, issue

#: A basin that creates streams on append and read, and one that does not.
EAGER, PLAIN = "eager-basin", "plain-basin"


@pytest.fixture
async def guarded(guarded: Server) -> Server:
    """With a basin that creates streams on append and on read, and one that does not."""
    await guarded.store.create_basin(PLAIN)
    eager = BasinConfig(create_stream_on_append=True, create_stream_on_read=True)
    await guarded.store.create_basin(EAGER, eager)
    return guarded


async def allowed(server: Server, operation: Operation) -> dict[str, str]:
    scope = AccessTokenScope(basins=PrefixMatch(""), streams=PrefixMatch(""), ops=[operation])
    return bearer(await issue(server, scope, name=str(operation.value)))


async def append(web: httpx.AsyncClient, basin: str, stream: str, who: dict[str, str]) -> int:
    path, headers = f"/v1/streams/{stream}/records", who | JSON | {"s2-basin": basin}
    return (await web.post(path, headers=headers, content=b'{"records":[{}]}')).status_code


async def exists(server: Server, basin: str, stream: str) -> bool:
    page = await server.store.list_streams(basin, prefix=stream)
    return bool(page.items)


async def test_append_creates_a_stream_only_where_the_basin_says_so(guarded: Server) -> None:
    writer = await allowed(guarded, Operation.APPEND)
    async with browsing(guarded) as web:
        assert await append(web, PLAIN, "new", writer) == 404
        assert await append(web, EAGER, "new", writer) == 200
    assert not await exists(guarded, PLAIN, "new")
    assert await exists(guarded, EAGER, "new")


async def test_read_creates_a_stream_only_where_the_basin_says_so(guarded: Server) -> None:
    reader = await allowed(guarded, Operation.READ)
    async with browsing(guarded) as web:
        for basin, status in ((PLAIN, 404), (EAGER, 416)):
            path, headers = "/v1/streams/new/records?seq_num=0", reader | {"s2-basin": basin}
            assert (await web.get(path, headers=headers)).status_code == status
    assert not await exists(guarded, PLAIN, "new")
    assert await exists(guarded, EAGER, "new")


async def test_no_other_right_creates_one_along_the_way(guarded: Server) -> None:
    reader = await allowed(guarded, Operation.READ)
    async with browsing(guarded) as web:
        assert await append(web, EAGER, "new", reader) == 403
    assert not await exists(guarded, EAGER, "new")


@pytest.mark.parametrize("basin", [PLAIN, EAGER])
async def test_a_durable_stream_is_created_with_create_stream_alone(
    guarded: Server, basin: str
) -> None:
    writer = await allowed(guarded, Operation.APPEND)
    creator = await allowed(guarded, Operation.CREATE_STREAM)
    async with browsing(guarded) as web:
        assert (await web.put(f"/{basin}/new", headers=writer | JSON)).status_code == 403
        appended = await web.post(f"/{basin}/new", headers=writer | JSON, content=b"1")
        assert appended.status_code == 404
        published = await web.put(f"/{basin}/new/snapshot/0", headers=writer, content=b"x")
        assert published.status_code == 404
        assert not await exists(guarded, basin, "new")
        assert (await web.put(f"/{basin}/new", headers=creator | JSON)).status_code == 201
        assert (await web.put("/another-basin/new", headers=creator | JSON)).status_code == 403
