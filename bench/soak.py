"""Loads a server for a long time at 80 % of what it can do, then ten times as much, then as before.

    python -m bench.soak --minutes 30 [--noisy]

Appends and reads of both faces arrive at random moments, beside followers, trims and retention. Every
few seconds it samples memory, descriptors, files, latencies, answers by status, and how long the event
loop was held up. What the server can do is measured again every half minute, as shared machines change.
At the end every acknowledged record has been read back at its seq_num, by its checksum.

The verdicts, each of which fails the run when it is broken, are in `bench/soak_verdicts.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.machine import conditions, load_after, wait_until_quiet
from bench.report import Benchmark, Row, Sample, Series, publish
from bench.soak_ledger import Ledger, StreamLedger
from bench.soak_load import Followers, Load, Pool, Reply, request, trim
from bench.soak_verdicts import Moment, Verdict, judge, phase, statuses_of
from bench.store import BASIN, MIB
from streamfold.records.payload import decode
from streamfold.server.main import loop_factory, tune_collector

_CUT_OFF = re.compile(rb'streamfold_cut_off_total\{reason="(\w+)"\} (\S+)')
REPOSITORY = Path(__file__).parent.parent
#: Seconds between two samples.
INTERVAL = 5.0
#: Part of what the server can do, and how many times that in the overload.
SHARE, OVERLOAD = 0.8, 10.0
#: Clients of the closed loop that finds out what the server can do; seconds of it; seconds until it
#: is measured again.
CLIENTS, CALIBRATION, RECALIBRATE = 64, 5.0, 30.0
#: Clients that may wait at once: in the soak, and in the overload, where it is more than the server
#: takes of one address.
POPULATION, CROWD = 1_000, 14_000
#: Records before the newest that a trim leaves; seconds of retention of streams that are not trimmed.
LEFT, RETENTION = 2_000, 300


@dataclass
class Soak:
    """One run: the server, its clients, and what was sampled."""

    folder: Path
    server: subprocess.Popen[str]
    port: int
    ledger: Ledger
    pool: Pool
    load: Load
    followers: Followers
    moments: list[Moment] = field(default_factory=list)
    phase: str = "start"
    began: float = field(default_factory=time.monotonic)
    capacities: list[float] = field(default_factory=list)
    #: Clients that the server cut off, by reason, as its metrics say.
    cut_off: dict[str, int] = field(default_factory=dict)
    generator_late: float = 0.0

    @property
    def minute(self) -> float:
        return (time.monotonic() - self.began) / 60

    async def sample_for_ever(self) -> None:
        process, before = psutil.Process(self.server.pid), time.monotonic()
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        while True:
            await asyncio.sleep(INTERVAL)
            phase, now = self.phase, time.monotonic()
            seconds, before = now - before, now
            window = self.load.take_window()
            self.server.stdin.write("\n")
            self.server.stdin.flush()
            lag = await asyncio.to_thread(self.server.stdout.readline)
            waited, worked, held = map(float, lag.split())
            files, size = await asyncio.to_thread(_stored, self.folder)
            late, self.generator_late = self.generator_late, 0.0
            self.moments.append(
                Moment(
                    round(self.minute, 3),
                    phase,
                    round(process.memory_info().rss / MIB, 1),
                    process.num_fds(),
                    files,
                    round(size / MIB, 1),
                    _percentile(window.appends, 50),
                    _percentile(window.appends, 99),
                    _percentile(window.reads, 99),
                    waited,
                    worked,
                    held,
                    round(window.offered / seconds, 1),
                    round(sum(window.statuses.values()) / seconds, 1),
                    window.left_out,
                    self.load.under_way,
                    self.pool.connections,
                    round(late * 1000, 1),
                    os.getloadavg()[0],
                    dict(sorted(window.statuses.items())),
                    window.mute,
                )
            )
            _show(self.moments[-1])

    async def watch_itself(self) -> None:
        while True:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            self.generator_late = max(self.generator_late, time.monotonic() - due)

    async def calibrate(self) -> float:
        """What the server can do now, in requests per second."""
        phase, self.phase = self.phase, "calibration"
        self.capacities.append(await self.load.closed_loop(CLIENTS, CALIBRATION))
        await asyncio.sleep(INTERVAL)  # for a sample that has nothing of the soak
        self.phase = phase
        return self.capacities[-1]

    async def hold(self, phase: str, seconds: float) -> float:
        """Keep the server at `SHARE` of what it can do for so long; returns the last rate."""
        self.phase, ends = phase, time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            rate = SHARE * await self.calibrate()
            await self.load.open_loop(rate, min(left, RECALIBRATE), POPULATION)
        return rate

    async def audit_for_ever(self) -> None:
        """Read every stream back, and trim what was read."""
        while True:
            for stream in self.ledger.streams:
                await self.audit(stream)
            await asyncio.sleep(0.5)

    async def audit(self, stream: StreamLedger) -> bool:
        """Read one stream to its tail; returns whether it got there."""
        while True:
            path = f"{stream.path}/records?seq_num={stream.audited}&count=1000"
            reply = await self.pool.exchange(request("GET", path, accept="application/protobuf"))
            if reply.status == 416:
                break
            if reply.status != 200:
                return False  # overloaded: later
            records = decode(_records_of(reply.body))
            for record in records:
                stream.audit(record.seq_num, record.body)
            if len(records) < 1000:
                break
        if stream.trimming and stream.audited - stream.trimmed > 2 * LEFT:
            data, body = trim(stream, stream.audited - LEFT)
            reply = await self.pool.exchange(data)
            if reply.status == 200:
                stream.trimmed = stream.audited - LEFT
                stream.acknowledge(_start(reply), [body])
            elif reply.status not in (429, 503):
                stream.doubt([body])
        return True


def _start(reply: Reply) -> int:
    return int(json.loads(reply.body)["start"]["seq_num"])


def _records_of(body: bytes) -> bytes:
    """The records of a ReadBatch without the tail behind them."""
    at = 0
    while at < len(body) and body[at] == 0x0A:
        length = shift = 0
        at += 1
        while True:
            byte = body[at]
            length |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if byte < 0x80:
                break
        at += length
    return body[:at]


def _stored(folder: Path) -> tuple[int, int]:
    """Files below the folder and their bytes; some disappear meanwhile."""
    count = size = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                size += (Path(root) / name).stat().st_size
                count += 1
            except FileNotFoundError:
                continue
    return count, size


def _percentile(seconds: Sequence[float], part: int) -> float | None:
    return round(float(np.percentile(seconds, part)) * 1000, 2) if seconds else None


def _show(moment: Moment) -> None:
    print(
        f"{moment.minute:6.2f} min {moment.phase:11} {moment.offered_per_s:7.0f}/s offered, "
        f"{moment.answered_per_s:7.0f}/s answered, p50 {moment.append_p50_ms} p99 "
        f"{moment.append_p99_ms} ms, {moment.memory:.0f} MiB, {moment.descriptors} descriptors, "
        f"{moment.files} files {moment.stored_mib:.0f} MiB, loop {moment.waited_ms:.0f}/"
        f"{moment.worked_ms:.0f}/{moment.held_ms:.0f} ms, generator {moment.generator_ms:.0f} ms, "
        f"load {moment.load_average:.1f}, {moment.statuses}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _serving(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.lag_server", folder.as_uri()]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server
            assert server.stdin is not None
            server.stdin.close()
            if server.wait(60):
                raise RuntimeError(f"the server ended with {server.returncode}")
        finally:
            server.kill()


def _streams() -> list[StreamLedger]:
    return [
        *(StreamLedger(f"trimmed-{number}") for number in range(24)),
        *(StreamLedger(f"expiring-{number}", trimming=False) for number in range(8)),
        *(StreamLedger(f"bytes-{number}", durable=True) for number in range(16)),
        *(StreamLedger(f"json-{number}", durable=True, json=True) for number in range(8)),
    ]


async def _create(pool: Pool, streams: Sequence[StreamLedger]) -> None:
    kind = "application/json"
    made = [request("PUT", f"/v1/basins/{BASIN}", b"{}", content_type=kind)]
    for stream in streams:
        config = {} if stream.trimming else {"retention_policy": {"age": RETENTION}}
        body = json.dumps(config).encode()
        data = request("PUT", stream.path, body, content_type=kind)
        if stream.durable:
            form = kind if stream.json else "application/octet-stream"
            data = request("PUT", f"/{BASIN}/{stream.name}", content_type=form)
        made.append(data)
    for data in made:
        reply = await pool.exchange(data)
        if reply.status not in (200, 201, 204):
            raise RuntimeError(f"{data[:80]!r} was refused: {reply.status} {reply.body!r}")


async def run(options: argparse.Namespace, folder: Path, server: subprocess.Popen[str]) -> Soak:
    assert server.stdout is not None
    port = int(server.stdout.readline())
    ledger, pool, followers = Ledger(_streams()), Pool(port), Followers(port)
    soak = Soak(folder, server, port, ledger, pool, Load(pool, ledger, options.seed), followers)
    await _create(pool, ledger.streams)
    for stream in ledger.streams[::2]:
        live = f"/{BASIN}/{stream.name}?offset=now&live=sse" if stream.durable else None
        followers.follow(live or f"{stream.path}/records?tail_offset=0")
    await soak.load.closed_loop(8, 5)  # opens streams
    tasks = [
        asyncio.create_task(work)
        for work in (soak.sample_for_ever(), soak.watch_itself(), soak.audit_for_ever())
    ]
    try:
        rate = await soak.hold("soak", options.minutes * 60)
        soak.phase = "overload"
        await soak.load.open_loop(OVERLOAD * rate, options.overload * 60, CROWD)
        soak.phase = "draining"
        await _until_answered(soak.load)
        soak.pool.close_idle()
        await soak.hold("recovery", options.recovery * 60)
        soak.phase = "idle"
        await _until_answered(soak.load)
        await asyncio.sleep(options.idle * 60)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    metrics = await pool.exchange(request("GET", "/metrics"))
    soak.cut_off = {
        reason.decode(): int(float(count)) for reason, count in _CUT_OFF.findall(metrics.body)
    }
    for stream in ledger.streams:
        if not await soak.audit(stream):
            raise RuntimeError(f"stream {stream.name} cannot be read at the end")
    followers.close()
    return soak


async def _until_answered(load: Load) -> None:
    while load.under_way:  # noqa: ASYNC110 - every request has its own time limit
        await asyncio.sleep(0.1)


#: What the plot shows: the name with the unit, and the attribute of a sample.
_SERIES = {
    "resident memory, MiB": "memory",
    "append p50, ms": "append_p50_ms",
    "append p99, ms": "append_p99_ms",
    "answers per second": "answered_per_s",
    "descriptors": "descriptors",
    "files of the store": "files",
    "longest step of the loop, ms of processor": "worked_ms",
    "store on disk, MiB": "stored_mib",
}


def page(
    soak: Soak, rulings: Sequence[tuple[str, Verdict]], command: str, under: list[str]
) -> None:
    marks: list[tuple[float, str]] = []
    for moment in soak.moments:
        if moment.phase != "calibration" and (not marks or marks[-1][1] != moment.phase):
            marks.append((moment.minute, moment.phase))
    series = [
        Series(
            name,
            [
                (one.minute, float(value))
                for one in soak.moments
                if (value := getattr(one, attribute)) is not None
            ],
            marks,
        )
        for name, attribute in _SERIES.items()
    ]
    lines = [
        "Appends and reads through both faces arrive at random moments, at 80 % of the server's",
        "capacity in the same minutes, along with followers, trims and retention; then ten times as",
        "many, then as many as before. Every acknowledged record is read back at its seq_num and",
        "compared by its checksum.",
        "",
        "| verdict | | figures |",
        "|---|---|---|",
        *(f"| {verdict.name} | {ruling} | {verdict.text} |" for ruling, verdict in rulings),
    ]
    publish(
        Benchmark(
            "soak", "Soak and overload", "\n".join(lines), command, under, _rows(soak), [], series
        )
    )


def _rows(soak: Soak) -> list[Row]:
    def row(measure: str, unit: str, value: float) -> Row:
        return Row(measure, unit, [Sample("Streamfold", [float(value)])], more=False)

    def median(name: str, attribute: str) -> float:
        values = [getattr(one, attribute) for one in phase(soak.moments, name, later=True)]
        return float(np.median([value for value in values if value is not None] or [0.0]))

    def total(name: str, attribute: str) -> float:
        return float(sum(getattr(one, attribute) for one in phase(soak.moments, name)))

    rows = [
        row("what the server could do, median", "requests/s", float(np.median(soak.capacities)))
    ]
    for name in ("soak", "overload", "recovery"):
        rows += [
            row(f"{name}: offered", "requests/s", median(name, "offered_per_s")),
            row(f"{name}: left out by the generator", "requests", total(name, "left_out")),
            row(f"{name}: append p50", "ms", median(name, "append_p50_ms")),
            row(f"{name}: append p99", "ms", median(name, "append_p99_ms")),
            row(f"{name}: resident memory", "MiB", median(name, "memory")),
            row(f"{name}: descriptors", "", median(name, "descriptors")),
            row(f"{name}: files of the store", "", median(name, "files")),
        ]
    rows += [
        row(f"clients cut off: {reason.replace('_', ' ')}", "", count)
        for reason, count in soak.cut_off.items()
    ]
    rows.append(row("idle afterwards: resident memory", "MiB", soak.moments[-1].memory))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    parser.add_argument("--overload", type=float, default=3.0, help="minutes")
    parser.add_argument("--recovery", type=float, default=5.0, help="minutes")
    parser.add_argument("--idle", type=float, default=3.0, help="minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noisy", action="store_true", help="measure although others are at work")
    parser.add_argument("--report", type=Path, help="file that gets a line of JSON")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/soak.md")
    options = parser.parse_args()
    busy = None if options.noisy else wait_until_quiet()
    tune_collector()
    command, began = f"python -m bench.soak --minutes {options.minutes:g}", time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="streamfold-soak-"))
    try:
        under = conditions(folder, busy, [_storage(folder)])
        with (
            _serving(folder / "store") as server,
            asyncio.Runner(loop_factory=loop_factory()) as loop,
        ):
            soak = loop.run(run(options, folder / "store", server))
        verdicts = judge(soak.moments, soak.ledger)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = REPOSITORY / "bench" / "results" / "soak.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps([asdict(moment) for moment in soak.moments]))
    for verdict in verdicts:
        print(f"{_ruling(verdict, options)} {verdict.name}: {verdict.text}")
    for text, number in soak.load.refusals.most_common(10):
        print(f"{number:8} times {text}")
    print(f"cut off: {soak.cut_off}")
    if options.publish:
        rulings = [(_ruling(verdict, options), verdict) for verdict in verdicts]
        page(soak, rulings, command, [*under, *load_after(busy)])
    broken = [_ruling(verdict, options) for verdict in verdicts].count("BROKEN")
    if options.report is not None:
        _report(options.report, soak, broken, time.monotonic() - began, command)
    return min(broken, 1)


def _ruling(verdict: Verdict, options: argparse.Namespace) -> str:
    if verdict.holds:
        return "holds"
    return "not judged: others were at work" if verdict.timed and options.noisy else "BROKEN"


def _storage(folder: Path) -> str:
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    mount = max((at for at in kinds if folder.is_relative_to(at)), key=len)
    kind = kinds[mount]
    cost = ", so syncs cost nothing" if kind == "tmpfs" else ""
    return f"the store is a folder on {kind}{cost}; clients and server share the machine"


def _report(target: Path, soak: Soak, broken: int, seconds: float, command: str) -> None:
    statuses = statuses_of(soak.moments)
    figures = {
        "minutes of soak": round(len(phase(soak.moments, "soak")) * INTERVAL / 60, 1),
        "requests": sum(statuses.values()),
        "acknowledged records": soak.ledger.acknowledged,
        "refused requests": statuses[429] + statuses[503],
        "server errors": sum(n for s, n in statuses.items() if s >= 500 and s != 503),
        "clients cut off": sum(soak.cut_off.values()),
        "peak mib": round(max(moment.memory for moment in soak.moments)),
    }
    line = {
        "proof": "soak",
        "violations": broken,
        "seconds": round(seconds, 1),
        "figures": figures,
        "command": command,
    }
    with target.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
