"""Measures how long writers pause when the active one of two servers stops, dies or hangs.

    python -m bench.failover [--rounds 3] [--nginx]

The servers are behind HAProxy, or nginx. They, storage (moto's S3 server) and the clients run on this
machine. The lease has its default expiry. At the end all acknowledged records are read back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from tests.deploy.balancers import Balancer, haproxy, nginx
from tests.deploy.load import Load, loading
from tests.deploy.test_balancers import Pair
from tests.s3 import S3Server, run_s3_server
from tests.server.test_standby import Bucket, Node, suspended

from streamfold.cluster import EXPIRY

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


async def restart_both(pair: Pair, first: Node, second: Node, load: Load) -> None:
    first.process.send_signal(signal.SIGTERM)
    await first.ending()
    await second.serves()  # or the restarted server may come by the lease before it
    first = await pair.start(0)
    await load.advance()
    await first.logged("standby: ")
    second.process.send_signal(signal.SIGTERM)
    await second.ending()
    await load.advance()


async def kill(_pair: Pair, first: Node, _second: Node, load: Load) -> None:
    first.process.kill()
    await load.advance()


async def hang(_pair: Pair, first: Node, _second: Node, load: Load) -> None:
    with suspended(first):
        await load.advance()


async def measure(
    balancer: Balancer,
    s3: S3Server,
    path: str,
    disturb: Callable[[Pair, Node, Node, Load], Awaitable[None]],
) -> dict[str, float]:
    """Return the longest pause of each writer, in seconds."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = Pair(Bucket(s3, path), stack, str(EXPIRY))
        first = await pair.start(0)
        await first.serves()
        second = await pair.start(1)
        await second.logged("standby: ")
        async with balancer(folder, pair.ports) as urls, loading(urls) as load:
            await disturb(pair, first, second, load)
        return {name: round(writer.longest_pause, 1) for name, writer in load.writers.items()}


async def main(balancer: Balancer, rounds: int) -> None:
    with run_s3_server() as s3:
        for number in range(rounds):
            for disturb in (restart_both, kill, hang):
                path = f"{disturb.__name__}-{number}"
                print(
                    path, await measure(balancer, s3, path, disturb), os.getloadavg()[0], flush=True
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nginx", action="store_true")
    options = parser.parse_args()
    asyncio.run(main(nginx if options.nginx else haproxy, options.rounds))
