"""`streamfold publish` in a process of its own, of which parts are killed."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.request import urlopen

import psutil

from streamfold.ingest.postgres.pgoutput import LSN_ZERO, Lsn, parse_lsn
from tests.ingest.publish_kills.load import TABLES
from tests.ports import free_port

T = TypeVar("T")

#: Each is killed equally often, by one of these processes.
PARTS: Final = {
    "driver": ("driver", "driver's Java"),
    "worker": ("worker", "worker", "worker daemon", "source planner"),
    "server": ("server",),
    "ingester": ("ingester",),
}
#: `publish` gives a part up that was killed nine times in a row, each within 30 s of its start.
KILLS_MAX: Final = 8 * len(PARTS)
#: Seconds for a recovery, which may include a start of Spark and 30 s of backoff before it.
TIMEOUT: Final = 300.0
#: Replaces the formats in the configuration that `publish` writes, and makes bases frequent.
SETTINGS: Final = (
    'formats = { snapshot = ["parquet", "jsonl"], diff = ["jsonl", "parquet"] }\n'
    'snapshot = { min_interval = "1s", max_chain_diffs = 12 }'
)
#: In the command lines of PySpark's daemon with the workers that it forks, and of the process that
#: plans the batches of the query's source.
WORKER, PLANNER = (
    "streamfold.spark_worker_daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
)


class PublishFailedError(Exception):
    """The command ended, or its archives did not get what they wait for."""


class Publication:
    """`streamfold publish` in a process of its own, whose parts are killed."""

    def __init__(self, uri: str, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "publish.log"
        self._port = free_port()
        command = [sys.executable, "-m", "streamfold.cli.main", "publish", uri, "--json"]
        command += ["--to", str(folder / "archive"), "--diff-interval", "500ms"]
        command += [f"--table={table}" for table in TABLES]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._started: set[psutil.Process] = set()
        #: Jobs, tasks, rows and bytes, up to the last kill of a driver.
        self.spark: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._note_processes()
            self._process.kill()
            self._process.wait()
            self._end_processes()

    def archive(self, table: str) -> Path:
        return self._folder / "archive" / f"public.{table}"

    def configure(self) -> None:
        """Change what `publish` has no options for; a snapshotter reads it when it starts again."""
        (snapshotter,) = self._until(lambda: self._parts("snapshotter"))
        file = self._folder / "archive.state" / "snapshotter.toml"
        text = file.read_text().replace("port = 0", f"port = {self._port}")
        file.write_text(re.sub("(?m)^formats = .*$", SETTINGS, text))
        snapshotter.kill()

    def kill(self, part: str, rng: random.Random) -> str:
        """Kill a process of a part; returns which one it was."""
        kind = rng.choice(PARTS[part])
        victims = self._until(lambda: self._processes(kind))
        self._note_processes()
        if part == "driver":
            self._count_spark()
        rng.choice(victims).kill()
        return kind

    def wait_beyond(self, position: Lsn) -> None:
        """Wait until both archives have a transaction of the database after a position."""
        self._until(lambda: all(newest_commit(self.archive(table)) > position for table in TABLES))

    def stop(self) -> int:
        """Stop the command as Ctrl-C does; returns how many processes it has left behind."""
        self._count_spark()
        self._note_processes()
        self._process.send_signal(signal.SIGTERM)
        if status := self._process.wait(TIMEOUT):
            raise PublishFailedError(f"ended with status {status}:{self._last_lines()}")
        return self._end_processes()

    def _note_processes(self) -> None:
        self._started.update(psutil.Process(self._process.pid).children(recursive=True))

    def _end_processes(self) -> int:
        """Kill the processes of the command that have outlived it; returns how many."""
        psutil.wait_procs(self._started, 30)
        left = [process for process in self._started if _lives(process)]
        for process in left:
            print(f"left behind: {process}")
            process.kill()
        return len(left)

    def _count_spark(self) -> None:
        with (
            suppress(OSError),  # the counts of one that has just ended are lost
            urlopen(f"http://127.0.0.1:{self._port}/status", timeout=TIMEOUT) as answer,
        ):
            self.spark.update(json.load(answer)["spark"])

    def _processes(self, kind: str) -> list[psutil.Process]:
        verbs = {"server": "serve", "ingester": "ingest"}
        parts = self._parts(verbs.get(kind, "snapshotter"))
        if kind in ("server", "ingester", "driver"):
            return parts
        below = [child for part in parts for child in part.children(recursive=True)]
        if kind == "driver's Java":
            return [process for process in below if process.name() == "java"]
        if kind == "source planner":
            return [process for process in below if PLANNER in _command(process)]
        workers = [process for process in below if WORKER in _command(process)]
        forked = [process for process in workers if process.parent() in workers]
        return forked if kind == "worker" else [each for each in workers if each not in forked]

    def _parts(self, verb: str) -> list[psutil.Process]:
        children = psutil.Process(self._process.pid).children()
        return [child for child in children if verb in _command(child)[3:4]]

    def _until(self, look: Callable[[], T]) -> T:
        """Return what `look` sees as soon as it is true."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise PublishFailedError(f"ended:{self._last_lines()}")
            with suppress(psutil.NoSuchProcess):  # one that ended while it was looked at
                if seen := look():
                    return seen
            time.sleep(0.1)
        raise PublishFailedError(f"no progress for {TIMEOUT:.0f} s:{self._last_lines()}")

    def _last_lines(self) -> str:
        return "".join(f"\n  {line[:600]}" for line in self._log.read_text().splitlines()[-6:])


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):  # it ended, or is a zombie
        return list(process.cmdline())
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def newest_commit(archive: Path) -> Lsn:
    """Return the newest commit of the database that an archive has."""
    ranges = [artifact.get("source_range") for artifact in artifacts_of(archive)]
    return max((parse_lsn(found["last"]) for found in ranges if found), default=LSN_ZERO)


def largest_pause(archive: Path) -> float:
    """Return the most seconds between two commits of an archive."""
    times = [datetime.fromisoformat(artifact["created_at"]) for artifact in artifacts_of(archive)]
    return max((after - before).total_seconds() for before, after in pairwise(times))


def artifacts_of(archive: Path) -> list[dict[str, Any]]:
    file = archive / "manifest.json"
    manifest = json.loads(file.read_bytes()) if file.exists() else {"artifacts": []}
    artifacts: list[dict[str, Any]] = manifest["artifacts"]
    return artifacts
