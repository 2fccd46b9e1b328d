from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from tests.interop.serving import serving
from tests.server.conftest import ROOT, configuration

from streamfold.model.access_tokens import Secret
from streamfold.server.main import Server, running_server
from streamfold_langgraph import StreamfoldSaver

BASIN = "test-agents"


@pytest.fixture
def basin() -> str:
    return BASIN


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(configuration()) as server:
        await server.store.create_basin(BASIN)
        yield server


@pytest.fixture
def endpoint(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
async def saver(endpoint: str) -> AsyncIterator[StreamfoldSaver]:
    async with StreamfoldSaver.connect(endpoint, basin=BASIN) as saver:
        yield saver


@pytest.fixture
async def other(endpoint: str) -> AsyncIterator[StreamfoldSaver]:
    """The saver of a second process."""
    async with StreamfoldSaver.connect(endpoint, basin=BASIN) as saver:
        yield saver


@pytest.fixture
def sync_endpoint() -> Iterator[str]:
    """A server in its own process, for tests without an event loop."""
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        url = exports["S2_ACCOUNT_ENDPOINT"]
        httpx.put(f"{url}/v1/basins/{BASIN}", json={}, timeout=60).raise_for_status()
        yield url


@pytest.fixture
async def guarded(basin: str) -> AsyncIterator[Server]:
    """A server that requires access tokens."""
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        await server.store.create_basin(basin)
        yield server
