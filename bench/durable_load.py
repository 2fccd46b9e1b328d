"""Subscribers of one Durable Streams stream in a process of their own; `bench.durable` starts it.

Speaks HTTP/1.1 on raw connections that stay open, and does so little that it is not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import suppress
from pathlib import Path

from bench.followers import Crowd, Follower
from streamfold.server.main import loop_factory, tune_collector

#: Connections that are opened at once.
_OPENING = 64


async def follow(options: argparse.Namespace) -> None:
    """Follow by server-sent events until each subscriber has had every event."""
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
    with options.latencies.open("wb") as output:
        crowd.arrivals.latencies().tofile(output)
    print(json.dumps({"incomplete": incomplete}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="subscribers")
    parser.add_argument("--latencies", type=Path, required=True, help="file to write")
    parser.add_argument("--stream", required=True, help="to follow")
    parser.add_argument("--events", type=int, required=True, help="that each subscriber is to get")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    tune_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(follow(options))


if __name__ == "__main__":
    main()
