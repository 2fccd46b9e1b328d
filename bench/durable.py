"""Measures Durable Streams beside the project's Rust server: `python -m bench.durable --help`.

`cargo install durable-streams` installs that server, `durable-streams-server`, which is taken from
PATH or from `--rust-server`. It runs with its defaults: an append is in its log, synced, before the
ack. Streamfold runs on local disk with fsync. The same clients load both in turns, and strace counts
what each of them syncs. A full run writes docs/benchmarks/durable.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench import h2load
from bench.bodies import noise
from bench.h2load import Appender, Shape
from bench.machine import conditions, load_after, wait_until_quiet
from bench.null_server import wait_until_listening
from bench.report import Benchmark, Row, publish
from bench.serving import serving
from bench.stamps import stamped
from bench.store import MIB
from bench.syncs import describe
from bench.turns import (
    OURS,
    Found,
    Run,
    Scale,
    Target,
    Workload,
    alone,
    count_acks,
    percentile,
    refuse_failures,
    resident,
    rest,
    rows_of,
    run_all,
)

RUST, RUST_COMMAND = "Rust server", "durable-streams-server"
SUBSCRIBERS = 1000
#: Events per second to one stream that all subscribers follow.
RATE = 50
#: Bytes of a small append, and of a large one.
SMALL, LARGE = 256, MIB
BINARY, TEXT = "application/octet-stream", "text/plain"
#: The Rust server speaks HTTP/1.1 alone.
MANY_WRITERS = Shape(100, 1, processes=4, http1=True)
#: Seconds that a load may take longer than planned.
_TIMEOUT = 60.0

FULL = Scale(seconds=6.0, steady=10.0, streams=500, repeat=3)
QUICK = Scale(seconds=1.0, steady=2.0, streams=50, repeat=1)


class Client:
    """One client of one stream, which waits for every answer."""

    def __init__(self, target: Target, stream: str, content_type: str = BINARY) -> None:
        self.path = f"/v1/stream/{stream}"
        self._target = target
        self._headers = {"content-type": content_type}
        self._connection = HTTPConnection(urlsplit(target.url).netloc, timeout=_TIMEOUT)

    def create(self) -> None:
        self._request("PUT", self.path, b"")

    def append(self, body: bytes = b"x" * SMALL) -> None:
        self._request("POST", self.path, body)

    def read_all(self) -> int:
        """Read from the start to the tail; returns the bytes."""
        size, offset, up_to_date = 0, "-1", False
        while not up_to_date:
            answer, body = self._request("GET", f"{self.path}?offset={offset}")
            size += body
            offset = answer.headers["stream-next-offset"]
            up_to_date = answer.headers["stream-up-to-date"] == "true"
        return size

    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> tuple[HTTPResponse, int]:
        self._connection.request(method, path, body, self._headers if body is not None else {})
        answer = self._connection.getresponse()
        size = 0
        while piece := answer.read(MIB):
            size += len(piece)
        if answer.status not in (200, 201, 204):
            raise RuntimeError(f"{self._target.name} answered {method} {path} with {answer.status}")
        return answer, size


def ack_alone(run: Run, target: Target) -> Found:
    """One writer that waits for each ack."""
    (stream,), taken = run.names("alone", 1), []
    client = Client(target, stream)
    client.create()
    end = time.perf_counter() + run.scale.seconds
    while (began := time.perf_counter()) < end:
        client.append()
        taken.append(time.perf_counter() - began)
    return {"one writer, 256 B appends, mean ack, ms": statistics.fmean(taken[1:]) * 1000}


def appender_to(run: Run, target: Target, kind: str) -> Appender:
    """One that appends to new streams, each of which has a record already."""
    streams = run.names(kind, run.scale.streams)
    for stream in streams:
        client = Client(target, stream)
        client.create()
        client.append()
    uris = [f"{target.url}/v1/stream/{stream}" for stream in streams]
    return Appender(uris, SMALL * b"x", {"content-type": BINARY}, run.folder)


def small(run: Run, target: Target) -> Found:
    """Appends of one small message over many streams."""
    appender = appender_to(run, target, "small")
    rest(target)
    cpu = target.cpu()
    load = asyncio.run(appender.run(MANY_WRITERS, run.scale.seconds))
    refuse_failures(target, load)
    kind = f"256 B appends to {run.scale.streams} streams, {MANY_WRITERS.connections} connections"
    return {
        f"{kind}, acks/s": load.acks_per_s,
        f"{kind}, p50 ms": percentile(load.latencies, 50),
        f"{kind}, p99 ms": percentile(load.latencies, 99),
        f"{kind}, processor µs": (target.cpu() - cpu) / len(load.latencies) * 1e6,
    }


def bulk(run: Run, target: Target) -> Found:
    """One writer of large appends, and then a catch-up read of what it wrote."""
    (stream,) = run.names("bulk", 1)
    client, body, count = Client(target, stream), noise(LARGE, 1), 0
    client.create()
    written, began = target.written(), time.perf_counter()
    while time.perf_counter() < began + run.scale.seconds:
        client.append(body)
        count += 1
    found = {"one writer, 1 MiB appends, MiB/s": count / (time.perf_counter() - began)}
    rest(target)
    amplified = (target.written() - written) / (count * LARGE)
    found["one writer, 1 MiB appends, bytes to disk per byte"] = amplified
    began = time.perf_counter()
    if (size := client.read_all()) != count * LARGE:
        raise RuntimeError(f"{target.name} sent {size} of {count * LARGE} bytes")
    found["catch-up read of these, MiB/s"] = count / (time.perf_counter() - began)
    return found


def followers(run: Run, target: Target) -> Found:
    """Many subscribers of one stream that is written to at a steady rate."""
    return asyncio.run(_followers(run, target))


async def _followers(run: Run, target: Target) -> Found:
    (stream,) = run.names("followed", 1)
    events, latencies = round(RATE * run.scale.steady), run.folder / "latencies"
    client = Client(target, stream, TEXT)
    client.create()
    load = await _start_subscribers(target, stream, events, latencies)
    cpu = target.cpu()
    await asyncio.to_thread(_write_events, client, events)
    report = await _finish(load, run.scale.steady + 2 * _TIMEOUT)
    if report["incomplete"]:
        raise RuntimeError(f"{target.name}: {report['incomplete']} subscribers lack events")
    taken = np.fromfile(latencies, np.int64)
    kind = f"{SUBSCRIBERS:,} subscribers (SSE), {RATE} events/s"
    return {
        f"{kind}, p50 ms": percentile(taken, 50),
        f"{kind}, p99 ms": percentile(taken, 99),
        f"{kind}, processor µs": (target.cpu() - cpu) / (events * SUBSCRIBERS) * 1e6,
    }


def _write_events(client: Client, events: int) -> None:
    """At a steady rate; an event that is late does not delay those after it."""
    began = time.perf_counter()
    for number in range(events):
        time.sleep(max(0.0, began + number / RATE - time.perf_counter()))
        client.append(stamped(number, SMALL))


async def _start_subscribers(
    target: Target, stream: str, events: int, latencies: Path
) -> asyncio.subprocess.Process:
    """A process of subscribers that are all connected."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.durable_load", f"--port={urlsplit(target.url).port}",
        f"--latencies={latencies}", f"--count={SUBSCRIBERS}", f"--stream={stream}",
        f"--events={events}", f"--timeout={_TIMEOUT}", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the subscribers ended with {await process.wait()} before they began")
    return process


async def _finish(process: asyncio.subprocess.Process, seconds: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report: dict[str, Any] = json.loads(output)
    return report


WORKLOADS: dict[str, Workload] = {
    "alone": ack_alone,
    "small": small,
    "bulk": bulk,
    "followers": followers,
    "resident": resident,
}


def syncs(run: Run, everyone: Sequence[Target]) -> list[str]:
    """What each server syncs for a lone writer, and for many."""
    sentences = []
    for target in everyone:
        appender, (stream,) = appender_to(run, target, "synced"), run.names("synced-alone", 1)
        client = Client(target, stream)
        client.create()
        with alone(target, everyone):
            load = partial(count_acks, appender, MANY_WRITERS, run.scale.seconds)
            sentences.append(describe(target, client.append, load))
        print(sentences[-1], flush=True)
    return sentences


@contextmanager
def rust_serving(command: str, folder: Path) -> Iterator[Target]:
    """The Rust server with its defaults, on a free local port, with its data below `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [command, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--data-dir", str(folder / "rust")]
    with (folder / "rust.log").open("wb") as log:
        server = subprocess.Popen(arguments, stdout=log, stderr=log)
    with server:
        try:
            wait_until_listening(port, RUST)
            yield Target(RUST, f"http://127.0.0.1:{port}", server.pid)
        finally:
            server.kill()


def version_of(command: str) -> str:
    """The version that cargo installed; the server itself does not tell it."""
    kept = Path(shutil.which(command) or command).resolve().parent.parent / ".crates.toml"
    if kept.exists():
        for package, names in tomllib.loads(kept.read_text())["v1"].items():
            if RUST_COMMAND in names:
                return " ".join(package.split()[:2])
    return "of an unknown version"


@contextmanager
def targets(rust: str | None, folder: Path) -> Iterator[list[Target]]:
    """Streamfold, and the Rust server if there is one, both up."""
    with ExitStack() as stack:
        ours = stack.enter_context(serving("local-fsync", (), folder))
        everyone = [Target(OURS, ours.url, ours.pid)]
        if rust is not None:
            everyone.append(stack.enter_context(rust_serving(rust, folder)))
        yield everyone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rust-server", default=RUST_COMMAND, metavar="COMMAND")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--repeat", type=int, help="times that each is measured")
    parser.add_argument("--quick", action="store_true", help="less of everything; nothing is kept")
    parser.add_argument("--noisy", action="store_true", help="measure although others are at work")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if not h2load.available():
        parser.error("h2load is missing: install nghttp2-client (Debian), nghttp2 (Homebrew)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server stays behind
    rust = shutil.which(options.rust_server)
    if rust is None:
        print(
            f"{options.rust_server} is not on PATH (cargo install durable-streams; or give "
            "--rust-server): Streamfold is measured alone, and no page is written",
            file=sys.stderr,
        )
    busy = None if options.noisy else wait_until_quiet()
    folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=options.folder))
    scale = QUICK if options.quick else FULL
    run = Run(replace(scale, repeat=options.repeat or scale.repeat), folder)
    workloads = {name: work for name, work in WORKLOADS.items() if options.only in name}
    try:
        under = conditions(folder, busy)
        with targets(rust, folder) as everyone:
            run_all(run, everyone, workloads)
            if options.only in "syncs":
                under += syncs(run, everyone)
    finally:
        shutil.rmtree(folder)
    under += load_after(busy)
    if rust is not None and not options.quick and not options.only:
        page(run, [*under, *notes(run, version_of(rust))])


def notes(run: Run, version: str) -> list[str]:
    """What else must be known to read the figures."""
    return [
        f"the Rust server is `{version}` from crates.io, built by `cargo install` and started with "
        "`--host`, `--port` and `--data-dir` alone: `--durability wal`, a log that is synced before "
        "the ack, is its default",
        "Streamfold is `streamfold serve --local-root`: fsync is its default",
        f"each workload ran {run.scale.repeat} times on one server after the other, the other one "
        "stopped meanwhile; clients share the cores with the servers, so the rates of the faster "
        "server are lower bounds",
    ]


def page(run: Run, under: list[str]) -> None:
    rows = rows_of(run)
    about = (
        "The same clients load Streamfold and the Durable Streams project's own Rust server in turn: "
        "h2load for small appends, one HTTP client for large ones, and 1,000 subscribers.\n\n"
        f"{standing(rows)} The Rust server is a server for one folder: it has no S2 API, snapshots, "
        "bootstrap, trims, access tokens, TLS or encryption."
    )
    title, command = "Durable Streams compared with the Rust server", "python -m bench.durable"
    publish(Benchmark("durable", title, about, command, under, rows))


def standing(rows: Sequence[Row]) -> str:
    """Say in how many measures which server is ahead, by more than a tenth."""
    ratios = [row.ratio(beside) for row in rows for beside in row.samples if beside.subject == RUST]
    ours, theirs = sum(ratio > 1.1 for ratio in ratios), sum(ratio < 0.9 for ratio in ratios)
    return (
        f"Where they differ by more than a tenth, the Rust server is ahead in {theirs} of "
        f"{len(ratios)} measures and Streamfold in {ours}."
    )


if __name__ == "__main__":
    main()
