"""A live table: changes go into a stream, the snapshotter publishes them as files as they come.

The writer runs on Spark, in a process of its own. It is killed in the middle and started again; at
the end the table is rebuilt from the files alone, and compared with what was fed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from s2_sdk import S2, AppendInput, Endpoints, Record, S2Stream

import streamfold.archive
from streamfold.archive import Artifact
from streamfold.errors import NotFoundError
from streamfold.server.config import Configuration
from streamfold.server.main import running_server

BASIN, STREAM, TABLE = "example-basin", "orders", "orders"
ORDERS, CHANGES_AT_ONCE = 500, 40
STATES = ("new", "paid", "packed", "sent")

Orders = dict[int, dict[str, Any]]


def settings(port: int, folder: Path) -> str:
    """The configuration of the writer, as an operator would write it."""
    return f"""
key_fields = ["id"]
schema = "id BIGINT NOT NULL, state STRING, cents BIGINT"
diff = {{ interval = "1s" }}
snapshot = {{ max_chain_diffs = 5 }}
destinations = [{{ type = "local", path = "{folder}" }}]
formats = {{ snapshot = ["parquet", "jsonl"], diff = ["jsonl"] }}
http = {{ port = 0, host = "127.0.0.1" }}

[source]
server = "http://127.0.0.1:{port}"
basin = "{BASIN}"
stream = "{STREAM}"
table = "{TABLE}"
"""


async def feed(stream: S2Stream, orders: Orders, rng: random.Random, enough: asyncio.Event) -> None:
    """Change orders, some of them new, some of them for the last time."""
    while not enough.is_set():
        records = [Record(json.dumps(change(orders, rng)).encode()) for _ in range(CHANGES_AT_ONCE)]
        await stream.append(AppendInput(records))
        await asyncio.sleep(0.2)


def change(orders: Orders, rng: random.Random) -> dict[str, Any]:
    """One change of one order, in Streamfold's envelope; `orders` follows it."""
    number = rng.randrange(ORDERS)
    old = orders.get(number)
    if old and rng.random() < 0.1:
        del orders[number]
        return {"op": "d", "key": {"id": number}}
    row = {"id": number, "state": rng.choice(STATES), "cents": rng.randrange(100_000)}
    orders[number] = row
    return {"op": "u" if old else "c", "key": {"id": number}, "after": row}


async def show(folder: Path) -> None:
    """Print every artifact when its commit is seen."""
    shown = 0
    while True:
        try:
            artifacts = (await streamfold.archive.open(folder / TABLE)).manifest.artifacts
        except NotFoundError:
            artifacts = ()
        for artifact in artifacts[shown:]:
            print(f"  {line_of(artifact)}")
        shown = len(artifacts)
        await asyncio.sleep(0.3)


def line_of(artifact: Artifact) -> str:
    size = sum(part.size_bytes for part in artifact.parts())
    if artifact.is_base:
        reason = artifact.rebase_reason
        return f"base   epoch {artifact.epoch}, {artifact.row_count} rows, {size} bytes ({reason})"
    span = f"({artifact.from_position}, {artifact.to_position}]"
    return f"diff   {span} {artifact.change_count} changes, {size} bytes"


async def start_writer(file: Path) -> Process:
    """`streamfold snapshotter run`, ready when it has printed the address of its status."""
    command = [sys.executable, "-m", "streamfold.cli.main", "snapshotter", "run", "--json"]
    log = file.with_suffix(".log")  # Spark says much, above all when it is killed
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, f"--config={file}", stdout=PIPE, stderr=stderr
        )
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise SystemExit(f"the writer did not start:\n{log.read_text()}")
    return process


async def wait_for_artifacts(folder: Path, count: int) -> None:
    """Return when the archive has so many."""
    while True:
        try:
            archive = await streamfold.archive.open(folder / TABLE)
            if len(archive.manifest.artifacts) >= count:
                return
        except NotFoundError:
            pass  # the first base is on its way
        await asyncio.sleep(0.3)


async def run(stream: S2Stream, port: int, home: Path) -> None:
    orders: Orders = {}
    enough = asyncio.Event()
    file, folder = home / "writer.toml", home / "published"
    file.write_text(settings(port, folder))
    print("starting the snapshotter on Spark")
    writer = await start_writer(file)
    feeding = asyncio.create_task(feed(stream, orders, random.Random(1), enough))
    showing = asyncio.create_task(show(folder))
    await wait_for_artifacts(folder, 9)
    print("killing the writer; the stream continues")
    writer.kill()
    await writer.wait()
    writer = await start_writer(file)
    print("it continues where its archive ends")
    await wait_for_artifacts(folder, 16)
    enough.set()
    await feeding
    print("stopping the writer, which writes a last diff")
    writer.send_signal(signal.SIGTERM)
    assert await writer.wait() == 0
    await asyncio.sleep(1)  # for the last lines
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    await compare(stream, folder, orders)


async def compare(stream: S2Stream, folder: Path, orders: Orders) -> None:
    """Rebuild the table from files alone."""
    archive = await streamfold.archive.open(folder / TABLE)
    table = await archive.table()
    rebuilt = {row["id"]: row for row in table.to_pylist()}
    assert rebuilt == orders, "the table is not what was fed"
    tail = await stream.check_tail()
    print(f"{tail.seq_num} changes were fed; the table rebuilt from files has {len(rebuilt)} rows,")
    print("and every one of them is what the stream says")


async def main() -> None:
    quiet = Configuration(host="127.0.0.1", port=0, access_log=False)
    with tempfile.TemporaryDirectory() as home:
        async with running_server(quiet) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with S2("ignored", endpoints=Endpoints(url, url)) as s2:
                await s2.create_basin(BASIN)
                await s2.basin(BASIN).create_stream(STREAM)
                await run(s2.basin(BASIN).stream(STREAM), server.port, Path(home))


if __name__ == "__main__":
    asyncio.run(main())
