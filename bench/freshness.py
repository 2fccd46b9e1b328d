"""Measures how fresh an archive is: `python -m bench.freshness --help`.

Changes are appended one at a time to a server; a snapshotter in a process of its own publishes them
with `diff.interval = 0.5s`. A change is published when the manifest on disk covers its record. Beside
it stands what no writer could beat: a change waits half an interval on average before anybody
looks.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.serving import serving
from bench.store import BASIN, percentile, plain_python, processor_times, stolen_share
from streamfold.model.records import Record
from streamfold.records.columns import encode_append
from streamfold.spark.stream.client import Connection, Endpoint, Streams

TABLE, STREAM = "items", "changes"
INTERVAL = 0.5
#: Seconds between two changes, on average; drawn anew each time, so that no beat is met.
PAUSE = 0.1
#: Seconds between two looks at the manifest: what a figure may be too large by.
LOOK = 0.005
#: Changes before the measurement: the first ones meet a Java that has compiled nothing yet.
WARM_UP = 100
KEYS = 10_000
#: Seconds for the last change to be published, and for a writer to start and to end.
TIMEOUT = 300
SEED = 5


class Watched:
    """When each record was seen to be covered by the manifest of an archive."""

    def __init__(self, manifest: Path) -> None:
        self._manifest = manifest
        self._stopped = threading.Event()
        self._covered: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        last = None
        while not self._stopped.wait(LOOK):
            if not self._manifest.exists():
                continue
            status = self._manifest.stat()
            if (seen := (status.st_ino, status.st_mtime_ns)) != last:
                head = int(json.loads(self._manifest.read_bytes())["head_position"])
                self._covered.append((head, time.perf_counter()))
                last = seen

    def wait_for(self, seq_num: int) -> None:
        end = time.perf_counter() + TIMEOUT
        while not (self._covered and self._covered[-1][0] >= seq_num):
            if time.perf_counter() > end:
                raise TimeoutError(f"record {seq_num} is not published after {TIMEOUT} s")
            time.sleep(LOOK)

    def published_at(self, seq_num: int) -> float:
        return next(moment for head, moment in self._covered if head >= seq_num)

    @property
    def commits(self) -> int:
        return len(self._covered)


@contextmanager
def writing(url: str, folder: Path) -> Iterator[Path]:
    """A snapshotter in a process of its own; gives the manifest that it writes."""
    file, target = folder / "writer.toml", folder / "archive"
    file.write_text(
        f'key_fields = ["id"]\nschema = "id BIGINT NOT NULL, name STRING"\n'
        f'source = {{ server = "{url}", basin = "{BASIN}", stream = "{STREAM}", table = "{TABLE}" }}\n'
        f'diff = {{ interval = "{round(INTERVAL * 1000)}ms" }}\n'
        f'destinations = [{{ type = "local", path = "{target}" }}]\n'
        'formats = { snapshot = ["parquet"], diff = ["parquet"] }\nhttp = { port = 0 }\n'
    )
    command = [sys.executable, "-m", "streamfold.cli.main", "snapshotter", "run"]
    log = folder / "writer.log"
    with log.open("wb") as output:
        writer = subprocess.Popen([*command, "--config", str(file)], stdout=output, stderr=output)
    with writer:
        try:
            yield target / TABLE / "manifest.json"
            writer.send_signal(signal.SIGTERM)
            writer.wait(TIMEOUT)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{error}; the writer said: {log.read_text()[-2000:]}") from None
        finally:
            writer.kill()


def append_changes(url: str, count: int, chance: random.Random) -> list[float]:
    """Append changes one by one; when each was sent."""
    sent = []
    with Connection(Endpoint(url, BASIN)) as connection:
        streams = Streams(connection)
        for _ in range(count):
            key = chance.randrange(KEYS)
            change = {"op": "u", "key": {"id": key}, "after": {"id": key, "name": f"name {key}"}}
            raw = encode_append(Record(json.dumps(change).encode()))
            sent.append(time.perf_counter())
            streams.append(STREAM, raw)
            time.sleep(chance.uniform(0, 2 * PAUSE))
    return sent


def run(seconds: float, backend: str, folder: Path) -> dict[str, Any]:
    chance, since = random.Random(SEED), processor_times()
    with serving(backend, [STREAM], folder) as server:
        url = f"http://127.0.0.1:{server.port}"
        with writing(url, folder) as manifest, Watched(manifest) as watched:
            first = append_changes(url, WARM_UP, chance)
            watched.wait_for(len(first) - 1)
            before = watched.commits
            sent = append_changes(url, round(seconds / PAUSE), chance)
            watched.wait_for(len(first) + len(sent) - 1)
            waits = [
                watched.published_at(len(first) + number) - moment
                for number, moment in enumerate(sent)
            ]
            commits = watched.commits - before
    return {
        "interval_s": INTERVAL,
        "changes": len(sent),
        "commits": commits,
        "p50_s": percentile(waits, 0.5),
        "p99_s": percentile(waits, 0.99),
        "max_s": max(waits),
        "half_an_interval_s": INTERVAL / 2,
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
        "load": os.getloadavg()[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of appending")
    parser.add_argument("--backend", choices=("memory", "local"), default="local")
    parser.add_argument("--results", type=Path, default=Path("bench/results/freshness.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-freshness-") as folder:
        found = run(given.seconds, given.backend, Path(folder))
    print(
        "| changes | commits | p50 s | p99 s | max s | half an interval s |\n|---|---|---|---|---|---|"
    )
    print(
        f"| {found['changes']} | {found['commits']} | {found['p50_s']:.2f} | {found['p99_s']:.2f} "
        f"| {found['max_s']:.2f} | {found['half_an_interval_s']:.2f} |"
    )
    print(f"\nload {found['load']:.1f} on {os.cpu_count()} cores, {found['stolen']:.0%} stolen")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
