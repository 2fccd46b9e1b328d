"""Live reads miss nothing, send nothing before it is durable, and end when they should."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from streamfold.server.durable_streams import events
from streamfold.server.durable_streams.content import PIECE_MAX, ContentBody, to_batches
from streamfold.server.main import Server, running_server
from tests.server.conftest import configuration, until
from tests.server.durable_streams.conftest import JSON, OCTETS, browsing, token

STREAM = "/v1/stream/live"


@pytest.fixture
async def patient() -> AsyncIterator[Server]:
    """A server whose long-polls outlast any test: only events end them."""
    async with running_server(configuration(long_poll=60.0)) as server:
        yield server


@pytest.fixture
async def web(patient: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with browsing(patient) as client:
        yield client


async def waiting(server: Server, requests: int = 1) -> None:
    """Return once so many requests are under way."""
    await until(lambda: server.gate.inside >= requests)


async def events_of(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Names and data of events, as a browser would have them."""
    text = ""
    async for piece in response.aiter_text():
        text += piece
        while "\n\n" in text:
            event, _, text = text.partition("\n\n")
            if event.startswith(":"):
                continue
            name = re.search("^event: (.*)$", event, re.MULTILINE)
            assert name is not None
            lines = [line[5:] for line in event.split("\n") if line.startswith("data:")]
            yield name[1], "\n".join(lines)


async def test_a_long_poll_ends_with_what_comes(patient: Server, web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON)
    query = {"offset": "now", "live": "long-poll"}
    poll = asyncio.create_task(web.get(STREAM, params=query))
    await waiting(patient)
    await web.post(STREAM, headers=JSON, content=b"[1,2]")
    answer = await poll
    assert (answer.status_code, answer.json()) == (200, [1, 2])
    assert answer.headers["stream-next-offset"] == token(2)
    assert re.fullmatch("[0-9]+", answer.headers["stream-cursor"])


async def test_a_long_text_is_cut_into_events_between_characters(web: httpx.AsyncClient) -> None:
    headers = {"content-type": "text/plain", "stream-closed": "true"}
    for unit, before in itertools.product(("🙂", "a\r\n"), range(4)):
        text = before * "x" + unit * (PIECE_MAX // len(unit.encode()) + 2)
        stream = f"{STREAM}-{len(unit)}-{before}"
        await web.put(stream, headers=headers, content=text.encode())
        async with web.stream("GET", stream, params={"offset": "-1", "live": "sse"}) as response:
            events = [data async for name, data in events_of(response) if name == "data"]
        assert len(events) == 2
        intact = "".join(events) == text.replace("\r\n", "\n")
        assert intact, (unit, before)


def test_what_is_not_utf8_is_cut_where_it_is_full() -> None:
    body = b"\x80" * (2 * PIECE_MAX + 1)
    batches = to_batches(ContentBody([body]), "text/plain", allow_empty=False)
    pieces = [piece for batch in batches for piece in batch.bodies()]
    assert list(map(len, pieces)) == [PIECE_MAX, PIECE_MAX, 1]


@pytest.mark.parametrize("change", ["close", "delete"])
async def test_a_long_poll_ends_with_its_stream(
    patient: Server, web: httpx.AsyncClient, change: str
) -> None:
    await web.put(STREAM, headers=JSON)
    poll = asyncio.create_task(web.get(STREAM, params={"offset": "now", "live": "long-poll"}))
    await waiting(patient)
    if change == "close":
        await web.post(STREAM, headers={"stream-closed": "true"})
        answer = await poll
        assert (answer.status_code, answer.headers["stream-closed"]) == (204, "true")
    else:
        await web.delete(STREAM)
        assert (await poll).status_code == 404


async def test_events_bring_data_and_where_it_is(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=JSON, content=b"[1]")
    async with web.stream("GET", f"{STREAM}?offset=-1&live=sse") as response:
        assert response.headers["content-type"] == "text/event-stream"
        events = events_of(response)
        assert await anext(events) == ("data", "[1]")
        name, control = await anext(events)
        assert (name, json.loads(control)["streamNextOffset"]) == ("control", token(1))
        assert json.loads(control)["upToDate"] is True
        await web.post(STREAM, headers=JSON | {"stream-closed": "true"}, content=b"[2,3]")
        assert await anext(events) == ("data", "[2,3]")
        _, control = await anext(events)
        assert json.loads(control) == {
            "streamNextOffset": token(3),
            "upToDate": True,
            "streamClosed": True,
        }
        assert [event async for event in events] == []


async def test_events_end_well_when_the_stream_is_deleted(
    patient: Server, web: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    await web.put(STREAM, headers=JSON, content=b"[1]")
    with caplog.at_level(logging.ERROR, "streamfold"):
        async with web.stream("GET", f"{STREAM}?offset=-1&live=sse") as response:
            events = events_of(response)
            assert await anext(events) == ("data", "[1]")
            assert (await anext(events))[0] == "control"
            await web.delete(STREAM)
            assert [event async for event in events] == []
        assert (await web.get(f"{STREAM}?offset=-1&live=sse")).status_code == 404
    assert caplog.records == []


async def test_events_end_when_what_comes_next_is_trimmed(web: httpx.AsyncClient) -> None:
    await web.put(STREAM, headers=OCTETS)
    piece = b"x" * (1 << 20)
    for _ in range(24):  # more than is read ahead, and than waits on the way
        await web.post(STREAM, headers=OCTETS, content=piece)
    async with web.stream("GET", f"{STREAM}?offset=-1&live=sse") as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        tail = (await web.head(STREAM)).headers["stream-next-offset"]
        await web.put(f"{STREAM}/snapshot/{tail}", content=b"all")
        assert (await web.put(f"{STREAM}/retention/{tail}")).status_code == 204
        async for data in raw:
            got += data
    last = re.findall(rb'"streamNextOffset":"([0-9_]+)"', got)[-1].decode()
    assert last < tail
    assert (await web.get(STREAM, params={"offset": last})).status_code == 410


async def test_content_cannot_pass_for_an_event(web: httpx.AsyncClient) -> None:
    forged = 'a\r\n\r\nevent: control\rdata:{"streamClosed":true}\n\n'
    text = {"content-type": "text/plain"}
    await web.put(STREAM, headers=text, content=forged.encode())
    await web.post(STREAM, headers={"stream-closed": "true"})
    response = await web.get(f"{STREAM}?offset=-1&live=sse")
    assert response.text.count("event: control") - response.text.count("data:event: control") == 1


async def test_hundreds_of_appends_reach_every_kind_of_reader_in_order(
    web: httpx.AsyncClient,
) -> None:
    await web.put(STREAM, headers=JSON)

    async def write() -> None:
        for number in range(200):
            answer = await web.post(STREAM, headers=JSON, content=b"%d" % number)
            assert answer.status_code == 204, answer.text
        await web.post(STREAM, headers={"stream-closed": "true"})

    async def by_events() -> list[int]:
        got: list[int] = []
        async with web.stream("GET", f"{STREAM}?offset=-1&live=sse") as response:
            async for name, data in events_of(response):
                if name == "data":
                    got += json.loads(data)
        return got

    async def by_polls() -> list[int]:
        got: list[int] = []
        offset = "-1"
        while True:
            answer = await web.get(STREAM, params={"offset": offset, "live": "long-poll"})
            offset = answer.headers["stream-next-offset"]
            got += answer.json() if answer.status_code == 200 else []
            if "stream-closed" in answer.headers:
                return got

    _, *readers = await asyncio.gather(write(), by_events(), by_polls(), by_events(), by_polls())
    assert readers == [list(range(200))] * 4


async def test_a_stop_ends_live_reads_in_good_time() -> None:
    """They end, rather than being cut off at the end of the stop."""
    settings = configuration(long_poll=60.0, drain_timeout=1000.0)
    async with running_server(settings) as server:
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=None)
        await client.put(STREAM, headers=JSON)
        poll = asyncio.create_task(client.get(f"{STREAM}?offset=now&live=long-poll"))
        sse = asyncio.create_task(client.get(f"{STREAM}?offset=now&live=sse"))
        await waiting(server, 2)
    assert (await poll).status_code in (204, 503)
    assert (await sse).status_code == 200
    await client.aclose()


@pytest.mark.parametrize("content", [b"[]", b"[1]"], ids=["empty", "with a message"])
async def test_a_quiet_connection_gets_comments_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE", 0.05)
    live, begun = {"offset": "-1", "live": "sse"}, ""
    async with running_server(configuration()) as server, browsing(server) as web:
        await web.put(STREAM, headers=JSON, content=content)
        async with web.stream("GET", STREAM, params=live) as quiet:
            pieces = quiet.aiter_text()
            while begun.count("\n:\n") < 2:
                begun += await anext(pieces)
    monkeypatch.setattr(events, "LIFETIME", 0.5)
    async with running_server(configuration()) as server, browsing(server) as web:
        await web.put(STREAM, headers=JSON, content=content)
        whole = (await web.get(STREAM, params=live)).text
    for text in (begun, whole):
        told, *comments = text.split("\n:\n")
        assert told.count("event: control") == 1
        assert told.count("event: data") == (content == b"[1]")
        assert not "".join(comments).strip()
