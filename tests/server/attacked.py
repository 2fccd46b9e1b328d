"""A server in a process of its own, to be attacked: its memory and its descriptors can be looked at."""

from __future__ import annotations

import asyncio
import ctypes
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from tests.proving import PROVING

BASIN = "test-basin"
MIB = 1 << 20
#: Whether attacks are as large as they were found, as `make prove` has it.
LARGE = PROVING
#: Names of the kernel that Python does not have.
_PR_CAPBSET_DROP, _CAP_NET_ADMIN = 24, 12
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Attacked:
    process: psutil.Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def resident(self) -> int:
        """Bytes of memory that the server uses."""
        return int(self.process.memory_info().rss)

    async def resident_at_rest(self) -> int:
        """The same once the server has answered, and loaded what that takes."""
        await self.metrics()
        return self.resident

    def client(self) -> httpx.AsyncClient:
        """A well-behaved client."""
        headers = {"s2-basin": BASIN}
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=False, timeout=60)

    async def metrics(self) -> dict[str, float]:
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        return {name: float(value) for name, value in pairs}

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection that sends this, and reads only on request.

        Its kernel buffers little, so that what it does not read stays with the server.
        """
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self.port))
        if data:
            connection.sendall(data)
        return connection


def get(path: str, accept: str = "*/*") -> bytes:
    """A request over HTTP/1.1."""
    return (
        f"GET {path} HTTP/1.1\r\nhost: localhost\r\ns2-basin: {BASIN}\r\naccept: {accept}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def attacked(
    folder: Path,
    *,
    streams: tuple[str, ...] = (),
    descriptors: tuple[int, int] | None = None,
    options: tuple[str, ...] = (),
) -> AsyncIterator[Attacked]:
    """A server in memory unless `options` say otherwise; `descriptors` are its soft and hard limit of
    open files.
    """
    spec = {"basins": [{"name": BASIN, "streams": [{"name": name} for name in streams]}]}
    init_file = folder / "init.json"
    init_file.write_text(json.dumps(spec))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "streamfold.cli.main", "serve", "--json", "--host=127.0.0.1",
        "--port=0", "--no-access-log", f"--init-file={init_file}", *options,
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=partial(_restrict, descriptors),
    )  # fmt: skip
    try:
        if process.stdout is None:
            raise RuntimeError("the server has no output")
        port = int(json.loads(await process.stdout.readline())["port"])
        yield Attacked(psutil.Process(process.pid), port)
    finally:
        process.kill()
        await process.wait()


def _restrict(descriptors: tuple[int, int] | None) -> None:
    """Leave a server no right to change the network, as one has none in production."""
    _LIBC.prctl(_PR_CAPBSET_DROP, _CAP_NET_ADMIN, 0, 0, 0)  # fails if there is nothing to take away
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


async def steady(server: Attacked) -> int:
    """The most memory that the server used until it used no more for a while."""
    most, unchanged = server.resident, 0
    while unchanged < 10:
        await asyncio.sleep(0.1)  # nothing announces that a process has come to rest
        resident = server.resident
        unchanged = 0 if resident > most + MIB else unchanged + 1
        most = max(most, resident)
    return most
