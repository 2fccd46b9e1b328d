"""Server-sent events with curl."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from streamfold.model.records import Record
from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM
from tests.server.curl import curl


@dataclass(frozen=True)
class Event:
    name: str | None
    id: str | None
    data: str


class Events:
    """The events that a running curl prints."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def next(self) -> Event | None:
        """The next event, None at the end."""
        async with asyncio.timeout(60):
            lines = []
            while line := (await self._reader.readline()).decode().rstrip("\n"):
                lines.append(line)
        if not lines:
            return None
        fields = dict(line.split(": ", 1) for line in lines)
        return Event(fields.get("event"), fields.get("id"), fields["data"])

    async def news(self) -> Event | None:
        """The next event but pings: on a busy machine there may be some before it."""
        while (event := await self.next()) is not None and event.name == "ping":
            pass
        return event


@asynccontextmanager
async def events(server: Server, query: str, *more: str) -> AsyncIterator[Events]:
    process = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--no-buffer",
        f"http://127.0.0.1:{server.port}/v1/streams/{STREAM}/records?{query}",
        "-H", f"s2-basin: {BASIN}", "-H", "accept: text/event-stream", *more,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield Events(process.stdout)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_events_are_batches_then_a_ping_then_what_comes(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"one"), Record(b"two")])
    async with events(server, "seq_num=0") as stream:
        batch = await stream.next()
        assert batch is not None
        assert (batch.name, batch.id) == ("batch", "1,2,22")
        assert [record["body"] for record in json.loads(batch.data)["records"]] == ["one", "two"]
        assert json.loads(batch.data)["tail"]["seq_num"] == 2
        ping = await stream.next()
        assert ping is not None
        assert (ping.name, ping.id) == ("ping", None)
        assert json.loads(ping.data)["tail"]["seq_num"] == 2
        assert json.loads(ping.data)["timestamp"] > 0
        await server.store.append(BASIN, STREAM, [Record(b"three")])
        live = await stream.news()
        assert live is not None
        assert (live.name, live.id) == ("batch", "2,3,35")
        assert json.loads(live.data)["tail"]["seq_num"] == 3


async def test_a_session_that_comes_to_its_end_says_so(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"x")] * 3)
    async with events(server, "seq_num=0&count=2") as stream:
        first = await stream.next()
        assert first is not None
        assert first.id == "1,2,18"
        assert await stream.next() == Event(None, None, "[DONE]")
        assert await stream.next() is None


async def test_a_client_resumes_after_the_last_event_it_saw(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"%d" % number) for number in range(10)])
    resume = ("-H", "last-event-id: 3,4,36")
    async with events(server, "seq_num=0&count=6", *resume) as stream:
        batch = await stream.next()
        assert batch is not None
        assert [record["body"] for record in json.loads(batch.data)["records"]] == ["4", "5"]
        assert await stream.next() == Event(None, None, "[DONE]")


async def test_base64_is_for_events_too(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"\xff")])
    async with events(server, "seq_num=0&count=1", "-H", "s2-format: base64") as stream:
        batch = await stream.next()
        assert batch is not None
        assert json.loads(batch.data)["records"][0]["body"] == "/w=="


async def test_a_stream_deleted_meanwhile_is_an_error_event_without_done(server: Server) -> None:
    async with events(server, "tail_offset=0") as stream:
        assert await stream.next() is not None
        await server.store.delete_stream(BASIN, STREAM)
        error = await stream.news()
        assert error is not None
        assert error.name == "error"
        assert json.loads(error.data)["code"] == "stream_deletion_pending"
        assert await stream.next() is None


@pytest.mark.parametrize(
    ("query", "header", "status", "code"),
    [
        ("seq_num=0", "last-event-id: nonsense", 400, "bad_header"),
        ("seq_num=9", "x: y", 416, None),
        ("seq_num=0", "s2-format: hex", 400, "bad_header"),
    ],
)
async def test_what_is_wrong_before_the_events_is_an_ordinary_answer(
    server: Server, query: str, header: str, status: int, code: str | None
) -> None:
    answer = await curl(
        f"http://127.0.0.1:{server.port}/v1/streams/{STREAM}/records?{query}",
        "-H", f"s2-basin: {BASIN}", "-H", "accept: text/event-stream", "-H", header,
    )  # fmt: skip
    assert (answer.status, answer.json().get("code")) == (status, code)


async def test_events_are_never_compressed(server: Server) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"a" * 5000)])
    async with events(server, "seq_num=0&count=1", "-H", "accept-encoding: gzip") as stream:
        batch = await stream.next()
        assert batch is not None
        assert "aaaa" in batch.data
