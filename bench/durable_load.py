"""Load on a server of Durable Streams, in a process of its own; `bench.durable` starts it.

Speaks HTTP/1.1 on raw connections that stay open, and does so little that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from bench.figures import Latencies
from bench.followers import Crowd, Follower
from streamfold.server.main import loop_factory, tune_collector

#: Bytes of one append.
SIZE = 256
#: Connections that are opened at once.
_OPENING = 64


def head_of(method: str, path: str, *lines: str, size: int = 0) -> bytes:
    text = [f"{method} {path} HTTP/1.1", "host: localhost", *lines, f"content-length: {size}"]
    return ("\r\n".join(text) + "\r\n\r\n").encode()


@dataclass(slots=True)
class Tally:
    """What became of the appends of all writers."""

    latencies: array[int] = field(default_factory=lambda: array("q"))
    failures: dict[int, int] = field(default_factory=dict)
    #: Answers, those before and after the measurement as well.
    answers: int = 0
    measuring: bool = False
    over: bool = False


class Writer(asyncio.Protocol):
    """One producer of one stream: the next append when the last one is answered."""

    def __init__(self, stream: str, tally: Tally) -> None:
        self._path = f"/v1/stream/{stream}"
        self._tally = tally
        self._buffer = b""
        self._sent = 0
        self._number = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def begin(self) -> None:
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        status = self._whole_answer()
        if status is None:
            return
        self._tally.answers += 1
        accepted = status in (200, 204)
        if self._tally.measuring:
            self._tally.latencies.append(time.monotonic_ns() - self._sent)
            if not accepted:
                failures = self._tally.failures
                failures[status] = failures.get(status, 0) + 1
        if self._tally.over:
            self.ended.set_result(None)
            self._transport.close()
        else:
            self._number += accepted  # what was refused is sent again, as a producer has to
            self._send()

    def _send(self) -> None:
        self._sent = time.monotonic_ns()
        self._transport.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
            b"producer-id: writer\r\nproducer-epoch: 0\r\nproducer-seq: %d\r\n"
            b"content-length: %d\r\n\r\n%b" % (self._path.encode(), self._number, SIZE, b"x" * SIZE)
        )

    def _whole_answer(self) -> int | None:
        """The status of an answer once all of it is there."""
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return None
        lower = head.lower()
        at = lower.find(b"\r\ncontent-length:")
        if at >= 0:
            size = int(lower[at + 17 :].partition(b"\r\n")[0])
            if len(body) < size:
                return None
        elif b"chunked" in lower and not body.endswith(b"0\r\n\r\n"):
            return None
        self._buffer = b""
        return int(head[9:12])


async def create(port: int, stream: str, content_type: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = f"content-type: {content_type}", "connection: close"
    writer.write(head_of("PUT", f"/v1/stream/{stream}", *lines))
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 201"):
        raise RuntimeError(f"{stream} was not created: {answer[:200]!r}")


async def append(options: argparse.Namespace) -> None:
    """One writer per stream, for some seconds after a warm-up."""
    tally, room = Tally(), asyncio.Semaphore(_OPENING)
    loop = asyncio.get_running_loop()

    async def connect(number: int) -> Writer:
        async with room:
            _, writer = await loop.create_connection(
                lambda: Writer(f"bench-{number}", tally), "127.0.0.1", options.port
            )
            return writer

    # First all streams, then connections: some servers close those that wait for more than 5 s.
    for number in range(options.count):
        await create(options.port, f"bench-{number}", "application/octet-stream")
    writers = await asyncio.gather(*(connect(number) for number in range(options.count)))
    print("ready", flush=True)
    for writer in writers:
        writer.begin()
    await asyncio.sleep(options.warm_up)
    tally.measuring, began = True, time.perf_counter()
    await asyncio.sleep(options.seconds)
    tally.measuring, seconds = False, time.perf_counter() - began
    tally.over = True
    with suppress(TimeoutError):
        async with asyncio.timeout(options.timeout):
            await asyncio.gather(*(writer.ended for writer in writers))
    part = len(tally.latencies) / max(1, tally.answers)
    facts = {"seconds": seconds, "failures": tally.failures, "part": part}
    _report(options.latencies, tally.latencies, facts)


async def follow(options: argparse.Namespace) -> None:
    """Subscribers of one stream by server-sent events, until each has had every event."""
    crowd = Crowd(options.count, options.events)
    path = f"/v1/stream/{options.stream}?offset=-1&live=sse"
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    room, loop = asyncio.Semaphore(_OPENING), asyncio.get_running_loop()

    async def connect() -> Follower:
        async with room:
            _, follower = await loop.create_connection(
                lambda: Follower(crowd, request), "127.0.0.1", options.port
            )
            return follower

    async with asyncio.timeout(options.timeout):
        followers = await asyncio.gather(*(connect() for _ in range(options.count)))
        await crowd.ready.wait()
    print("ready", flush=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(options.timeout):
            await crowd.done.wait()
    incomplete = sum(not follower.complete for follower in followers)
    _report(options.latencies, crowd.arrivals.latencies(), {"incomplete": incomplete})


def _report(target: Path, latencies: array[int] | Latencies, facts: dict[str, object]) -> None:
    with target.open("wb") as output:
        latencies.tofile(output)
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["append", "follow"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="writers, or subscribers")
    parser.add_argument("--latencies", type=Path, required=True, help="file to write")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=10.0, help="of appends")
    parser.add_argument("--stream", default="", help="to follow")
    parser.add_argument("--events", type=int, default=0, help="that each subscriber is to get")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    tune_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(append(options) if options.kind == "append" else follow(options))


if __name__ == "__main__":
    main()
