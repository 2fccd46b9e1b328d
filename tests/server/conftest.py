from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from s2_sdk import S2, S2Basin, S2Stream

from streamfold.model.access_tokens import Secret
from streamfold.server.config import Configuration
from streamfold.server.main import Server, running_server
from tests.sdk import sdk_client
from tests.server.raw_h2 import H2Client, h2_client

ROOT = "a-root-token-of-this-test"
BASIN = "test-basin"
STREAM = "orders"


def configuration(**changes: Any) -> Configuration:
    """A server in memory on a free port of this machine, that says nothing and stops quickly."""
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "access_log": False,
        "drain_timeout": 1.0,
        "linger": 0.0,
        **changes,
    }
    return Configuration(**settings)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something in the server that nothing announces."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing announces that a request is over
            await asyncio.sleep(0.005)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server(configuration()) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        yield server


@pytest.fixture
async def guarded() -> AsyncIterator[Server]:
    """A server that asks for access tokens, and whose long-polls are short."""
    async with running_server(configuration(root_token=Secret(ROOT), long_poll=0.1)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        yield server


def sdk(server: Server, **options: Any) -> AbstractAsyncContextManager[S2]:
    """The official client, as its documentation has it."""
    endpoint = f"http://127.0.0.1:{server.port}"
    client: AbstractAsyncContextManager[S2] = sdk_client(endpoint, **options)
    return client


@pytest.fixture
async def s2(server: Server) -> AsyncIterator[S2]:
    async with sdk(server) as client:
        yield client


@pytest.fixture
def basin(s2: S2) -> S2Basin:
    return s2.basin(BASIN)


@pytest.fixture
def stream(basin: S2Basin) -> S2Stream:
    return basin.stream(STREAM)


@pytest.fixture
async def h2(server: Server) -> AsyncIterator[H2Client]:
    async with h2_client(server.port) as client:
        yield client
