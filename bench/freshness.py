"""Measures how fresh archives are: `python -m bench.freshness --help`.

Changes are appended one at a time to the streams of one or several tables, at one rate in all; a
snapshotter in a process of its own publishes them with `diff.interval = 0.5s`. A change is published
when the manifest on disk covers its record. Beside it stands what no writer could beat: a change waits
half an interval on average before anybody looks. Then nothing is appended any more, and the processor
time of the idle snapshotter is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.serving import serving
from bench.store import BASIN, percentile, plain_python, processor_times, stolen_share
from bench.subjects import Usage
from streamfold.model.records import Record
from streamfold.records.protobuf import encode_append
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls

INTERVAL = 0.5
#: Seconds between two looks at the manifests: what a figure may be too large by.
LOOK = 0.005
#: Seconds without changes, for the processor time of an idle snapshotter.
IDLE = 20
#: Changes before the measurement: the first ones meet a Java that has compiled nothing yet.
WARM_UP = 100
KEYS = 10_000
#: Seconds for the last change to be published, and for a writer to start and to end.
TIMEOUT = 300
SEED = 5


class Watched:
    """When each record of each table was seen to be covered by its manifest."""

    def __init__(self, manifests: Sequence[Path]) -> None:
        self._manifests = manifests
        self._stopped = threading.Event()
        self._covered: list[list[tuple[int, float]]] = [[] for _ in manifests]
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        last: list[tuple[int, int] | None] = [None] * len(self._manifests)
        while not self._stopped.wait(LOOK):
            for number, manifest in enumerate(self._manifests):
                if not manifest.exists():
                    continue
                status = manifest.stat()
                if (seen := (status.st_ino, status.st_mtime_ns)) != last[number]:
                    head = int(json.loads(manifest.read_bytes())["head_position"])
                    self._covered[number].append((head, time.perf_counter()))
                    last[number] = seen

    def wait_for(self, tails: Sequence[int]) -> None:
        """Wait until every table has all of its records."""
        end = time.perf_counter() + TIMEOUT
        for table, tail in enumerate(tails):
            while not (self._covered[table] and self._covered[table][-1][0] >= tail - 1):
                if time.perf_counter() > end:
                    raise TimeoutError(
                        f"record {tail - 1} of table {table} is not published after {TIMEOUT} s"
                    )
                time.sleep(LOOK)

    def published_at(self, change: Change) -> float:
        heads = self._covered[change.table]
        return next(moment for head, moment in heads if head >= change.seq_num)

    @property
    def commits(self) -> int:
        return sum(map(len, self._covered))


class Change(NamedTuple):
    """An appended change, and when it was sent."""

    table: int
    seq_num: int
    sent: float


class Appender:
    """Appends changes one by one, each to a table by chance."""

    def __init__(
        self, url: str, streams: Sequence[str], rate: float, chance: random.Random
    ) -> None:
        self._url, self._streams, self._chance = url, streams, chance
        #: Seconds between two changes, on average; drawn anew each time, so that no beat is met.
        self._pause = 1 / rate
        self.tails = [0] * len(streams)

    def append(self, count: int) -> list[Change]:
        changes, chance, due = [], self._chance, time.perf_counter()
        with ServerConnection(Endpoint(self._url, BASIN)) as connection:
            streams = StreamCalls(connection)
            for _ in range(count):
                table, key = chance.randrange(len(self._streams)), chance.randrange(KEYS)
                row = {"id": key, "name": f"name {key}"}
                change = {"op": "u", "key": {"id": key}, "after": row}
                raw = encode_append(Record(json.dumps(change).encode()))
                changes.append(Change(table, self.tails[table], time.perf_counter()))
                streams.append(self._streams[table], raw)
                self.tails[table] += 1
                due += chance.uniform(0, 2 * self._pause)
                time.sleep(max(0.0, due - time.perf_counter()))
        return changes


@contextmanager
def writing(url: str, tables: Sequence[str], folder: Path) -> Iterator[tuple[int, list[Path]]]:
    """A snapshotter in a process of its own; gives its pid, and the manifests that it writes."""
    file, target = folder / "writer.toml", folder / "archive"
    file.write_text(
        "http = { port = 0 }\n"
        + "".join(
            f'[[tables]]\nkey_fields = ["id"]\nschema = "id BIGINT NOT NULL, name STRING"\n'
            f'source = {{ server = "{url}", basin = "{BASIN}", stream = "{table}", '
            f'table = "{table}" }}\n'
            f'diff = {{ interval = "{round(INTERVAL * 1000)}ms" }}\n'
            f'destinations = [{{ type = "local", path = "{target}" }}]\n'
            'formats = { snapshot = ["parquet"], diff = ["parquet"] }\n'
            for table in tables
        )
    )
    command = [sys.executable, "-m", "streamfold.cli.main", "snapshotter", "run"]
    log = folder / "writer.log"
    with log.open("wb") as output:
        writer = subprocess.Popen([*command, "--config", str(file)], stdout=output, stderr=output)
    with writer:
        try:
            yield writer.pid, [target / table / "manifest.json" for table in tables]
            writer.send_signal(signal.SIGTERM)
            writer.wait(TIMEOUT)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{error}; the writer said: {log.read_text()[-2000:]}") from None
        finally:
            writer.kill()


def processor_seconds(pid: int) -> float:
    """Processor time of a process and of all its children."""
    usage = Usage()
    usage.look(pid)
    return sum(usage.cpu.values())


def run(seconds: float, rate: float, tables: int, backend: str, folder: Path) -> dict[str, Any]:
    chance, since = random.Random(SEED), processor_times()
    names = [f"items-{number}" for number in range(tables)]
    with serving(backend, names, folder) as server:
        url = f"http://127.0.0.1:{server.port}"
        appender = Appender(url, names, rate, chance)
        with writing(url, names, folder) as (pid, manifests), Watched(manifests) as watched:
            appender.append(WARM_UP * tables)
            watched.wait_for(appender.tails)
            before, began, used = watched.commits, time.perf_counter(), processor_seconds(pid)
            changes = appender.append(round(seconds * rate))
            watched.wait_for(appender.tails)
            busy = (processor_seconds(pid) - used) / (time.perf_counter() - began)
            waits = [watched.published_at(change) - change.sent for change in changes]
            commits = watched.commits - before
            used = processor_seconds(pid)
            time.sleep(IDLE)
            idle = (processor_seconds(pid) - used) / IDLE
    return {
        "tables": tables,
        "interval_s": INTERVAL,
        "changes": len(changes),
        "commits": commits,
        "p50_s": percentile(waits, 0.5),
        "p95_s": percentile(waits, 0.95),
        "p99_s": percentile(waits, 0.99),
        "max_s": max(waits),
        "half_an_interval_s": INTERVAL / 2,
        "cores_busy": busy,
        "cores_idle": idle,
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
        "load": os.getloadavg()[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of appending")
    parser.add_argument("--rate", type=float, default=100.0, help="changes a second, in all")
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--backend", choices=("memory", "local"), default="local")
    parser.add_argument("--results", type=Path, default=Path("bench/results/freshness.json"))
    given = parser.parse_args()
    results = []
    print(
        "| tables | changes | commits | p50 s | p95 s | p99 s | max s | cores busy | cores idle |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for tables in given.tables:
        with tempfile.TemporaryDirectory(prefix="bench-freshness-") as folder:
            found = run(given.seconds, given.rate, tables, given.backend, Path(folder))
        results.append(found)
        print(
            f"| {tables} | {found['changes']} | {found['commits']} | {found['p50_s']:.2f} "
            f"| {found['p95_s']:.2f} | {found['p99_s']:.2f} | {found['max_s']:.2f} "
            f"| {found['cores_busy']:.2f} | {found['cores_idle']:.3f} |",
            flush=True,
        )
        print(f"load {found['load']:.1f} on {os.cpu_count()} cores, {found['stolen']:.0%} stolen")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
