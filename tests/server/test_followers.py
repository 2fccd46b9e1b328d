"""A crowd of followers over HTTP: each gets every record, whatever the others get and however."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from streamfold.model.metrics import BasinMetrics
from streamfold.model.records import RECORD_OVERHEAD, Record
from streamfold.server.main import Server
from streamfold.store.log.tail_waiters import WAKES_PER_STEP
from tests.server.conftest import BASIN, STREAM
from tests.server.frames import frames_in
from tests.server.raw_h1 import H1Client, h1_client

S2S, SSE = "content-type: s2s/proto", "accept: text/event-stream"
#: More than are woken in one turn.
CROWD = 2 * WAKES_PER_STEP
RECORDS, LAST = 60, b"<last>"
SIZE = 6 + RECORD_OVERHEAD
#: Bytes among which the last record is, once it has come.
_END = 64 << 10


@asynccontextmanager
async def follower(server: Server, path: str, header: str) -> AsyncIterator[H1Client]:
    async with h1_client(server.port) as client:
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\n{header}\r\n\r\n"
        await client.send(head.encode())
        assert (await client.head())[0] == 200
        yield client


@dataclass
class Crowd:
    """Followers that are all connected."""

    stack: AsyncExitStack
    server: Server
    clients: list[H1Client] = field(default_factory=list)

    async def add(self, path: str, header: str) -> None:
        client = await self.stack.enter_async_context(follower(self.server, path, header))
        self.clients.append(client)

    async def everything(self) -> list[bytes]:
        """What each has received by the last record."""
        return await asyncio.gather(*map(until_last, self.clients))


async def until_last(client: H1Client) -> bytes:
    received = bytearray()
    while LAST not in received[-_END:] or not _is_whole(received):
        chunk = await client.chunk()
        assert chunk, received[-_END:]
        received += chunk
    return bytes(received)


def _is_whole(received: bytearray) -> bool:
    """Whether it ends where an event or a frame does."""
    if received.endswith(b"\n\n"):
        return True
    at = 0
    while at < len(received):
        at += 3 + int.from_bytes(received[at : at + 3], "big")
    return at == len(received)


@pytest.fixture
async def crowd(server: Server) -> AsyncIterator[Crowd]:
    async with AsyncExitStack() as stack:
        yield Crowd(stack, server)


async def append_all(server: Server, stream: str = STREAM) -> None:
    """Records one by one, as fast as they become durable; the last says so."""
    for number in range(RECORDS):
        await server.store.append(BASIN, stream, [Record(b"<%04d>" % number)])
    await server.store.append(BASIN, stream, [Record(LAST)])


def path(query: str) -> str:
    return f"/v1/streams/{STREAM}/records?{query}"


async def test_every_follower_gets_every_record_in_order_by_frames_and_by_events(
    server: Server, crowd: Crowd
) -> None:
    for number in range(CROWD):
        await crowd.add(path("seq_num=0"), S2S if number % 2 else SSE)
    await append_all(server)
    for received in await crowd.everything():
        assert [int(number) for number in re.findall(rb"<(\d+)>", received)] == list(range(RECORDS))


async def test_events_say_what_each_follower_has_received_itself(
    server: Server, crowd: Crowd
) -> None:
    await server.store.append(BASIN, STREAM, [Record(b"<%04d>" % number) for number in range(10)])
    starts = [0, 3, 10]
    for start in starts:
        await crowd.add(path(f"seq_num={start}"), SSE)
    await append_all(server)
    total = 10 + RECORDS + 1
    for start, received in zip(starts, await crowd.everything(), strict=True):
        *_, last = (event for event in received.split(b"\n\n") if event.startswith(b"event: batch"))
        fields = dict(line.split(b": ", 1) for line in last.split(b"\n"))
        count = total - start
        assert fields[b"id"] == b"%d,%d,%d" % (total - 1, count, count * SIZE)
        assert json.loads(fields[b"data"])["tail"]["seq_num"] == total


async def test_events_of_a_durable_stream_reach_every_follower_with_the_offset_after_them(
    server: Server, crowd: Crowd
) -> None:
    async with h1_client(server.port) as client:
        head = f"PUT /{BASIN}/text HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
        await client.send(f"{head}content-length: 0\r\n\r\n".encode())
        assert (await client.head())[0] == 201
    for _ in range(CROWD // 2):
        await crowd.add(f"/{BASIN}/text?offset=-1&live=sse", SSE)
    await append_all(server, "text")
    expected = b"".join(b"<%04d>" % number for number in range(RECORDS)) + LAST
    for received in await crowd.everything():
        events = received.split(b"\n\n")
        data = [event for event in events if event.startswith(b"event: data")]
        assert b"".join(event.removeprefix(b"event: data\ndata:") for event in data) == expected
        assert b'"streamNextOffset":"%016d_' % (RECORDS + 1) in events[-2]


def delivered(server: Server) -> int:
    """Metered bytes that sessions have taken from the store."""
    server.store.usage.fold()
    name = f"{BasinMetrics.READ_THROUGHPUT}/bytes"
    hours = [hour for (basin, _), hour in server.store.usage.hours.items() if basin == BASIN]
    return sum(sum(hour.amounts.get(name, {}).values()) for hour in hours)


async def test_a_follower_that_stops_reading_holds_a_little_and_later_gets_the_rest(
    server: Server, crowd: Crowd
) -> None:
    large, count = b"x" * (512 << 10), 48
    await crowd.add(path("seq_num=0"), S2S)
    await crowd.add(path("seq_num=0"), S2S)
    idle, busy = crowd.clients
    reading = asyncio.create_task(until_last(busy))
    for _ in range(count):
        await server.store.append(BASIN, STREAM, [Record(large)])
    await server.store.append(BASIN, STREAM, [Record(LAST)])
    assert len(await reading) > count * len(large)
    # The difference is in the kernel's buffers of both ends.
    assert delivered(server) - count * len(large) < 16 << 20
    frames = frames_in(await until_last(idle))
    assert sum(frame.body.count(large) for frame in frames) == count
