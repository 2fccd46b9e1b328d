"""The server does not keep what clients send, from any client and of any length."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from streamfold.model.access_tokens import Secret
from streamfold.server.main import running_server
from tests.server.conftest import configuration, until
from tests.server.raw_h1 import H1Client, h1_client

REQUESTS = 100
LONG = "x" * 30_000
#: Bytes that may be there after the requests and were not before; to keep one of each takes 3 MB.
SLACK = 2 << 20


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("line", "header"),
    [
        ("GET /v1/streams", "s2-basin: {}"),
        ("GET /{}", "accept: */*"),
        ("GET /bucket/stream/{}", "accept: */*"),
        ("GET /bucket/stream/a/{}", "accept: */*"),
        ("{} /health", "accept: */*"),
        ("POST /v1/streams/s/records", "content-type: application/json; {}"),
    ],
)
@pytest.mark.usefixtures("traced", "capfdbinary")
async def test_long_requests_of_strangers_leave_nothing_in_memory(line: str, header: str) -> None:
    settings = configuration(access_log=True, root_token=Secret("root"))
    async with running_server(settings) as server, h1_client(server.port) as h1:
        await _ask(h1, "GET /health", "accept: */*")
        before = _held()
        for number in range(REQUESTS):
            unique = f"X{number}{LONG}"
            await _ask(h1, line.format(unique), header.format(unique))
        await until(lambda: _held() < before + SLACK)


async def _ask(h1: H1Client, line: str, header: str) -> None:
    await h1.send(
        f"{line} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n{header}\r\n\r\n".encode()
    )
    _, headers = await h1.head()
    await h1.body(int(headers.get("content-length", 0)))


def _held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
