"""Usage is attributed by the request's rights, never by its headers."""

from __future__ import annotations

import time

import httpx
from s2_sdk import AccessTokenScope, ExactMatch, Operation, PrefixMatch

from streamfold.model.access_tokens import Secret
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, ROOT, STREAM, configuration
from tests.server.durable_streams.conftest import browsing
from tests.server.durable_streams.test_access import bearer, issue

VICTIM = "victim-basin"


async def basin_ops(root: httpx.AsyncClient, basin: str) -> dict[str, float]:
    """How often each operation was charged to a basin within the last minutes."""
    now = int(time.time())
    span = f"set=basin-ops&start={now - 300}&end={now + 30}&interval=minute"
    found = await root.get(f"/v1/metrics/{basin}?{span}", headers=bearer(ROOT))
    assert found.status_code == 200, found.text
    return {
        metric["accumulation"]["name"]: sum(
            amount for _, amount in metric["accumulation"]["values"]
        )
        for metric in found.json()["values"]
    }


def charged_basins(server: Server) -> set[str]:
    """Everything that the server counts usage for."""
    recorder = server.store.usage
    recorder.fold()
    return {basin for basin, _ in recorder.hours}


async def test_a_basin_named_in_a_header_that_is_not_needed_is_not_charged() -> None:
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        for basin in (BASIN, VICTIM):
            await server.store.create_basin(basin)
            await server.store.create_stream(basin, STREAM)
        scope = AccessTokenScope(
            basins=ExactMatch(BASIN),
            streams=PrefixMatch(""),
            ops=[Operation.BASIN_METRICS, Operation.STREAM_METRICS, Operation.LIST_STREAMS],
        )
        token = bearer(await issue(server, scope))
        async with browsing(server) as web:
            query = "set=storage&start=1&end=2"
            for claimed in (VICTIM, "x" * 30_000, "not a basin"):
                lying = token | {"s2-basin": claimed}
                for path in (f"/v1/metrics/{BASIN}", f"/v1/metrics/{BASIN}/{STREAM}"):
                    answer = await web.get(f"{path}?{query}", headers=lying)
                    assert answer.status_code == 200, answer.text
                assert (await web.get("/v1/streams", headers=lying)).status_code >= 400
            assert charged_basins(server) <= {"", BASIN}
            assert (await basin_ops(web, BASIN))["basin-metrics"] == 3
            assert not any((await basin_ops(web, VICTIM)).values())
