from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from s2_sdk import S2

from streamfold.server.config import Configuration
from streamfold.server.main import running_server
from streamfold.store import StoreSettings
from tests.ingest.postgres import new_database, temporary_postgres
from tests.sdk import sdk_client

BASIN = "test-basin"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL that all tests share."""
    with temporary_postgres() as uri:
        yield uri


@pytest.fixture
def database(postgres: str) -> str:
    """The address of an empty database."""
    return new_database(postgres)


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    """A server in memory."""
    configuration = Configuration(
        host="127.0.0.1",
        port=0,
        access_log=False,
        drain_timeout=1.0,
        linger=0.0,
        store=StoreSettings(trim_grace=0.1),
    )
    async with running_server(configuration) as server:
        await server.store.create_basin(BASIN)
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
async def s2(endpoint: str) -> AsyncIterator[S2]:
    async with sdk_client(endpoint) as client:
        yield client
