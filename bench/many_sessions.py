"""Many append sessions in a process of their own, each with one small append on its way.

`bench.compare` starts it. Each session is one HTTP/1.1 connection to a stream of its own, which sends
the next append when the last one is acknowledged, as a producer does that waits for its acks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from bench.sessions import chunk_of
from bench.store import BASIN
from streamfold.server.main import loop_factory, tune_collector
from streamfold.wire.s2.frames import FrameDecoder

#: Seconds until all sessions have their first ack, and after the load until all have their last.
_TIMEOUT = 60.0
#: Connections that are opened at once.
_OPENING = 64
#: Ends a line, and a chunk.
_END = b"\r\n"


@dataclass(slots=True)
class Load:
    """What all sessions have in common."""

    chunk: bytes
    #: Sessions that wait for their first ack, or for their last one.
    waiting: int
    #: Nanoseconds that each ack of the measured time took.
    latencies: array[int] = field(default_factory=lambda: array("q"))
    #: When to send nothing more; infinite until the measured time begins.
    until: float = float("inf")
    measuring: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def one_less(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.done.set()


class Session(asyncio.Protocol):
    """One session, with one append at a time: after an ack, nothing comes before the next append."""

    def __init__(self, load: Load, head: bytes) -> None:
        self._load = load
        self._head = head
        self._received = b""
        self._decoder = FrameDecoder()
        self._sent = 0
        self._acks = 0
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._head + self._load.chunk)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._head:
            head, found, rest = self._received.partition(_END + _END)
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                self._fail(head.decode(errors="replace"))
                return
            self._received, self._head = rest, b""
        while self._take_chunk():
            while (frame := self._decoder.next_frame()) is not None:
                if frame.terminal:
                    self._fail(str(frame.failure()))
                    return
                self._take_ack()

    def _take_chunk(self) -> bool:
        """Feed the decoder with the next chunk of the response; False if it has not come."""
        size, _, rest = self._received.partition(_END)
        if not rest or len(rest) < (length := int(size, 16)) + len(_END):
            return False
        self._decoder.feed(rest[:length])
        self._received = rest[length + len(_END) :]
        return True

    def _take_ack(self) -> None:
        now, load = time.perf_counter_ns(), self._load
        if load.measuring:
            load.latencies.append(now - self._sent)
        self._acks += 1
        if self._acks == 1:
            load.one_less()
        elif now / 1e9 >= load.until:
            self._transport.close()
            return
        self.send()

    def send(self) -> None:
        self._sent = time.perf_counter_ns()
        self._transport.write(self._load.chunk)

    def connection_lost(self, error: Exception | None) -> None:
        if self._load.until == float("inf") and not self.failure:
            self.failure = f"the connection was closed: {error}"
        self._load.one_less()

    def _fail(self, failure: str) -> None:
        self.failure = failure
        self._transport.close()


async def run(options: argparse.Namespace) -> dict[str, float]:
    """Append in all sessions for so many seconds."""
    url, streams = urlsplit(options.url), options.streams.read_text().split()
    load = Load(chunk_of(b"x" * options.body), len(streams))
    room, loop = asyncio.Semaphore(_OPENING), asyncio.get_running_loop()

    async def connect(stream: str) -> Session:
        head = (
            f"POST /v1/streams/{stream}/records HTTP/1.1\r\nhost: {url.netloc}\r\n"
            f"s2-basin: {BASIN}\r\ncontent-type: s2s/proto\r\naccept: application/protobuf\r\n"
            "transfer-encoding: chunked\r\n\r\n"
        ).encode()
        async with room:
            _, session = await loop.create_connection(
                lambda: Session(load, head), url.hostname, url.port
            )
        return session

    sessions = await asyncio.gather(*(connect(stream) for stream in streams))
    await _wait(load, sessions)
    load.waiting = len(sessions)
    load.done.clear()
    print("ready", flush=True)
    load.measuring, began = True, time.perf_counter()
    load.until = began + options.seconds
    await asyncio.sleep(options.seconds)
    load.measuring, ended = False, time.perf_counter()
    await _wait(load, sessions)
    options.latencies.write_bytes(load.latencies.tobytes())
    return {"acks": len(load.latencies), "seconds": ended - began}


async def _wait(load: Load, sessions: list[Session]) -> None:
    async with asyncio.timeout(_TIMEOUT):
        await load.done.wait()
    failures = [session.failure for session in sessions if session.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} sessions failed: {failures[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=Path, required=True, help="file with their names")
    parser.add_argument("--body", type=int, required=True, help="bytes of each record")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--latencies", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    tune_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        print(json.dumps(runner.run(run(options))), flush=True)


if __name__ == "__main__":
    main()
