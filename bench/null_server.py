"""A server that reads a request's body and answers at once: the most that granian and a client can do.

Run by granian itself, with the settings that `streamfold serve` has.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import psutil

from bench.serving import Served

#: Seconds until it listens, at most.
_START_MAX = 30.0
#: Seconds until it has ended, at most.
_END_MAX = 5.0
_JSON = [("content-type", "application/json")]


class _Scope(Protocol):
    proto: str


class _HTTPProtocol(Protocol):
    async def __call__(self) -> bytes: ...

    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


async def answer(scope: _Scope, protocol: _HTTPProtocol) -> None:
    """Read the body, and answer with an empty object."""
    await protocol()
    protocol.response_bytes(200, _JSON, b"{}")


@contextmanager
def null_serving() -> Iterator[Served]:
    """The null server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "granian", "--interface=rsgi", "--http=auto", "--workers=1"]
    command += ["--host=127.0.0.1", f"--port={port}", "--no-access-log", "bench.null_server:answer"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until_listening(port, "null server")
            yield Served(server.pid, port)
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End granian and its worker; it may wait for its connections without an end."""
    processes = [*psutil.Process(server.pid).children(), psutil.Process(server.pid)]
    server.terminate()
    try:
        server.wait(_END_MAX)
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()


def wait_until_listening(port: int, name: str) -> None:
    """Wait for a server that was just started."""
    end = time.monotonic() + _START_MAX
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the {name} did not listen on port {port} within {_START_MAX:.0f} s")
