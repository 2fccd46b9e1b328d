"""Counts the requests that servers send to S3: idle ones, a standby, and servers at some commit rates.

    python -m bench.storage_requests [--seconds 180]

All servers run at once, each below its own path of one bucket of moto's S3 server on this machine. A
client per server appends records of 100 bytes at a steady rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import create_backend_app
from s2_sdk import S2, AppendInput, Record, Retry
from tests.cli.commands import Shell, line_of
from tests.s3 import OneAtATime, S3Server, s3_client
from tests.sdk import sdk_client
from werkzeug.serving import make_server

BASIN, STREAM = "bench-basin", "appends"
#: Appends per second by the server's path, and options of the server.
SERVERS: dict[str, tuple[float, tuple[str, ...]]] = {
    "idle": (0, ()),
    "idle-without-lease": (0, ("--lease-expiry", "0")),
    "idle-with-standby": (0, ()),
    "1-per-second": (1, ()),
    "4-per-second": (4, ()),
    "20-per-second": (20, ()),
    "20-per-second-in-4-commits": (20, ("--commit-interval", "0.25")),
}
#: Seconds until the servers have done what they do once.
SETTLE = 20.0

counts: Counter[tuple[str, str]] = Counter()


class Counting(OneAtATime):
    """Counts requests by the first folder of their keys, and by how AWS charges for them."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        _, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        kind = environ["REQUEST_METHOD"]
        if not key and kind == "GET":
            key, kind = query.get("prefix", [""])[0], "LIST"
        counts[key.partition("/")[0], kind] += 1
        return super().__call__(environ, start_response)


@contextmanager
def counted_s3_server() -> Iterator[S3Server]:
    """An S3 server on a port of its own, with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request otherwise
    server = make_server("127.0.0.1", 0, Counting(create_backend_app), threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    s3 = S3Server(f"http://127.0.0.1:{server.server_port}")
    s3_client(s3).create_bucket(Bucket=s3.bucket)
    try:
        yield s3
    finally:
        server.shutdown()


async def append(s2: S2, path: str, rate: float) -> None:
    """Append at moments that do not depend on when earlier appends are acknowledged."""
    stream, loop = s2.basin(BASIN).stream(STREAM), asyncio.get_running_loop()

    async def one() -> None:
        await stream.append(AppendInput([Record(bytes(100))]))
        counts[path, "acks"] += 1

    due = loop.time()
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(one())
            due += 1 / rate
            await asyncio.sleep(due - loop.time())


async def start(stack: AsyncExitStack, s3: S3Server, path: str, *options: str) -> S2:
    """Start a server, and return a client of it once it is active and has a stream."""
    where = ("--bucket", s3.bucket, "--path", path)
    here = ("--host", "127.0.0.1", "--port", "0", "--json", "--no-access-log")
    shell = Shell(s3.environment())
    process = await stack.enter_async_context(shell.running("serve", *where, *here, *options))
    # On a busy machine the lease may expire for a moment.
    s2 = sdk_client(json.loads(await line_of(process))["url"], retry=Retry(max_attempts=50))
    await stack.enter_async_context(s2)
    await s2.create_basin(BASIN)
    await s2.basin(BASIN).create_stream(STREAM)
    return s2


async def main(seconds: float) -> None:
    with counted_s3_server() as s3:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            tasks = []
            for path, (rate, options) in SERVERS.items():
                s2 = await start(stack, s3, path, *options)
                if rate:
                    tasks.append(group.create_task(append(s2, path, rate)))
            standby = Shell(s3.environment()).running(
                "serve", "--bucket", s3.bucket, "--path", "idle-with-standby",
                "--host", "127.0.0.1", "--port", "0", "--no-access-log",
            )  # fmt: skip
            await stack.enter_async_context(standby)
            await asyncio.sleep(SETTLE)
            counts.clear()
            await asyncio.sleep(seconds)
            total = dict(counts)
            for task in tasks:
                task.cancel()
    kinds = sorted({kind for _, kind in total})
    print(f"{os.getloadavg()[0]:.1f} load average; requests per second over {seconds:g} s")
    for path in SERVERS:
        print(path, {kind: round(total.get((path, kind), 0) / seconds, 3) for kind in kinds})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    asyncio.run(main(parser.parse_args().seconds))
