"""Large snapshots are never in the server's memory as a whole, and too large ones are refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from streamfold.server.main import Server
from tests.interop.serving import serving
from tests.proving import PROVING
from tests.server.durable_streams.conftest import JSON, OCTETS, token
from tests.server.raw_h1 import h1_client

MIB = 1 << 20
LIMIT = 128 * MIB
#: Bytes by which a server may grow: half of what passes through it, with room for what else it does.
GROWTH_MAX = 64 * MIB
STREAM = "/v1/stream/large"


class Peak:
    """The most memory that a process had while this ran."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes: int = 0

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.bytes = max(self.bytes, int(self._process.memory_info().rss))

    def __enter__(self) -> Peak:
        self.before = int(self._process.memory_info().rss)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.bytes - self.before


@dataclass(frozen=True, slots=True)
class LargeServer:
    """A server on local disk, in a process of its own."""

    url: str
    pid: int
    snapshots: Path


@pytest.fixture(scope="module")
def large_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeServer]:
    with serving_from(tmp_path_factory.mktemp("large")) as server:
        yield server


@contextmanager
def serving_from(folder: Path) -> Iterator[LargeServer]:
    before = {child.pid for child in psutil.Process().children()}
    options = ("--host", "127.0.0.1", "--no-access-log", "--local-root", str(folder))
    with serving(*options) as exports:
        [child] = [one for one in psutil.Process().children() if one.pid not in before]
        url = exports["S2_ACCOUNT_ENDPOINT"]
        # What the server loads for its first answers is not memory of a snapshot.
        httpx.get(f"{url}/metrics", timeout=60).raise_for_status()
        yield LargeServer(url, child.pid, folder / "snapshots")


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


async def zeros(size: int) -> AsyncIterator[bytes]:
    piece = bytes(MIB)
    for _ in range(size // MIB):
        yield piece
    yield piece[: size % MIB]


async def test_a_snapshot_of_128_mib_is_never_in_memory_as_a_whole(
    large_server: LargeServer,
) -> None:
    async with httpx.AsyncClient(base_url=large_server.url, timeout=60) as web:
        await web.put(STREAM, headers=JSON, content=b"[1,2]")
        await web.put(f"{STREAM}/snapshot/1", content=bytes(MIB))  # buffers are there now
        with Peak(large_server.pid) as peak:
            published = await web.put(f"{STREAM}/snapshot/2", content=zeros(LIMIT))
        assert published.status_code == 204, published.text
        assert peak.growth < GROWTH_MAX, peak.growth
        with Peak(large_server.pid) as peak:
            for path in ("snapshot/2", "bootstrap"):
                size = 0
                async with web.stream("GET", f"{STREAM}/{path}") as answer:
                    async for piece in answer.aiter_raw():
                        size += len(piece)
                assert size >= LIMIT
        assert peak.growth < GROWTH_MAX, peak.growth


async def test_a_larger_one_is_refused_and_leaves_nothing(large_server: LargeServer) -> None:
    files = files_below(large_server.snapshots)
    async with httpx.AsyncClient(base_url=large_server.url, timeout=60) as web:
        await web.put("/v1/stream/larger", headers=JSON, content=b"[1]")
        with Peak(large_server.pid) as peak:
            refused = await web.put("/v1/stream/larger/snapshot/1", content=zeros(LIMIT + 1))
        assert refused.status_code == 413, refused.text
        assert peak.growth < GROWTH_MAX, peak.growth
        assert (await web.get("/v1/stream/larger/snapshots")).json() == {"snapshots": []}
    assert files_below(large_server.snapshots) == files


@pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT])
async def test_one_that_says_so_is_refused_before_it_is_sent(
    durable: Server, web: httpx.AsyncClient, size: int
) -> None:
    await web.put(STREAM, headers=JSON, content=b"[1]")
    async with h1_client(durable.port) as h1:
        head = f"PUT {STREAM}/snapshot/1 HTTP/1.1\r\nhost: localhost\r\n"
        await h1.send(f"{head}content-length: {size}\r\n\r\n".encode())
        status, headers = await h1.head()
        assert (status, headers["x-content-type-options"]) == (413, "nosniff")


@pytest.mark.parametrize(("method", "path"), [("POST", STREAM), ("PUT", "/v1/stream/new")])
async def test_content_that_says_that_it_is_too_large_is_refused_before_it_is_sent(
    durable: Server, web: httpx.AsyncClient, method: str, path: str
) -> None:
    await web.put(STREAM, headers=OCTETS)
    async with h1_client(durable.port) as h1:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{_TYPE}"
        await h1.send(f"{head}content-length: {33 * MIB}\r\n\r\n".encode())
        assert (await h1.head())[0] == 413
    assert (await web.head("/v1/stream/new")).status_code == 404
    assert (await web.head(STREAM)).headers["stream-next-offset"] == token(0)


_TYPE = "content-type: application/octet-stream\r\n"


def test_a_killed_server_has_everything_that_it_acknowledged(tmp_path: Path) -> None:
    """Appends with producers, a close and a snapshot, and then `kill -9`, again and again."""
    seen = 0
    for life in range(3 if PROVING else 2):
        command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--json", "--port=0"]
        command += ["--host=127.0.0.1", "--no-access-log", f"--local-root={tmp_path}"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with server:
            try:
                assert server.stdout is not None
                url = httpx.Response(200, content=server.stdout.readline()).json()["url"]
                with httpx.Client(base_url=url, timeout=60) as web:
                    web.put(STREAM, headers=JSON)
                    assert web.get(STREAM).json() == list(range(seen))
                    for number in range(seen, seen + 20):
                        headers = JSON | {
                            "producer-id": "p",
                            "producer-epoch": "0",
                            "producer-seq": str(number),
                            "stream-seq": f"{number:05d}",
                        }
                        answer = web.post(STREAM, headers=headers, content=str(number).encode())
                        assert answer.status_code == 200
                        again = web.post(STREAM, headers=headers, content=b"null")
                        assert again.status_code == 204
                    stale = web.post(STREAM, headers=JSON | {"stream-seq": "00000"}, content=b"1")
                    assert stale.status_code == 409
                    seen += 20
                    web.put(f"{STREAM}/snapshot/{seen}", content=str(seen).encode())
                    assert web.get(f"{STREAM}/snapshot/{seen}").content == str(seen).encode()
                    if life:
                        assert web.get(f"{STREAM}/snapshot/{seen - 20}").status_code == 200
                    fate = f"/v1/stream/closed-{life}"
                    web.put(fate, headers=JSON)
                    assert web.post(fate, headers={"stream-closed": "true"}).status_code == 204
                    for earlier in range(life + 1):
                        head = web.head(f"/v1/stream/closed-{earlier}")
                        assert head.headers["stream-closed"] == "true"
            finally:
                server.kill()
