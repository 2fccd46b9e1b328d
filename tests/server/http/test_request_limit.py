"""Requests beyond the server's limit are rejected with an explanation."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest

from streamfold.server import application
from streamfold.server.http.connections import Connections
from streamfold.server.main import Server, running_server
from tests.server.conftest import BASIN, STREAM, configuration, until
from tests.server.frames import PATH, SESSION
from tests.server.raw_h2 import h2_client

TAIL = (("s2-basin", BASIN),)


async def test_requests_beyond_the_most_are_refused_until_others_end() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server(configuration(requests=4)))
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        reader = await stack.enter_async_context(h2_client(server.port))
        async with AsyncExitStack() as followers:
            for number in range(4):
                source = f"127.0.0.{number + 2}"
                follower = await followers.enter_async_context(
                    h2_client(server.port, source=source)
                )
                session = follower.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
                assert (await follower.head(session)).status == 200
            refused = await reader.exchange("GET", f"{PATH}/tail", TAIL)
            assert (refused.status, json.loads(refused.body)["code"]) == (503, "server_busy")
            assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == (
                "1",
                "1000",
            )
            assert (await reader.exchange("GET", "/health")).status == 200
        await until(lambda: server.gate.inside == 0)
        assert (await reader.exchange("GET", f"{PATH}/tail", TAIL)).status == 200


async def test_one_address_leaves_requests_to_others_however_many_connections_it_has() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running_server(configuration(requests=16)))
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        statuses = []
        for _ in range(4):
            busy = await stack.enter_async_context(h2_client(server.port))
            for _ in range(8):
                session = busy.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
                statuses.append((await busy.head(session)).status)
        assert (statuses.count(200), statuses.count(503)) == (12, 20)
        for source in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            other = await stack.enter_async_context(h2_client(server.port, source=source))
            session = other.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
            assert (await other.head(session)).status == 200


def test_addresses_of_one_ipv6_network_are_one_client_and_mapped_ipv4_addresses_are_not() -> None:
    connections = Connections()
    for address, of_client in (
        ("2001:db8::1", 1),
        ("2001:db8::ffff:2", 2),
        ("2001:db8:0:1::1", 1),
        ("::ffff:192.0.2.1", 1),
        ("::ffff:192.0.2.2", 1),
        ("192.0.2.1", 2),
        ("fe80::1%eth0", 1),
    ):
        connection = connections.open(len(connections.by_id), address, 1, lambda _: None)
        assert connections.begin(connection).of_client == of_client, address


async def test_requests_of_one_connection_beyond_its_share_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "CONNECTION_REQUESTS_MAX", 4)
    async with h2_client(server.port) as busy, h2_client(server.port) as other:
        for _ in range(4):
            session = busy.open("GET", f"{PATH}?seq_num=0", SESSION, end=True)
            assert (await busy.head(session)).status == 200
        refused = await busy.exchange("GET", f"{PATH}/tail", TAIL)
        assert (refused.status, json.loads(refused.body)["code"]) == (503, "server_busy")
        assert (await other.exchange("GET", f"{PATH}/tail", TAIL)).status == 200
