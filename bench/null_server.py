"""A server that reads a request's body and answers at once: the most that the door and a client can do.

Run with the event loop and the settings that `streamfold serve` has.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.serving import Served
from streamfold.server.http.bodies import JSON
from streamfold.server.http.door import OpenDoor, bind
from streamfold.server.http.request import Request
from streamfold.server.main import loop_factory, tune_allocator, tune_collector

#: Seconds until it listens, at most.
_START_MAX = 30.0
#: Seconds until it has ended, at most.
_END_MAX = 5.0
_BODY_MAX = 1 << 20


async def answer(request: Request) -> None:
    """Read the body, and answer with an empty object."""
    await request.body(_BODY_MAX)
    await request.respond(200, (JSON,), b"{}")


async def serve(port: int) -> None:
    door = bind("127.0.0.1", port)
    OpenDoor(door, answer).start()
    await asyncio.Event().wait()


@contextmanager
def null_serving() -> Iterator[Served]:
    """The null server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.null_server", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until_listening(port, "null server")
            yield Served(server.pid, port)
        finally:
            server.terminate()
            server.wait(_END_MAX)


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


if __name__ == "__main__":
    tune_collector()
    tune_allocator()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(int(sys.argv[1])))
