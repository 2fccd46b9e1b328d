"""The server retains no client input, whatever its length."""

from __future__ import annotations

import gc
import subprocess
import sys
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


#: Prints the page faults of 20 rounds of 16 MiB, in blocks of 1 MiB, after such rounds in two threads.
_ROUNDS = """
import resource, threading
from streamfold.server.main import tune_allocator
def work():
    for _ in range(20):
        del [bytes([1]) * (1 << 20) for _ in range(16)][:]
tune_allocator()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have no such settings")
def test_memory_of_batches_is_used_again_and_not_mapped_anew() -> None:
    """Mapped anew, it would take 80,000 page faults."""
    done = subprocess.run(
        [sys.executable, "-c", _ROUNDS], check=True, stdout=subprocess.PIPE, text=True
    )
    assert int(done.stdout) < 4000
