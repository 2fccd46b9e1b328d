"""Unread responses are bounded, and clients that read nothing are disconnected."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from streamfold.model.records import Record
from streamfold.server.durable_streams import reads
from streamfold.server.http import response_limits
from streamfold.server.http.door import STREAM_WINDOW
from streamfold.server.http.response_limits import ANSWER_COST, PACE_MIN
from streamfold.server.main import Server, running_server
from tests.server.attacked import LARGE, MIB, Attacked, attacked, get, steady
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION
from tests.server.raw_h1 import h1_client
from tests.server.raw_h2 import h2_client

#: Bytes by which a server may grow: 256 MiB for answers, and 64 KiB for each of 1,500 connections.
GROWTH_MAX = 384 * MIB
READERS = 150
#: Followers, appends of 1 MB that they get, and bytes by which a server may grow for them. The kernel
#: buffers about 3 MB for each, and less for each of many.
FOLLOWERS, APPENDS, FOLLOWERS_GROWTH = (1500, 3, GROWTH_MAX) if LARGE else (300, 6, 200 * MIB)
#: Bytes by which a server may grow for 16 sessions far behind the tail: 128 MiB that are read ahead,
#: and 4 MiB of answers for each.
BEHIND_GROWTH = 256 * MIB
PAGE = "/bucket/pages"
PROTOBUF = "application/protobuf"
#: HTTP/2 connections without a window, and requests on each for a page of 31 kB. Beyond the budget,
#: each request that waits for its answer costs 12 KiB.
STUCK, STUCK_EACH = (250, 100) if LARGE else (60, 128)
SEED = 12
STUCK_GROWTH = 256 * MIB + STUCK * STUCK_EACH * (12 << 10)


async def fill_pages(server: Attacked, megabytes: int = 10) -> None:
    """A stream of Durable Streams that has several pages; of each append, a large and a small row."""
    async with server.client() as client:
        headers = {"content-type": "application/octet-stream"}
        await client.put(PAGE, headers=headers)
        for _ in range(megabytes):
            answer = await client.post(PAGE, headers=headers, content=b"z" * MIB)
            assert answer.status_code == 204


@contextmanager
def silent(server: Attacked, request: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Clients that ask, and do not read the answer."""
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect(request)) for _ in range(count)]


async def test_readers_of_pages_who_do_not_read_cost_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    async with attacked(tmp_path) as server:
        await fill_pages(server)
        before = await server.resident_at_rest()
        with silent(server, get(PAGE), READERS):
            assert await steady(server) - before < GROWTH_MAX
            metrics = await server.metrics()
            assert metrics["streamfold_unread_bytes"] <= metrics["streamfold_unread_bytes_max"]
            async with server.client() as client:
                assert len((await client.get(PAGE)).content) >= MIB


async def test_requests_of_a_connection_without_a_window_cost_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    async with attacked(tmp_path) as server:
        await fill_pages(server)
        before = await server.resident_at_rest()
        async with h2_client(server.port, give_credit=False, window=0) as h2:
            for _ in range(128):
                h2.open("GET", PAGE, end=True)
            assert await steady(server) - before < GROWTH_MAX
            async with server.client() as client:
                assert len((await client.get(PAGE)).content) >= MIB


async def test_unread_small_pages_over_http2_cost_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    async with attacked(tmp_path) as server, AsyncExitStack() as stack:
        async with server.client() as client:
            headers = {"content-type": "application/octet-stream"}
            await client.put(PAGE, headers=headers)
            await client.post(PAGE, headers=headers, content=b"z" * 31_000)
        before = await server.resident_at_rest()
        for _ in range(STUCK):
            h2 = await stack.enter_async_context(
                h2_client(server.port, give_credit=False, window=0)
            )
            for _ in range(STUCK_EACH):
                h2.open("GET", PAGE, end=True)
        assert await steady(server) - before < STUCK_GROWTH
        async with server.client() as client:
            assert len((await client.get(PAGE)).content) == 31_000


@pytest.mark.parametrize("accept", ["text/event-stream", "s2s/proto"])
async def test_followers_who_do_not_read_cost_no_more_than_the_budget(
    tmp_path: Path, accept: str
) -> None:
    request = get(f"{PATH}?seq_num=0", accept)
    if accept == "s2s/proto":
        request = request.replace(b"accept:", b"content-type:")
    async with attacked(tmp_path, streams=(STREAM,)) as server, server.client() as client:
        before = await server.resident_at_rest()
        with silent(server, request, FOLLOWERS) as followers:
            for follower in followers:
                assert follower.recv(12) == b"HTTP/1.1 200"
            record = '{"records":[{"body":"%s"}]}' % ("z" * 1_000_000)
            for _ in range(APPENDS):
                answer = await client.post(PATH, content=record, headers=JSON)
                assert answer.status_code == 200
            assert await steady(server) - before < FOLLOWERS_GROWTH


async def test_sessions_far_behind_the_tail_that_do_not_read_cost_no_more_than_the_budget(
    tmp_path: Path,
) -> None:
    """What is read ahead for them does not grow with the stream."""
    options = (f"--local-root={tmp_path / 'data'}",)
    async with attacked(tmp_path, options=options) as server:
        await fill_pages(server, 160)
        before = await server.resident_at_rest()
        request = get("/v1/streams/pages/records?seq_num=0", "text/event-stream")
        with silent(server, request.replace(BASIN.encode(), b"bucket"), 16) as readers:
            for reader in readers:
                assert reader.recv(12) == b"HTTP/1.1 200"
            assert await steady(server) - before < BEHIND_GROWTH


JSON = {"content-type": "application/json"}


async def fill(server: Server, megabytes: int) -> None:
    await server.store.create_basin(BASIN)
    await server.store.create_stream(BASIN, STREAM)
    for _ in range(megabytes):
        await server.store.append(BASIN, STREAM, [Record(b"z" * 1_000_000)])


async def test_a_client_over_http1_that_takes_nothing_is_disconnected() -> None:
    async with running_server(configuration(write_deadline=0.5)) as server:
        await fill(server, 20)
        async with h1_client(server.port) as client:
            await client.send(get(f"{PATH}?seq_num=0", "text/event-stream"))
            await until(lambda: server.client_limits.unread.cut_off == 1)
            await until(lambda: server.gate.inside == 0)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await client.body(50 << 20)


@pytest.mark.parametrize(
    ("path", "headers"),
    [(f"{PATH}?seq_num=0", SESSION), (f"{PATH}?seq_num=0&count=1", (("s2-basin", BASIN),))],
)
async def test_a_client_over_http2_that_takes_nothing_is_disconnected(
    path: str, headers: tuple[tuple[str, str], ...]
) -> None:
    async with running_server(configuration(write_deadline=0.5)) as server:
        await fill(server, 5)
        async with h2_client(server.port, give_credit=False, window=1000) as h2:
            h2.open("GET", path, headers, end=True)
            await asyncio.wait_for(h2.closed.wait(), 60)
        assert server.client_limits.unread.cut_off == 1
        await until(lambda: server.gate.inside == 0)
        assert server.client_limits.unread.room.used == 0


@pytest.mark.parametrize("size", [1_000, 15_000, 31_000])
async def test_small_answers_over_http2_that_are_not_taken_are_counted(size: int) -> None:
    """About: those that are watched are a sample, of 32 here, drawn with the seed that is printed."""
    print("seed", SEED)
    async with running_server(configuration(unread_bytes=1 << 30)) as server, AsyncExitStack() as s:
        server.client_limits.unread.seed(random.Random(SEED))
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        await server.store.append(BASIN, STREAM, [Record(b"z" * size)])
        page, sent = f"{PATH}?seq_num=0", 0
        for _ in range(round(16 * MIB / (size + ANSWER_COST)) // 128 + 1):
            h2 = await s.enter_async_context(h2_client(server.port, give_credit=False, window=0))
            for _ in range(128):
                stuck = h2.open("GET", page, (("s2-basin", BASIN), ("accept", PROTOBUF)), end=True)
                sent += size + ANSWER_COST
            await h2.head(stuck)
        room = server.client_limits.unread.room
        await until(lambda: room.used > sent / 3)


@pytest.mark.parametrize("size", [60_000, 250_000])
@pytest.mark.parametrize(
    ("path", "header"),
    [
        (f"{PATH}?seq_num=0", ("accept", PROTOBUF)),
        (f"{PATH}?seq_num=0", ("accept", "text/event-stream")),
        (f"{PATH}?seq_num=0", ("content-type", "s2s/proto")),
        (f"/v1/streams/{STREAM}/snapshot/1", ("accept", "*/*")),
        (f"/v1/streams/{STREAM}/bootstrap", ("accept", "*/*")),
    ],
)
async def test_what_a_client_over_http2_does_not_take_is_counted_to_the_last_byte(
    path: str, header: tuple[str, str], size: int
) -> None:
    """Also of a session that has come to the tail, and of a response that has no more to send."""
    async with running_server(configuration(write_deadline=0.5)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        await server.store.append(BASIN, STREAM, [Record(b"z" * size)])
        basin = ("s2-basin", BASIN)
        async with h2_client(server.port) as h2:
            snapshot = f"/v1/streams/{STREAM}/snapshot/1"
            length = ("content-length", str(size))
            answer = await h2.exchange("PUT", snapshot, (basin, length), b"s" * size)
            assert answer.status == 204
        async with h2_client(server.port, give_credit=False, window=1000) as h2:
            h2.open("GET", path, (basin, header), end=True)
            await asyncio.wait_for(h2.closed.wait(), 60)
        assert server.client_limits.unread.cut_off == 1
        await until(lambda: server.client_limits.unread.room.used == 0)


async def test_a_large_read_gets_its_turn_before_many_clients_that_take_nothing_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of which the kernel takes the most part at once: about 20 fit the memory."""
    monkeypatch.setattr(reads, "PAGE_BYTES", 4 * MIB)
    monkeypatch.setattr(reads, "PAGE_ROOM", 16 * MIB)
    # No client is cut off but by those who wait, and these wait as long as it takes.
    settings = configuration(unread_bytes=128 * MIB, write_deadline=1000.0)
    async with running_server(settings) as running, AsyncExitStack() as stack:
        server = Attacked(psutil.Process(), running.port)
        await fill_pages(server, 5)
        for _ in range(80):
            stack.enter_context(server.connect(get(PAGE)))
        await until(lambda: running.client_limits.unread.room.waiting >= 50)
        async with server.client() as client:
            assert len((await client.get(PAGE, timeout=300)).content) >= 4 * MIB - 1000


async def test_a_connection_with_many_waiting_reads_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds all that it may, and more of its reads wait; another one reads without any wait."""
    monkeypatch.setattr(response_limits, "GRACE", 1e6)  # seconds: however long the other one takes
    async with running_server(configuration(unread_bytes=64 << 20)) as server:
        await fill(server, 1)
        await server.store.append(BASIN, STREAM, [Record(b"small")])
        headers, response_budget = (("s2-basin", BASIN),), server.client_limits.unread
        async with (
            h2_client(server.port, give_credit=False, window=1000) as greedy,
            h2_client(server.port) as reader,
        ):
            for _ in range(100):
                greedy.open("GET", f"{PATH}?seq_num=0", headers, end=True)
            await until(lambda: response_budget.room.waiting > 0)
            for _ in range(10):
                answer = await reader.exchange("GET", f"{PATH}?seq_num=1", headers)
                assert (answer.status, b"small" in answer.body) == (200, True)
            assert (response_budget.room.waiting > 0, response_budget.cut_off) == (True, 0)


async def test_readers_at_the_least_pace_give_way_to_those_who_wait() -> None:
    """They take more than they must, but hold everything: they are cut off while others wait."""
    async with (
        running_server(configuration(unread_bytes=10 << 20)) as server,
        AsyncExitStack() as s,
    ):
        await fill(server, 20)
        headers = (("s2-basin", BASIN), ("accept", "text/event-stream"))
        slow = [
            await s.enter_async_context(h2_client(server.port, give_credit=False, window=1000))
            for _ in range(2)
        ]
        for one in slow:
            one.open("GET", f"{PATH}?seq_num=0", headers, end=True)
        await until(lambda: server.client_limits.unread.room.used > 7 << 20)
        reader = await s.enter_async_context(h2_client(server.port))
        page = f"{PATH}?seq_num=3&count=1"
        reading = asyncio.create_task(reader.exchange("GET", page, (("s2-basin", BASIN),)))
        while not reading.done():
            for one in slow:
                if not one.closed.is_set():
                    one.take(1, PACE_MIN // 4)
            await asyncio.sleep(0.2)  # this is their pace: a quarter above the least
        assert (await reading).status == 200
        assert server.client_limits.unread.cut_off > 0


async def test_answers_that_wait_for_memory_get_it_from_clients_that_do_not_read() -> None:
    """With memory for one answer, a second client gets its own although the first does not read."""
    async with running_server(configuration(unread_bytes=4 << 20)) as server:
        await fill(server, 5)
        page = f"{PATH}?seq_num=0&count=1"
        async with (
            h2_client(server.port, give_credit=False, window=1000) as idle,
            h2_client(server.port) as reader,
        ):
            stuck = idle.open("GET", page, (("s2-basin", BASIN),), end=True)
            await idle.head(stuck)
            for _ in range(5):
                answer = await reader.exchange("GET", page, (("s2-basin", BASIN),))
                assert (answer.status, len(answer.body) > 1_000_000) == (200, True)
            await asyncio.wait_for(idle.closed.wait(), 60)


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with running_server(configuration(write_deadline=2.0)) as server:
        await fill(server, 5)
        async with h1_client(server.port) as client:
            await client.send(get(f"{PATH}?seq_num=0&count=5", "text/event-stream"))
            await client.head()
            received = bytearray()
            while chunk := await client.chunk():
                received += chunk
                await asyncio.sleep(0.005)
        assert received.count(b"z" * 1_000_000) == 5
        assert server.client_limits.unread.cut_off == 0


async def test_large_answers_declare_their_size_and_arrive_whole() -> None:
    async with running_server(configuration()) as server:
        await fill(server, 1)
        async with h1_client(server.port) as client:
            for _ in range(2):
                await client.send(get(f"{PATH}?seq_num=0"))
                _, headers = await client.head()
                assert (await client.body(int(headers["content-length"]))).count(b"z") == 1_000_000


async def test_what_is_held_for_clients_is_in_the_metrics() -> None:
    async with running_server(configuration()) as server, h2_client(server.port) as h2:
        text = (await h2.exchange("GET", "/metrics")).body.decode()
    for name in ("unread_bytes", "unread_bytes_max", "connections", "connections_max"):
        assert f"\nstreamfold_{name} " in text
    assert 'streamfold_cut_off_total{reason="unread_answer"} 0.0' in text


@pytest.mark.parametrize("path", [f"{PATH}?seq_num=0", "/v1/streams/orders/snapshot/0"])
async def test_what_a_client_sends_while_it_takes_nothing_of_its_answer_is_dropped(
    server: Server, path: str
) -> None:
    """Otherwise each such request would hold a whole window, which no budget counts."""
    await server.store.append(BASIN, STREAM, [Record(b"x" * 100_000)])
    basin = ("s2-basin", BASIN)
    async with h2_client(server.port, give_credit=False, window=0) as h2:
        published = await h2.exchange(
            "PUT",
            "/v1/streams/orders/snapshot/0",
            (basin, ("content-type", "application/octet-stream"), ("content-length", "100000")),
            bytes(100_000),
        )
        assert published.status == 204
        stuck = h2.open("GET", path, (basin,))
        assert (await h2.head(stuck)).status == 200
        await h2.send(stuck, bytes(3 * STREAM_WINDOW))
        assert not h2.answer(stuck).over
