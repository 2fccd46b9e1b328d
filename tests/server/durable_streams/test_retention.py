"""Retention: records that a snapshot covers may be removed, and readers learn where to continue."""

from __future__ import annotations

import httpx
import pytest

from streamfold.server.main import Server
from tests.server.durable_streams.conftest import JSON, OCTETS, read_pages, token

STREAM = "/v1/stream/app/changes"


@pytest.fixture
async def stream(web: httpx.AsyncClient) -> str:
    """A JSON stream with the messages 0 to 5, and a snapshot before 4."""
    await web.put(STREAM, headers=JSON, content=b"[0,1,2,3,4,5]")
    assert (await web.put(f"{STREAM}/snapshot/4", content=b"four")).status_code == 204
    return STREAM


async def test_records_before_it_are_gone_and_the_rest_is_there(
    web: httpx.AsyncClient, stream: str
) -> None:
    moved = await web.put(f"{stream}/retention/{token(3)}")
    assert (moved.status_code, moved.headers["stream-retained-offset"]) == (204, token(3))
    assert (await web.get(stream, params={"offset": token(3)})).json() == [3, 4, 5]
    assert (await web.head(stream)).headers["stream-retained-offset"] == token(3)


@pytest.mark.parametrize("query", ["", "?offset=-1", f"?offset={token(2)}"])
@pytest.mark.parametrize("live", ["", "live=long-poll", "live=sse"])
async def test_a_read_below_it_learns_where_to_continue(
    web: httpx.AsyncClient, stream: str, query: str, live: str
) -> None:
    if live and not query:
        query = "?offset=0"
    await web.put(f"{stream}/retention/3")
    gone = await web.get(stream + query + ("&" if query and live else "") + live)
    assert (gone.status_code, gone.json()["code"]) == (410, "position_trimmed")
    assert gone.headers["stream-next-offset"] == token(3)
    assert gone.headers["link"] == f'<{stream}/bootstrap>; rel="bootstrap"'
    assert gone.headers["cache-control"] == "no-store"
    led = await web.get(f"{stream}/bootstrap")
    assert led.headers["stream-snapshot-offset"] == token(4)


async def test_reads_from_the_tail_continue_unchanged(web: httpx.AsyncClient, stream: str) -> None:
    await web.put(f"{stream}/retention/4")
    assert (await web.get(stream, params={"offset": "now"})).json() == []
    await web.post(stream, headers=JSON, content=b"6")
    assert (await web.get(stream, params={"offset": token(4)})).json() == [4, 5, 6]


async def test_it_never_goes_back(web: httpx.AsyncClient, stream: str) -> None:
    assert (await web.put(f"{stream}/retention/3")).status_code == 204
    assert (await web.put(f"{stream}/retention/3")).status_code == 204  # a repetition is fine
    refused = await web.put(f"{stream}/retention/2")
    assert (refused.status_code, refused.json()["code"]) == (409, "snapshot_conflict")


async def test_it_never_passes_the_newest_snapshot(web: httpx.AsyncClient, stream: str) -> None:
    for position in ("5", "6", "7"):
        assert (await web.put(f"{stream}/retention/{position}")).status_code == 409
    await web.put("/v1/stream/bare", headers=JSON, content=b"[1]")
    for position in ("0", "1"):
        assert (await web.put(f"/v1/stream/bare/retention/{position}")).status_code == 409
    assert (await web.put("/v1/stream/none/retention/1")).status_code == 404
    assert (await web.put(f"{stream}/retention")).status_code == 400
    assert (await web.get(stream)).json() == [0, 1, 2, 3, 4, 5]


async def test_in_a_byte_stream_it_stands_where_an_append_ends(web: httpx.AsyncClient) -> None:
    await web.put("/bucket/bytes", headers=OCTETS)
    for _ in range(2):
        await web.post("/bucket/bytes", headers=OCTETS, content=b"x" * 2_500_000)
    await web.put("/bucket/bytes/snapshot/6", content=b"all")
    assert (await web.put("/bucket/bytes/retention/2")).status_code == 400
    assert (await web.put("/bucket/bytes/retention/3")).status_code == 204
    assert await read_pages(web, "/bucket/bytes", token(3)) == b"x" * 2_500_000


async def test_snapshots_from_before_it_are_gone(web: httpx.AsyncClient, stream: str) -> None:
    await web.put(f"{stream}/snapshot/5", content=b"five")
    await web.put(f"{stream}/retention/5")
    items = (await web.get(f"{stream}/snapshots")).json()["snapshots"]
    assert [item["offset"] for item in items] == [token(5)]
    assert (await web.get(f"{stream}/snapshot/4")).status_code == 404


async def test_what_it_took_is_collected_and_a_snapshot_that_is_being_read_is_not(
    durable: Server, web: httpx.AsyncClient, stream: str
) -> None:
    large = bytes(range(256)) * (
        64 << 10
    )  # 16 MiB: more than connection and server keep on the way
    await web.put(f"{stream}/snapshot/5", content=large)
    async with web.stream("GET", f"{stream}/snapshot/5") as reading:
        pieces = reading.aiter_raw(1 << 16)
        got = [await anext(pieces)]
        await web.put(f"{stream}/snapshot/6", content=b"six")
        assert (await web.put(f"{stream}/retention/6")).status_code == 204
        await durable.store.upkeep()
        assert (await web.get(f"{stream}/snapshot/5")).status_code == 404
        got += [piece async for piece in pieces]
    assert b"".join(got) == large
    assert (await web.get(f"{stream}/snapshot/6")).content == b"six"
