from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from s2_sdk import S2

from streamfold.follow.clients.s2 import S2Client
from streamfold.server.config import Configuration
from streamfold.server.main import Server, running_server
from tests.sdk import sdk_client

BASIN, STREAM = "test-basin", "orders"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server in memory on a free port of this machine, that says nothing and stops quickly."""
    configuration = Configuration(
        host="127.0.0.1", port=0, access_log=False, drain_timeout=1.0, linger=0.0
    )
    async with running_server(configuration) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        yield server


@pytest.fixture
async def s2(server: Server) -> AsyncIterator[S2]:
    endpoint = f"http://127.0.0.1:{server.port}"
    async with sdk_client(endpoint) as client:
        yield client


@pytest.fixture
def s2_client(s2: S2) -> S2Client:
    return S2Client(s2.basin(BASIN).stream(STREAM))
