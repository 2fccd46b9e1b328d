"""Many followers of one stream in a process of their own; `bench.http` starts it.

Prints "ready" when all of them are connected, and when each has had every record, or the timeout
is over, their results as JSON. Latencies go to a file, as 64-bit nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

from bench.stamps import Arrivals, Receipts
from bench.store import BASIN
from streamfold.server.main import loop_factory, tune_collector

#: What makes a read a session of this form.
FORMS = {"sse": "accept: text/event-stream", "s2s": "content-type: s2s/proto"}
#: Connections that are opened at once.
_OPENING = 64


class Crowd:
    """All followers of this process."""

    def __init__(self, followers: int, records: int) -> None:
        self.records = records
        self.arrivals = Arrivals()
        self.ready = asyncio.Event()
        self.done = asyncio.Event()
        self._connecting = self._waiting = followers

    def connected(self) -> None:
        self._connecting -= 1
        if not self._connecting:
            self.ready.set()

    def finished(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self.done.set()


class Follower(asyncio.Protocol):
    """One follower, on a connection of its own."""

    def __init__(self, crowd: Crowd, request: bytes) -> None:
        self._crowd = crowd
        self._request = request
        self._connected = self._finished = False
        self.receipts = Receipts(crowd.arrivals)
        self.refusal = ""

    @property
    def complete(self) -> bool:
        return self.receipts.in_order and self.receipts.count == self._crowd.records

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        if not self._connected:
            self._connected = True
            if not data.startswith(b"HTTP/1.1 200 "):
                self.refusal = data[:500].decode(errors="replace")
            self._crowd.connected()
        self.receipts.take(data)
        if self.receipts.count >= self._crowd.records:
            self._finish()

    def connection_lost(self, _: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._crowd.finished()


async def follow(options: argparse.Namespace) -> None:
    crowd = Crowd(options.followers, options.records)
    request = (
        f"GET /v1/streams/{options.stream}/records?seq_num=0 HTTP/1.1\r\nhost: localhost\r\n"
        f"s2-basin: {BASIN}\r\n{FORMS[options.form]}\r\n\r\n"
    ).encode()
    async with asyncio.timeout(options.timeout):
        followers = await _connect(options.port, options.followers, crowd, request)
        await crowd.ready.wait()
    refusal = next((follower.refusal for follower in followers if follower.refusal), "")
    if refusal:
        raise RuntimeError(f"a follower was refused: {refusal}")
    print("ready", flush=True)
    cpu = time.process_time()
    with suppress(TimeoutError):  # followers that lack records then are counted below
        async with asyncio.timeout(options.timeout):
            await crowd.done.wait()
    cpu = time.process_time() - cpu
    incomplete = sum(not follower.complete for follower in followers)
    if not incomplete:
        crowd.arrivals.latencies().tofile(options.latencies)
    print(json.dumps({"cpu": cpu, "incomplete": incomplete}), flush=True)


async def _connect(port: int, count: int, crowd: Crowd, request: bytes) -> list[Follower]:
    room, loop = asyncio.Semaphore(_OPENING), asyncio.get_running_loop()

    async def connect() -> Follower:
        async with room:
            _, follower = await loop.create_connection(
                lambda: Follower(crowd, request), "127.0.0.1", port
            )
        return follower

    return await asyncio.gather(*(connect() for _ in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--stream", required=True)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--followers", type=int, required=True)
    parser.add_argument("--records", type=int, required=True, help="each is to get so many")
    parser.add_argument("--timeout", type=float, required=True, help="seconds, to and from ready")
    parser.add_argument("--latencies", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    tune_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(follow(options))


if __name__ == "__main__":
    main()
