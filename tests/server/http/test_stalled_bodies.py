"""Stalled bodies are dropped and hold no memory that others need."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import cast

import pytest

from streamfold.errors import ServerBusyError
from streamfold.server.http.connections import Connection
from streamfold.server.http.door import STREAMS_MAX
from streamfold.server.http.offload import OffloadPool
from streamfold.server.http.request import Request
from streamfold.server.http.request_limits import RequestBudget
from streamfold.server.http.response_limits import ResponseBudget
from streamfold.server.main import Server, running_server
from streamfold.testing.simulation.exchange import SimulatedExchange
from streamfold.testing.simulation.loop import roll_with
from tests.server.attacked import MIB, attacked, steady
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION, append_frame, frames_in
from tests.server.raw_h1 import H1Client, h1_client
from tests.server.raw_h2 import h2_client

HEAD = (
    "{} HTTP/1.1\r\nhost: localhost\r\ns2-basin: test-basin\r\ncontent-type: {}\r\n"
    "content-length: {}\r\n\r\n"
)
#: Bytes by which a server may grow: 256 MiB for bodies, and what their connections cost.
GROWTH_MAX = 384 * MIB
UPLOADS = 100
OCTETS = "application/octet-stream"
SNAPSHOT = "PUT /v1/streams/orders/snapshot/0"


async def refusal(client: H1Client) -> tuple[int, str]:
    """Status and code of an answer that refuses."""
    status, headers = await client.head()
    return status, json.loads(await client.body(int(headers["content-length"])))["code"]


@pytest.mark.parametrize(
    ("line", "content_type"),
    [
        (f"POST {PATH}", "application/json"),
        (f"POST {PATH}", "application/protobuf"),
        ("POST /v1/streams", "application/json"),
        (SNAPSHOT, OCTETS),
        ("PUT /bucket/stream", OCTETS),
        ("PUT /v1/stream/__ds/subscriptions/s", "application/json"),
    ],
)
@pytest.mark.parametrize("size", [100, 10_000])
async def test_a_body_that_stalls_is_refused_with_408(
    line: str, content_type: str, size: int
) -> None:
    async with running_server(configuration(body_timeout=0.5)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h1_client(server.port) as client:
            await client.send(HEAD.format(line, content_type, size).encode() + b"{")
            assert await refusal(client) == (408, "request_timeout")
        assert server.client_limits.request_budget.cut_off == 1


async def test_refused_requests_do_not_wait_for_their_small_bodies(server: Server) -> None:
    async with h2_client(server.port) as client:
        sent = [
            client.open("POST", "/v1/nothing", [("content-length", "5")])
            for _ in range(STREAMS_MAX)
        ]
        assert {(await client.whole(stream_id)).status for stream_id in sent} == {404}
        await until(lambda: all(client.answer(stream_id).reset is not None for stream_id in sent))


async def test_a_snapshot_that_drips_is_refused_although_it_is_never_silent() -> None:
    async with running_server(configuration(body_timeout=0.5)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h1_client(server.port) as client:
            await client.send(HEAD.format(SNAPSHOT, OCTETS, 100_000).encode())
            dripping = asyncio.create_task(_drip(client))
            assert await refusal(client) == (408, "request_timeout")
            dripping.cancel()


async def _drip(client: H1Client) -> None:
    """Send past the writer, which drops the answer when it finds the connection closed."""
    descriptor = client.writer.get_extra_info("socket").fileno()
    with suppress(OSError):
        while True:
            os.write(descriptor, b"x")
            await asyncio.sleep(0.02)


async def test_a_snapshot_that_keeps_its_pace_may_take_longer_than_the_window() -> None:
    # A window that a busy machine does not fill with a pause of its own.
    async with running_server(configuration(body_timeout=1.0)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h1_client(server.port) as client:
            await client.send(HEAD.format(SNAPSHOT, OCTETS, 50 * 10_000).encode())
            for _ in range(50):
                await client.send(b"x" * 10_000)
                await asyncio.sleep(0.03)
            assert (await client.head())[0] == 204


async def test_a_frame_that_stalls_ends_its_session_and_a_pause_between_frames_does_not() -> None:
    async with running_server(configuration(body_timeout=0.5)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with h2_client(server.port) as h2:
            pausing, stalling = (h2.open("POST", PATH, SESSION) for _ in range(2))
            await h2.send(pausing, append_frame(b"first"))
            await h2.send(stalling, append_frame(b"second") + append_frame(b"third")[:-1])
            frames = frames_in(bytes((await h2.whole(stalling)).body))
            assert [frame.terminal for frame in frames] == [False, True]
            assert json.loads(frames[1].failure().body)["code"] == "request_timeout"
            await h2.send(pausing, append_frame(b"fourth"), end=True)
            frames = frames_in(bytes((await h2.whole(pausing)).body))
            assert [frame.terminal for frame in frames] == [False, False]


async def test_a_body_that_needs_memory_gets_it_from_bodies_that_stall() -> None:
    """Two stalled bodies hold all the memory there is; a third client appends all the same."""
    settings = configuration(body_timeout=4.0, body_bytes=6 << 20)
    body = json.dumps({"records": [{"body": "x" * 1_000_000}]}).encode()
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with AsyncExitStack() as stack:
            line = f"POST {PATH}"
            for _ in range(2):
                stalled = await stack.enter_async_context(h1_client(server.port))
                await stalled.send(HEAD.format(line, "application/json", 3 << 20).encode())
            await until(lambda: server.client_limits.request_budget.room.used == 6 << 20)
            client = await stack.enter_async_context(h1_client(server.port))
            await client.send(HEAD.format(line, "application/json", len(body)).encode() + body)
            assert (await client.head())[0] == 200


async def test_a_body_that_needs_memory_gets_it_from_bodies_that_trickle() -> None:
    """Two bodies hold all memory, and arrive at a pace that is fine while no other waits."""
    settings = configuration(body_timeout=2.0, body_bytes=6 << 20)
    body = json.dumps({"records": [{"body": "x" * 1_000_000}]}).encode()
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with AsyncExitStack() as stack:
            line = f"POST {PATH}"
            trickling = []
            for _ in range(2):
                slow = await stack.enter_async_context(h1_client(server.port))
                await slow.send(HEAD.format(line, "application/json", 3 << 20).encode())
                trickling.append(asyncio.create_task(_trickle(slow)))
            await until(lambda: server.client_limits.request_budget.room.used == 6 << 20)
            client = await stack.enter_async_context(h1_client(server.port))
            await client.send(HEAD.format(line, "application/json", len(body)).encode() + body)
            assert (await client.head())[0] == 200
            for task in trickling:
                task.cancel()
            await asyncio.gather(*trickling, return_exceptions=True)


async def _trickle(client: H1Client) -> None:
    """40 KB a second, which is five times what a body must bring."""
    while True:
        await client.send(b" " * 2000)
        await asyncio.sleep(0.05)


async def test_few_bodies_wait_for_memory_and_further_ones_are_refused() -> None:
    """What has arrived of a body that waits is in memory, too: one window for each."""
    settings = configuration(body_timeout=30.0, body_bytes=2 << 20)
    async with running_server(settings) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        budget = server.client_limits.request_budget
        budget.waiting_max = 4
        head = HEAD.format(f"POST {PATH}", "application/json", 1 << 20).encode()
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(h1_client(server.port)) for _ in range(6)]
            for client in clients[:5]:
                await client.send(head)
            await until(lambda: budget.room.waiting == 3)
            await clients[5].send(head)
            assert await refusal(clients[5]) == (503, "server_busy")
            assert budget.cut_off == 1
            for client in clients[:2]:
                client.writer.close()
            await until(lambda: budget.room.waiting == 1)
            late = await stack.enter_async_context(h1_client(server.port))
            await late.send(head)
            await until(lambda: budget.room.waiting == 2)


async def test_addresses_of_one_ipv6_network_are_one_client_of_those_that_wait_for_memory() -> None:
    """Requests without a server: a test cannot count on more than one IPv6 address."""
    roll_with(1)
    budget = RequestBudget(capacity=1 << 20)
    budget.waiting_max = 4
    pool = OffloadPool()
    tasks: list[asyncio.Task[bytes | None]] = []

    def read_from(address: str) -> asyncio.Task[bytes | None]:
        exchange = SimulatedExchange(
            Connection(0, address, 1, lambda _: None), "POST", "/", {}, declared=1 << 20
        )
        request = Request(exchange, budget, ResponseBudget(), pool)
        task = asyncio.create_task(request.body(1 << 20))
        request.task = cast("asyncio.Task[None]", task)
        tasks.append(task)
        return task

    try:
        for number in range(1, 5):
            read_from(f"2001:db8::{number}")
        await until(lambda: budget.room.waiting == 3)
        with pytest.raises(ServerBusyError):
            await asyncio.wait_for(read_from("2001:db8::5"), 60)
        read_from("2001:db8:0:1::1")
        await until(lambda: budget.room.waiting == 4)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.close()


async def test_bodies_that_stall_cost_no_more_than_the_budget(tmp_path: Path) -> None:
    async with (
        attacked(tmp_path, streams=(STREAM,)) as server,
        server.client() as client,
        AsyncExitStack() as stack,
    ):
        before = await server.resident_at_rest()
        head = HEAD.format(f"POST {PATH}", "application/json", 4 << 20).encode()
        for _ in range(UPLOADS):
            stalled = await stack.enter_async_context(h1_client(server.port))
            stalled.writer.write(head + b" " * ((4 << 20) - 1))
        assert await steady(server) - before < GROWTH_MAX
        answer = await client.post(
            PATH, content='{"records":[{}]}', headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
