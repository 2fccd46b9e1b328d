"""A request for many tails answers each as a single request would."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from s2_sdk import AccessTokenScope, Operation, PrefixMatch

from streamfold.model.configs import BasinConfig
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, ROOT, STREAM, configuration
from tests.server.durable_streams.conftest import JSON, browsing
from tests.server.durable_streams.test_access import bearer, issue
from tests.server.s2.test_charging import basin_ops

IN_BASIN = {"s2-basin": BASIN}


async def append(web: httpx.AsyncClient, stream: str, count: int) -> None:
    body = json.dumps({"records": [{"body": "x"}] * count})
    path = f"/v1/streams/{quote(stream, safe='')}/records"
    answer = await web.post(path, headers=IN_BASIN | JSON, content=body)
    assert answer.status_code == 200, answer.text


async def tails(web: httpx.AsyncClient, *streams: str, basin: str = BASIN) -> list[dict[str, Any]]:
    answer = await web.post("/v1/tails", headers={"s2-basin": basin}, json={"streams": streams})
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["tails"]
    assert [entry["stream"] for entry in entries] == list(streams)
    return entries


async def tail_alone(web: httpx.AsyncClient, stream: str, basin: str = BASIN) -> dict[str, Any]:
    """The entry that the answer to a request for this tail alone amounts to."""
    path = f"/v1/streams/{quote(stream, safe='')}/records/tail"
    answer = await web.get(path, headers={"s2-basin": basin})
    said = answer.json()
    failed = {"status": answer.status_code, "error": said}
    return {"stream": stream} | (said if answer.status_code == 200 else failed)


async def test_tails_come_in_the_order_of_the_request_whatever_the_names(server: Server) -> None:
    names = ("b/c d", 'in "quotes"', "ä", STREAM)
    async with browsing(server) as web:
        for count, name in enumerate(names, 1):
            if name != STREAM:
                await server.store.create_stream(BASIN, name)
            await append(web, name, count)
        entries = await tails(web, *names, *reversed(names))
        assert [entry["tail"]["seq_num"] for entry in entries] == [1, 2, 3, 4, 4, 3, 2, 1]
        assert entries == [await tail_alone(web, name) for name in (*names, *reversed(names))]
        assert await tails(web) == []


async def test_a_missing_or_deleted_stream_fails_alone_as_its_own_request_does(
    server: Server,
) -> None:
    await server.store.create_stream(BASIN, "deleted")
    names = ("missing", STREAM, "deleted")
    async with browsing(server) as web:
        fork = {"stream-forked-from": f"/{BASIN}/deleted"}  # keeps the stream until it is read
        assert (await web.put(f"/{BASIN}/fork", headers=fork)).status_code == 201
        await server.store.delete_stream(BASIN, "deleted")
        entries = await tails(web, *names)
        assert entries == [await tail_alone(web, name) for name in names]
        codes = [entry.get("error", {}).get("code") for entry in entries]
        assert codes == ["stream_not_found", None, "stream_deletion_pending"]
        nowhere = await tails(web, STREAM, basin="miss-basin")
        assert nowhere == [await tail_alone(web, STREAM, "miss-basin")]
        assert nowhere[0]["error"]["code"] == "basin_not_found"


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "x" * 513])
async def test_a_name_that_no_stream_can_have_fails_alone(server: Server, name: str) -> None:
    async with browsing(server) as web:
        refused, answered = await tails(web, name, STREAM)
    assert (refused["status"], refused["error"]["code"]) == (422, "invalid")
    assert answered["tail"]["seq_num"] == 0


@pytest.mark.parametrize("prefixed", [False, True])
async def test_a_token_sees_the_tails_of_its_own_streams_alone(
    guarded: Server, prefixed: bool
) -> None:
    for name in ("team/", "team/one", "team/two"):
        await guarded.store.create_stream(BASIN, name)
    scope = AccessTokenScope(
        basins=PrefixMatch(BASIN), streams=PrefixMatch("team/"), ops=[Operation.CHECK_TAIL]
    )
    own = "" if prefixed else "team/"
    names = (f"{own}one", STREAM, f"{own}missing", f"{own}two")
    caller = bearer(await issue(guarded, scope, prefixed=prefixed))
    async with browsing(guarded, headers=caller) as web:
        entries = await tails(web, *names)
        assert entries == [await tail_alone(web, name) for name in names]
        statuses = [entry.get("status", 200) for entry in entries]
        assert statuses == [200, 404 if prefixed else 403, 404, 200]
        if prefixed:
            assert "team" not in str(entries)
            # The stream of just the prefix has no name that this caller could use.
            [nameless] = await tails(web, "")
            assert nameless["error"]["code"] == "invalid"
        elsewhere = await web.post(
            "/v1/tails", headers={"s2-basin": "other-basin"}, json={"streams": [STREAM]}
        )
        assert (elsewhere.status_code, elsewhere.json()["code"]) == (403, "permission_denied")


async def test_each_tail_is_charged_as_one_operation(guarded: Server) -> None:
    async with browsing(guarded, headers=bearer(ROOT)) as web:
        await tails(web, STREAM, "missing", STREAM, STREAM)
        assert (await basin_ops(web, BASIN))["check-tail"] == 3


async def test_a_missing_stream_is_created_only_where_the_basin_says_so(server: Server) -> None:
    await server.store.create_basin("eager-basin", BasinConfig(create_stream_on_read=True))
    async with browsing(server) as web:
        for basin, statuses in (("eager-basin", {200}), (BASIN, {404})):
            entries = await tails(web, "new", "newer", "new", basin=basin)
            assert {entry.get("status", 200) for entry in entries} == statuses
    assert len((await server.store.list_streams("eager-basin")).items) == 2
    assert len((await server.store.list_streams(BASIN)).items) == 1


async def test_streams_that_are_not_in_memory_are_loaded(tmp_path: Path) -> None:
    """As many as one request may have, for several requests at once."""
    on_disk = configuration(location=tmp_path.as_uri())
    names = [f"stream-{number}" for number in range(200)]
    async with running_server(on_disk) as server, browsing(server) as web:
        await server.store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        await asyncio.gather(*(append(web, name, 1 + at % 3) for at, name in enumerate(names)))
    async with running_server(on_disk) as server, browsing(server) as web:
        answers = await asyncio.gather(*(tails(web, *names * 5) for _ in range(6)))
    for entries in answers:
        seq_nums = [entry["tail"]["seq_num"] for entry in entries]
        assert seq_nums == [1 + at % 3 for at in range(200)] * 5


async def test_more_than_a_thousand_names_are_refused(server: Server) -> None:
    async with browsing(server) as web:
        body = {"streams": ["missing"] * 1001}
        answer = await web.post("/v1/tails", headers=IN_BASIN, json=body)
    assert answer.status_code == 422
    assert answer.json() == {
        "code": "invalid",
        "message": "streams has 1001 names, at most 1000 are allowed: split the request",
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "does not fit the request"),
        (b"{}", "missing required field `streams`"),
        (b'["orders"]', "Expected `object`"),
        (b'{"streams":"orders"}', "Expected `array`"),
        (b'{"streams":["orders",1]}', "Expected `str`, got `int` - at `$.streams[1]`"),
        (b'{"streams":["\\ud800"]}', "does not fit the request"),
        (b'{"streams":["\xff"]}', "is not valid UTF-8"),
        (b'{"streams":["%b"]}' % (b"x" * 65_536), "more than 65536 bytes"),
    ],
)
async def test_a_malformed_body_is_refused(server: Server, body: bytes, said: str) -> None:
    async with browsing(server) as web:
        answer = await web.post("/v1/tails", headers=IN_BASIN | JSON, content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_json"), answer.text
    assert said in answer.json()["message"]
