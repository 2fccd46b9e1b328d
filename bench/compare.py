"""Measures S2 endpoints by the same clients, in turns in one run: `python -m bench.compare --help`.

Streamfold is `streamfold serve` on local disk with fsync. Beside it: the null server, which
shows what the client and the door can do alone, and every S2 endpoint given as `--peer NAME=URL`, for
example s2-lite. A basin `bench-basin` is made on each, which creates streams when they are first
appended to. `--peer-pid NAME=PID` adds processor time, memory and syncs of a peer on this machine.
strace counts the syncs of every server, in a load of its own (`--only syncs` does that alone).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from bench import bulk, h2load
from bench.bodies import document, noise
from bench.h2load import Appender, Shape
from bench.machine import conditions, load_after, wait_until_quiet
from bench.null_server import null_serving
from bench.report import Benchmark, publish
from bench.serving import serving
from bench.sessions import read_session
from bench.store import BASIN, MIB
from bench.syncs import describe
from bench.turns import (
    NULL,
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

#: Bytes of a small record.
SMALL = 256
#: Streams that small appends are spread over.
SPREAD = 500
#: Appends on their way at once, when each goes to the next of many streams.
AT_ONCE = 256
#: Bytes per second of the steady load.
STEADY = 20 * MIB

#: The load under which syncs are counted.
MANY_WRITERS = Shape(8, 64, processes=4)

FULL = Scale(seconds=6.0, steady=45.0, streams=25_000, repeat=3)
QUICK = Scale(seconds=1.0, steady=3.0, streams=2_000, repeat=1)


class Writer:
    """One client that waits for the ack of each append to one stream."""

    def __init__(self, target: Target, stream: str) -> None:
        self._target = target
        self._path = f"/v1/streams/{stream}/records"
        self._connection = HTTPConnection(urlsplit(target.url).netloc)

    def append(self) -> None:
        headers = {"s2-basin": BASIN, "content-type": "application/json"}
        body = b'{"records":[{"body":"%b"}]}' % (b"x" * SMALL)
        self._connection.request("POST", self._path, body, headers)
        answer = self._connection.getresponse()
        if answer.read() == b"" or answer.status != 200:
            raise RuntimeError(f"{self._target.name} answered an append with {answer.status}")


def ack_alone(run: Run, target: Target) -> Found:
    """One writer that waits for each ack."""
    (stream,), taken = run.names("alone", 1), []
    writer = Writer(target, stream)
    end = time.perf_counter() + run.scale.seconds
    while (began := time.perf_counter()) < end:
        writer.append()
        taken.append(time.perf_counter() - began)
    return {"one writer, mean ack, ms": statistics.fmean(taken[1:]) * 1000}


def small(form: str, shape: Shape) -> Workload:
    """Appends of one small record over many streams."""
    kind = f"256 B appends, {SPREAD} streams, {form}, {'HTTP/1.1' if shape.http1 else 'h2'}"

    def measure(run: Run, target: Target) -> Found:
        streams = run.names("small", SPREAD)
        appender = Appender.to_s2(target.url, streams, SMALL * b"x", run.folder, form)
        asyncio.run(appender.warm_up())
        rest(target)
        cpu = target.cpu()
        load = asyncio.run(appender.run(shape, run.scale.seconds))
        refuse_failures(target, load)
        found = {f"{kind}, acks/s": load.acks_per_s}
        if target.pid is not None:
            found[f"{kind}, processor µs"] = (target.cpu() - cpu) / len(load.latencies) * 1e6
        return found

    return measure


def many_sessions(run: Run, target: Target) -> Found:
    """The same small appends by one session for each stream, each with one append on its way."""
    kind = f"256 B appends, {SPREAD} append sessions, protobuf, HTTP/1.1"
    names, latencies = run.folder / "streams", run.folder / "latencies"
    names.write_text("\n".join(run.names("sessions", SPREAD)))
    command = [sys.executable, "-m", "bench.many_sessions", f"--url={target.url}"]
    command += [f"--streams={names}", f"--body={SMALL}", f"--seconds={run.scale.seconds}"]
    command += [f"--latencies={latencies}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        if load.stdout.readline() != "ready\n":
            raise RuntimeError(f"the sessions ended with {load.wait()} before they began")
        cpu = target.cpu()
        report = json.loads(load.stdout.readline())
    found = {
        f"{kind}, acks/s": report["acks"] / report["seconds"],
        f"{kind}, ack p99 ms": percentile(np.fromfile(latencies, np.int64), 99),
    }
    if target.pid is not None:
        found[f"{kind}, processor µs"] = (target.cpu() - cpu) / report["acks"] * 1e6
    return found


def many_streams(run: Run, target: Target) -> Found:
    """The first append creates each stream; then one append to each in turn."""
    count = run.scale.streams
    appender = Appender.to_s2(target.url, run.names("many", count), SMALL * b"x", run.folder)
    first = asyncio.run(appender.append_to_each(count, AT_ONCE))
    rest(target)
    turn = asyncio.run(appender.append_to_each(count, AT_ONCE))
    refuse_failures(target, turn)
    return {
        f"first append to each of {count:,} streams, acks/s": first.acks_per_s,
        f"first append to each of {count:,} streams, refused %": 100 * first.failures / count,
        f"one append to each of {count:,} streams in turn, acks/s": turn.acks_per_s,
        f"one append to each of {count:,} streams in turn, p50 ms": percentile(turn.latencies, 50),
    }


def session(body: int, content: Callable[[int, int], bytes] = noise) -> Workload:
    """One append session flat out, and then a catch-up read of what it wrote."""
    records = f"{body + bulk.OVERHEAD} B records{' of JSON' if content is document else ''}"

    def measure(run: Run, target: Target) -> Found:
        (stream,) = run.names(f"session-{body}-{content.__name__}", 1)
        kind = f"one session, {records}"
        written = target.written()
        acked = bulk.append(target.url, stream, bulk.Bulk(body, run.scale.seconds, None, content))
        found = {
            f"{kind}, records/s": acked.records / acked.seconds,
            f"{kind}, MiB/s": acked.metered / MIB / acked.seconds,
            f"{kind}, ack p99 ms": percentile(acked.latencies, 99),
        }
        rest(target)
        if target.pid is not None:
            amplified = (target.written() - written) / acked.metered
            found[f"{kind}, bytes to disk per byte"] = amplified
        began = time.perf_counter()
        size = read_session(urlsplit(target.url).port or 80, stream, acked.records)
        if size < acked.records * body:
            raise RuntimeError(f"{target.name} sent {size} bytes of {acked.records} records")
        found[f"catch-up, {records}, MiB/s"] = acked.metered / MIB / (time.perf_counter() - began)
        return found

    return measure


def steady(run: Run, target: Target) -> Found:
    """A fifth of what a session can take, for long: what stalls shows."""
    (stream,) = run.names("steady", 1)
    acked = bulk.append(target.url, stream, bulk.Bulk(1016, run.scale.steady, STEADY))
    if acked.metered / acked.seconds < 0.95 * STEADY:
        raise RuntimeError(f"{target.name} took {acked.metered / MIB / acked.seconds:.1f} MiB/s")
    return {
        f"steady 20 MiB/s of 1 KiB for {run.scale.steady:.0f} s, ack p{part} ms": percentile(
            acked.latencies, part
        )
        for part in (50, 99, 100)
    }


WORKLOADS: dict[str, Workload] = {
    "alone": ack_alone,
    "small-protobuf": small("protobuf", MANY_WRITERS),
    "small-json": small("JSON", Shape(8, 64, processes=4)),
    "small-http1": small("JSON", Shape(100, 1, processes=4, http1=True)),
    "many-sessions": many_sessions,
    "many-streams": many_streams,
    "session-1KiB": session(1016),
    "session-256": session(248),
    "session-100": session(92),
    "session-json-1KiB": session(1016, document),
    "session-json-256": session(248, document),
    "steady": steady,
    "resident": resident,
}
#: What the null server takes part in: it stores nothing.
NULL_WORKLOADS = ("small-protobuf", "small-json", "small-http1")


def syncs(run: Run, everyone: Sequence[Target]) -> list[str]:
    """What each server syncs for a lone writer, and for many."""
    sentences = []
    for target in everyone:
        streams = run.names("synced", SPREAD)
        appender = Appender.to_s2(target.url, streams, SMALL * b"x", run.folder)
        with alone(target, everyone):
            asyncio.run(appender.warm_up())
            load = partial(count_acks, appender, MANY_WRITERS, run.scale.seconds)
            sentences.append(describe(target, Writer(target, streams[0]).append, load))
        print(sentences[-1], flush=True)
    return sentences


@contextmanager
def targets(peers: Sequence[Target], folder: Path) -> Iterator[list[Target]]:
    """Streamfold, the null server and the peers, all up, with the basin of the benchmark."""
    with ExitStack() as stack:
        ours = stack.enter_context(serving("local-fsync", (), folder))
        null = stack.enter_context(null_serving())
        all_of_them = [Target(OURS, ours.url, ours.pid), *peers]
        for one in all_of_them:
            make_basin(one)
        yield [*all_of_them, Target(NULL, null.url, null.pid)]


def make_basin(target: Target) -> None:
    """A basin that creates streams on append; one that exists is reconfigured."""
    config = {"create_stream_on_append": True}
    basin = f"{target.url}/v1/basins/{BASIN}"
    answer = httpx.put(basin, json={"config": config})
    if answer.status_code == 409:
        answer = httpx.patch(basin, json=config)
    answer.raise_for_status()


def named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peer", type=named, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--peer-pid", type=named, action="append", default=[], metavar="NAME=PID")
    parser.add_argument("--note", action="append", default=[], help="what readers should know")
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument("--repeat", type=int, help="times that each is measured")
    parser.add_argument("--quick", action="store_true", help="less of everything; nothing is kept")
    parser.add_argument("--noisy", action="store_true", help="measure although others are at work")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if not h2load.available():
        parser.error("h2load is missing: install nghttp2-client (Debian), nghttp2 (Homebrew)")
    busy = None if options.noisy else wait_until_quiet()
    pids = {name: int(pid) for name, pid in options.peer_pid}
    peers = [Target(name, url.rstrip("/"), pids.get(name)) for name, url in options.peer]
    folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=options.folder))
    scale = QUICK if options.quick else FULL
    run = Run(replace(scale, repeat=options.repeat or scale.repeat), folder)
    try:
        under = conditions(folder, busy)
        under += [
            "bodies of sessions and of the steady load are random bytes, unless they are JSON",
            "workloads in the order of the table, so that later ones meet a store that holds what "
            f"earlier ones wrote; {run.scale.repeat} times each, one server after the other, the "
            "others on this machine stopped meanwhile",
            *options.note,
        ]
        workloads = {name: work for name, work in WORKLOADS.items() if options.only in name}
        with targets(peers, folder) as everyone:
            run_all(run, everyone, workloads, null=NULL_WORKLOADS)
            if options.only in "syncs":
                under += syncs(run, [one for one in everyone if one.name != NULL])
    finally:
        shutil.rmtree(folder)
    under += load_after(busy)
    if not options.quick and not options.only:
        publish(
            Benchmark(
                "s2",
                "The S2 API compared with other servers",
                "The same clients load each server in turn: h2load and 500 append sessions for small "
                "appends, one session over HTTP/1.1 for bulk. The null server reads a request and "
                "answers at once; it shows that the load generator is not the limit.",
                "python -m bench.compare",
                under,
                rows_of(run),
            )
        )


if __name__ == "__main__":
    main()
