"""A stream's forks and producers are shown page by page, to callers that may see them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from streamfold.model.access_tokens import AccessToken, ResourceSet, Right, Scope
from streamfold.server.main import Server
from tests.server.conftest import BASIN, ROOT
from tests.server.durable_streams.conftest import JSON, browsing, producer, token

AS_ROOT = {"authorization": f"Bearer {ROOT}"}
NAMED = {"s2-basin": BASIN}


@pytest.fixture
async def guarded(guarded: Server) -> Server:
    """With a stream of five records, forks of it, and a fork of a fork."""
    async with browsing(guarded, headers=AS_ROOT) as web:
        await create(web, "team-source", content=b"[0,1,2,3,4]")
        await create(web, "team-first", "team-source", at=2)
        await create(web, "other-second", "team-source", at=3)
        await create(web, "team-third", "team-first", at=1)
    return guarded


@pytest.fixture
async def web(guarded: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with browsing(guarded, headers=AS_ROOT | NAMED) as client:
        yield client


async def create(
    web: httpx.AsyncClient, stream: str, source: str = "", *, at: int = 0, content: bytes = b""
) -> None:
    fork = {"stream-forked-from": f"/{BASIN}/{source}", "stream-fork-offset": token(at)}
    headers = JSON | (fork if source else {})
    answer = await web.put(f"/{BASIN}/{stream}", headers=headers, content=content)
    assert answer.status_code == 201, answer.text


async def shown(web: httpx.AsyncClient, stream: str, part: str, **query: Any) -> Any:
    path = f"/v1/streams/{stream}/{part}"
    answer = await web.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def as_caller(guarded: Server, *, prefixed: bool) -> httpx.AsyncClient:
    """A client that may see the streams of one team."""
    streams = ResourceSet.prefix("team-")
    reading = frozenset((Right.GET_STREAM_CONFIG,))
    scope = Scope(basins=ResourceSet.prefix(""), streams=streams, ops=reading)
    secret = await guarded.store.account.issue_access_token(AccessToken("team", scope, prefixed))
    url = f"http://127.0.0.1:{guarded.port}"
    headers = NAMED | {"authorization": f"Bearer {secret.text}"}
    return httpx.AsyncClient(base_url=url, headers=headers, verify=False, timeout=60)


async def test_a_stream_shows_its_origin_and_its_forks(web: httpx.AsyncClient) -> None:
    source = await shown(web, "team-source", "forks")
    assert (source["origin"], source["next"]) == (None, None)
    found = [
        (one["stream"], one["origin"]["stream"], one["origin"]["seq_num"])
        for one in source["forks"]
    ]
    assert found == [
        ("team-first", "team-source", 2),
        ("other-second", "team-source", 3),
        ("team-third", "team-first", 1),
    ]
    fork = await shown(web, "team-first", "forks")
    assert fork["origin"] == {"stream": "team-source", "seq_num": 2, "sub_offset": 0}
    assert [one["stream"] for one in fork["forks"]] == ["team-third"]


async def test_forks_come_in_pages(web: httpx.AsyncClient) -> None:
    names, cursor = [], 0
    while cursor is not None:
        page = await shown(web, "team-source", "forks", start_after=cursor, limit=1)
        names += [one["stream"] for one in page["forks"]]
        cursor = page["next"]
    assert names == ["team-first", "other-second", "team-third"]


async def test_a_deleted_fork_disappears_unless_a_fork_of_it_needs_it(
    guarded: Server, web: httpx.AsyncClient
) -> None:
    for stream in ("team-first", "other-second"):
        assert (await web.delete(f"/{BASIN}/{stream}")).status_code == 204
    for _ in range(2):
        await guarded.store.upkeep()
    forks = (await shown(web, "team-source", "forks"))["forks"]
    assert [(one["stream"], one["deleted_at"] is None) for one in forks] == [
        ("team-first", False), ("team-third", True),
    ]  # fmt: skip


async def test_a_deleted_stream_that_is_kept_for_its_forks_shows_them(
    guarded: Server, web: httpx.AsyncClient
) -> None:
    assert (await web.delete(f"/{BASIN}/team-source")).status_code == 204
    forks = (await shown(web, "team-source", "forks"))["forks"]
    assert [one["stream"] for one in forks] == ["team-first", "other-second", "team-third"]
    for stream in ("team-third", "other-second", "team-first"):
        assert (await web.delete(f"/{BASIN}/{stream}")).status_code == 204
    for _ in range(3):
        await guarded.store.upkeep()
    assert (await web.get("/v1/streams/team-source/forks")).status_code == 404


async def test_a_caller_sees_only_forks_and_sources_that_it_has_the_right_for(
    guarded: Server, web: httpx.AsyncClient
) -> None:
    await create(web, "team-fourth", "other-second", at=3)
    async with await as_caller(guarded, prefixed=False) as caller:
        forks = (await shown(caller, "team-source", "forks"))["forks"]
        assert [one["stream"] for one in forks] == ["team-first", "team-third", "team-fourth"]
        assert forks[-1]["origin"]["stream"] is None
        fourth = await shown(caller, "team-fourth", "forks")
        assert fourth["origin"] == {"stream": None, "seq_num": 3, "sub_offset": 0}
        for part in ("forks", "producers"):
            assert (await caller.get(f"/v1/streams/other-second/{part}")).status_code == 403


async def test_a_caller_with_a_prefix_sees_names_without_it(guarded: Server) -> None:
    async with await as_caller(guarded, prefixed=True) as caller:
        page = await shown(caller, "source", "forks")
        assert [one["stream"] for one in page["forks"]] == ["first", "third"]
        assert (await shown(caller, "first", "forks"))["origin"]["stream"] == "source"


async def test_producers_are_shown_with_epoch_next_sequence_and_time(
    guarded: Server, web: httpx.AsyncClient
) -> None:
    for name, epoch, seq in (("b", 0, 0), ("b", 0, 1), ("a", 0, 0), ("a", 3, 0), ('é"<', 1, 0)):
        sent = (JSON | producer(name, epoch, seq)).items()
        headers = {key.encode(): value.encode() for key, value in sent}
        answer = await web.post(f"/{BASIN}/team-source", headers=headers, content=b"[1]")
        assert answer.is_success, answer.text
    before = guarded.store._now()
    page = await shown(web, "team-source", "producers")
    assert [(one["id"], one["epoch"], one["next_seq"]) for one in page["producers"]] == [
        ("a", 3, 1), ("b", 0, 2), ('é"<', 1, 1),
    ]  # fmt: skip
    assert all(0 < one["last_seen_at"] <= before for one in page["producers"])
    assert (await shown(web, "team-first", "producers"))["producers"] == []


async def test_producers_come_in_pages(web: httpx.AsyncClient) -> None:
    for name in ("a", "b", "c"):
        headers = JSON | producer(name, 0, 0)
        await web.post(f"/{BASIN}/team-source", headers=headers, content=b"[1]")
    first = await shown(web, "team-source", "producers", limit=2)
    assert ([one["id"] for one in first["producers"]], first["has_more"]) == (["a", "b"], True)
    last = await shown(web, "team-source", "producers", start_after="b")
    assert ([one["id"] for one in last["producers"]], last["has_more"]) == (["c"], False)


@pytest.mark.parametrize("query", ["forks?start_after=x", "forks?limit=-1", "producers?limit=%ff"])
async def test_a_malformed_page_is_refused(web: httpx.AsyncClient, query: str) -> None:
    assert (await web.get(f"/v1/streams/team-source/{query}")).status_code == 400
