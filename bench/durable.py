"""Measures Durable Streams beside the protocol's reference server: `python -m bench.durable --help`.

Both are loaded by the same client, one after the other on the same machine, in memory and on disk; the
reference server is npm's `@durable-streams/server`, which is installed for the purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.durable_load import SIZE, create, head_of
from bench.figures import Figure, Latencies, figure_of, measured, settle
from bench.serving import serving
from bench.stamps import stamped
from bench.store import plain_python, processor_times, stolen_share

STREAMS = 500
SUBSCRIBERS = 1000
#: Events per second to one stream that all subscribers follow.
RATE = 50
FOLLOWED = "bench-followed"
REFERENCE = "@durable-streams/server"
VERSION = "0.3.7"
#: Seconds that a load may take longer than planned.
_TIMEOUT = 60.0

_SERVER = """
import { DurableStreamTestServer } from "@durable-streams/server";
const dataDir = process.argv[2] || undefined;
const server = new DurableStreamTestServer({ port: 0, host: "127.0.0.1", dataDir, webhooks: false });
console.log(JSON.stringify({ url: await server.start() }));
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is up."""

    name: str
    pid: int
    port: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one server did; without a figure, it could not be measured, and the note says why."""

    server: str
    appends: Figure | None
    events: Figure | None
    notes: tuple[str, ...] = ()


@contextmanager
def streamfold(backend: str, folder: Path) -> Iterator[Subject]:
    with serving(backend, [], folder) as served:
        yield Subject(f"streamfold, {backend}", served.pid, served.port)


@contextmanager
def reference(backend: str, folder: Path) -> Iterator[Subject]:
    """The reference server, in memory or with files below `folder`."""
    data = str(folder / "data") if backend == "file" else ""
    command = ["node", "server.mjs", data]
    with (folder / "reference.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder.parent / "reference", stdout=subprocess.PIPE, stderr=log
        )
    with server:
        try:
            yield Subject(f"reference {VERSION}, {backend}", server.pid, _port(server))
        finally:
            server.kill()


def _port(server: subprocess.Popen[bytes]) -> int:
    """From the line in which the server says where it is; its log comes the same way."""
    for line in server.stdout or ():
        if line.startswith(b"{"):
            return int(json.loads(line)["url"].rpartition(":")[2])
    raise RuntimeError("the reference server did not start")


def install_reference(folder: Path) -> bool:
    """Fetch the reference server; False if there is no node here, or no registry."""
    if shutil.which("npm") is None:
        return False
    folder.mkdir()
    (folder / "package.json").write_text(
        json.dumps({"type": "module", "dependencies": {REFERENCE: VERSION}})
    )
    (folder / "server.mjs").write_text(_SERVER)
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    return subprocess.run(command, cwd=folder, check=False).returncode == 0


async def measure(subject: Subject, folder: Path, *, quick: bool) -> Result:
    notes: list[str] = []
    appends = await attempt(measure_appends(subject, folder, 3.0 if quick else 10.0, notes), notes)
    events = await attempt(measure_events(subject, folder, 3.0 if quick else 10.0, notes), notes)
    result = Result(subject.name, appends, events, tuple(notes))
    print(row(result), flush=True)
    return result


async def attempt(work: Any, notes: list[str]) -> Figure | None:
    """The figure, or a note: that one server fails must not hide how the other did."""
    try:
        figure: Figure = await work
    except (RuntimeError, TimeoutError, OSError) as error:
        notes.append(f"failed: {error}"[:200])
        return None
    return figure


async def measure_appends(
    subject: Subject, folder: Path, seconds: float, notes: list[str]
) -> Figure:
    latencies = folder / "appends"
    await settle(subject.pid)
    load = await start_load(
        "append", subject, latencies, f"--count={STREAMS}", f"--seconds={seconds}"
    )
    with measured(subject.pid) as spent:
        report = await finish_load(load, seconds + 2 * _TIMEOUT)
    spent.seconds = report["seconds"]
    spent.cpu *= report["part"]  # the rest was warm-up
    found = read_latencies(latencies)
    if report["failures"]:
        notes.append(f"appends without success, by status: {report['failures']}")
    succeeded = len(found) - sum(report["failures"].values())
    if not succeeded:
        raise RuntimeError("no append succeeded")
    return figure_of(spent, succeeded, found)


async def measure_events(
    subject: Subject, folder: Path, seconds: float, notes: list[str]
) -> Figure:
    events, latencies = round(RATE * seconds), folder / "events"
    await create(subject.port, FOLLOWED, "text/plain")
    load = await start_load(
        "follow", subject, latencies, f"--count={SUBSCRIBERS}", f"--stream={FOLLOWED}",
        f"--events={events}", f"--timeout={seconds + _TIMEOUT}",
    )  # fmt: skip
    await settle(subject.pid)
    reader, writer = await asyncio.open_connection("127.0.0.1", subject.port)
    try:
        with measured(subject.pid) as spent:
            await write_events(reader, writer, events)
            report = await finish_load(load, seconds + 2 * _TIMEOUT)
    finally:
        writer.close()
    if report["incomplete"]:
        notes.append(f"{report['incomplete']} subscribers did not get every event")
    return figure_of(spent, events * SUBSCRIBERS, read_latencies(latencies))


async def write_events(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: int
) -> None:
    """At a steady rate; one that is late does not delay those after it."""
    loop = asyncio.get_running_loop()
    path, kind = f"/v1/stream/{FOLLOWED}", "content-type: text/plain"
    began, head = loop.time(), head_of("POST", path, kind, size=SIZE)
    for number in range(events):
        await asyncio.sleep(began + number / RATE - loop.time())
        await exchange(reader, writer, head + stamped(number, SIZE))


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    """A request whose answer has no body to speak of."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 2"):
        raise RuntimeError(f"refused: {head[:100]!r}")
    if b"chunked" in head.lower():
        await reader.readuntil(b"0\r\n\r\n")


async def start_load(
    kind: str, subject: Subject, latencies: Path, *options: str
) -> asyncio.subprocess.Process:
    """A process of clients that are all connected."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.durable_load", kind, f"--port={subject.port}",
        f"--latencies={latencies}", *options, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    if await process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the clients ended with {await process.wait()} before they began")
    return process


async def finish_load(process: asyncio.subprocess.Process, seconds: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report: dict[str, Any] = json.loads(output)
    return report


def read_latencies(path: Path) -> Latencies:
    return np.fromfile(path, np.int64)


def row(result: Result) -> str:
    cells = [result.server]
    for figure, unit in ((result.appends, "acks/s"), (result.events, "deliveries/s")):
        if figure is None:
            cells += ["-"] * 4
        else:
            cells += [f"{figure.per_second:.0f} {unit}"]
            cells += [f"{value:.1f} ms" for value in (figure.p50_ms, figure.p99_ms) if value]
            cells += [f"{figure.cpu_us:.0f} us"]
    return "| " + " | ".join([*cells, "; ".join(result.notes) or "-"]) + " |"


def print_head() -> None:
    columns = ["server", f"{STREAMS} producers", "p50", "p99", "its CPU"]
    columns += [f"{SUBSCRIBERS} subscribers", "p50", "p99", "its CPU", "notes"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)


def ratios(results: list[Result]) -> dict[str, float]:
    """How many times as many appends as the reference server, in memory and on disk."""
    found = {result.server: result.appends for result in results}
    pairs = {
        "memory": ("streamfold, memory", f"reference {VERSION}, memory"),
        "disk": ("streamfold, local-fsync", f"reference {VERSION}, file"),
    }
    return {
        name: ours.per_second / theirs.per_second
        for name, (mine, other) in pairs.items()
        if (ours := found.get(mine)) and (theirs := found.get(other))
    }


def run(parent: Path, *, quick: bool) -> dict[str, Any]:
    since, folder = (
        processor_times(),
        Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=parent)),
    )
    results: list[Result] = []
    try:
        subjects = [(streamfold, "local-fsync"), (streamfold, "memory")]
        if install_reference(folder / "reference"):
            subjects = [
                (streamfold, "local-fsync"), (reference, "file"),
                (streamfold, "memory"), (reference, "memory"),
            ]  # fmt: skip
        print_head()
        for number, (kind, backend) in enumerate(subjects):
            subfolder = folder / str(number)
            subfolder.mkdir()
            with kind(backend, subfolder) as subject:
                results.append(asyncio.run(measure(subject, subfolder, quick=quick)))
    finally:
        shutil.rmtree(folder)
    found = ratios(results)
    shown = {name: round(ratio, 2) for name, ratio in found.items()}
    print(f"appends of Streamfold / of the reference: {shown}")
    return {
        "quick": quick,
        "cores": os.cpu_count(),
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
        "servers": [asdict(result) for result in results],
        "ratios": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: a minute")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server stays behind
    results = run(options.folder, quick=options.quick)
    target = Path(__file__).parent / "results" / "durable.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
