"""Measures a well-behaved client alone, and beside hostile ones: `python -m bench.hostile --help`.

The hostile ones: followers that never read while large batches are appended, connections that never
send, and uploads that stall. The appends of the well-behaved client should stay under twice their usual
99th percentile, and the server's memory within what docs/reference/limits.md says.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from bench.serving import Served, serving
from bench.store import BASIN, processor_times, stolen_share
from streamfold.server.http.connections import raise_descriptor_limit

#: Streams of the well-behaved client, and of the others.
GOOD, FOLLOWED = "good", "followed"
#: MiB that the server may use beyond what it uses at rest, with all of them: see the reference.
GROWTH_MAX_MIB = 704
HEAD = f"host: localhost\r\ns2-basin: {BASIN}\r\n"


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many hostile clients there are."""

    followers: int
    silent: int
    uploads: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Appends of the well-behaved client."""

    p50_ms: float
    p99_ms: float
    rss_mib: float
    stolen: float


def measure(server: Served, seconds: float) -> Measured:
    """Append small records one after the other for so long."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"s2-basin": BASIN, "content-type": "application/json"}
    body = json.dumps({"records": [{"body": "x" * 256}]})
    latencies, most, since = [], 0.0, processor_times()
    ends = time.perf_counter() + seconds
    while (began := time.perf_counter()) < ends:
        connection.request("POST", f"/v1/streams/{GOOD}/records", body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"an append was refused with {answer.status}")
        latencies.append((time.perf_counter() - began) * 1e3)
        most = max(most, server.rss_mib) if len(latencies) % 50 == 0 else most
    connection.close()
    p50, p99 = (float(value) for value in np.percentile(latencies, (50, 99)))
    return Measured(p50, p99, max(most, server.rss_mib), stolen_share(since))


@contextmanager
def hostile(server: Served, crowd: Crowd) -> Iterator[None]:
    """All hostile clients, while the block lasts."""
    follow = (
        f"GET /v1/streams/{FOLLOWED}/records?seq_num=0 HTTP/1.1\r\n{HEAD}accept: text/event-stream"
    )
    upload = f"POST /v1/streams/{FOLLOWED}/records HTTP/1.1\r\n{HEAD}content-type: application/json"
    size = 4 << 20
    with ExitStack() as stack:
        for _ in range(crowd.followers):
            stack.enter_context(_connect(server, f"{follow}\r\n\r\n".encode()))
        for _ in range(crowd.silent):
            stack.enter_context(_connect(server, b""))
        head = f"{upload}\r\ncontent-length: {size}\r\n\r\n".encode()
        for _ in range(crowd.uploads):
            stalled = stack.enter_context(_connect(server, head))
            stalled.setblocking(False)
            _send_what_fits(stalled, b" " * (size - 1))
        _append_large(server, 3)
        yield


def _connect(server: Served, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    if data:
        connection.sendall(data)
    return connection


def _send_what_fits(connection: socket.socket, data: bytes) -> None:
    try:
        while data:
            data = data[connection.send(data) :]
    except BlockingIOError:
        pass  # the server has stopped to read: that is what a stalled upload looks like


def _append_large(server: Served, count: int) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"s2-basin": BASIN, "content-type": "application/json"}
    body = json.dumps({"records": [{"body": "z" * 1_000_000}]})
    for _ in range(count):
        connection.request("POST", f"/v1/streams/{FOLLOWED}/records", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"a large append was refused with {answer.status}")
        answer.read()
    connection.close()


def run(backend: str, crowd: Crowd, seconds: float) -> dict[str, object]:
    """Measure alone, beside, and alone again: what the machine itself does differs over time."""
    with (
        tempfile.TemporaryDirectory(prefix="streamfold-bench-") as folder,
        serving(backend, (GOOD, FOLLOWED), Path(folder)) as server,
    ):
        measure(server, seconds / 4)  # caches and compiled parts are warm after this
        alone = measure(server, seconds)
        with hostile(server, crowd):
            beside = measure(server, seconds)
        after = measure(server, seconds)
    usual = min(alone.p99_ms, after.p99_ms)
    return {
        "backend": backend,
        "crowd": asdict(crowd),
        "alone": asdict(alone),
        "beside": asdict(beside),
        "after": asdict(after),
        "ratio_p99": beside.p99_ms / usual,
        "growth_mib": beside.rss_mib - alone.rss_mib,
    }


def show(results: dict[str, object]) -> None:
    print("| appends of one client | p50 | p99 | server's memory | stolen |")
    print("|---|---|---|---|---|")
    for name in ("alone", "beside", "after"):
        found = results[name]
        if not isinstance(found, dict):
            raise TypeError(f"{name} was not measured")
        print(
            f"| {name} | {found['p50_ms']:.2f} ms | {found['p99_ms']:.2f} ms "
            f"| {found['rss_mib']:.0f} MiB | {found['stolen']:.0%} |"
        )
    print(
        f"\np99 beside hostile clients / alone: {results['ratio_p99']:.2f}x (aim: under 2x). "
        f"Memory grew by {results['growth_mib']:.0f} MiB (documented: {GROWTH_MAX_MIB} MiB)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=("memory", "local", "local-fsync"), default="memory")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--followers", type=int, default=1500)
    parser.add_argument("--silent", type=int, default=1000)
    parser.add_argument("--uploads", type=int, default=100)
    options = parser.parse_args()
    raise_descriptor_limit()
    crowd = Crowd(options.followers, options.silent, options.uploads)
    results = run(options.backend, crowd, options.seconds)
    target = Path(__file__).parent / "results" / "hostile.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2))
    show(results)


if __name__ == "__main__":
    main()
