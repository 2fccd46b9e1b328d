from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from streamfold.server.main import Server, running_server
from streamfold.store.store import StreamStore, open_store
from tests.server.conftest import configuration
from tests.server.durable_streams.subscribing import BASIN, Receiver, receiving

JSON = {"content-type": "application/json"}
OCTETS = {"content-type": "application/octet-stream"}
START = "0000000000000000_0000000000000000"


def token(seq_num: int) -> str:
    """The offset of a position."""
    return f"{seq_num:016d}_{0:016d}"


async def read_pages(web: httpx.AsyncClient, path: str, offset: str) -> bytes:
    """All that there is from an offset on, page by page."""
    found = b""
    while True:
        page = await web.get(path, params={"offset": offset})
        found += page.content
        if "stream-up-to-date" in page.headers:
            return found
        offset = page.headers["stream-next-offset"]


def producer(name: str, epoch: int, seq: int) -> dict[str, str]:
    return {"producer-id": name, "producer-epoch": str(epoch), "producer-seq": str(seq)}


@asynccontextmanager
async def browsing(server: Server, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the server, without timeouts: long-polls of tests may last a minute."""
    url = f"http://127.0.0.1:{server.port}"
    settings = {"verify": False, "timeout": None, **options}  # certificates take 25 ms to load
    async with httpx.AsyncClient(base_url=url, **settings) as client:
        yield client


@pytest.fixture
async def durable() -> AsyncIterator[Server]:
    """A server whose long-polls are short."""
    async with running_server(configuration(long_poll=0.1)) as server:
        yield server


@pytest.fixture
async def store() -> AsyncIterator[StreamStore]:
    """A store with one basin, for subscriptions without a server."""
    async with open_store("memory:") as store:
        await store.create_basin(BASIN)
        yield store


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """Takes webhooks."""
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
async def web(durable: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with browsing(durable) as client:
        yield client
