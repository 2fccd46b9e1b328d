from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from s2_sdk import S2

from streamfold.follow.clients.s2 import S2Client
from streamfold.server.main import Server, running_server
from streamfold.store.settings import StoreSettings
from tests.follow.ledger import Ledger
from tests.sdk import sdk_client
from tests.server.conftest import configuration

BASIN, STREAM = "test-basin", "orders"
#: For tests that wait until a trim takes effect.
QUICK_TRIMS = StoreSettings(trim_grace=0.2)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(configuration(store=QUICK_TRIMS)) as server:
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
