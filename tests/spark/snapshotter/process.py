"""`streamfold snapshotter run` in a process of its own, which a test may kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import psutil

from tests.spark.server import BASIN, TOKEN, Server
from tests.spark.snapshotter.waiting import TIMEOUT

#: A line of our own log; Spark, its launcher and its workers write others.
OURS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING|ERROR) streamfold[\w.]*: .*")
#: Starts in half the time.
_QUICK = "spark.driver.extraJavaOptions=-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def configuration(server: Server, stream: str, folder: Path, *, table: str = "items") -> str:
    """A file for one table, in a local folder."""
    return f"""
key_fields = ["id"]
key_prefix = "{table}/"
schema = "id BIGINT NOT NULL, name STRING, price DOUBLE"
source = {{ server = "{server.url}", basin = "{BASIN}", stream = "{stream}", table = "{table}" }}
diff = {{ interval = "200ms" }}
snapshot = {{ max_chain_diffs = 5 }}
destinations = [{{ type = "local", path = "{folder}" }}]
formats = {{ snapshot = ["parquet"], diff = ["jsonl", "parquet"] }}
http = {{ port = 0, host = "127.0.0.1" }}
"""


class Process:
    """One run of the writer; it does not outlive its `with` block, whatever happens there."""

    def __init__(self, file: Path, log: Path, *, master: str = "local[2]") -> None:
        command = [sys.executable, "-m", "streamfold.cli.main", "snapshotter", "run", "--json"]
        command += [f"--config={file}", "--conf", _QUICK, "--master", master]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "S2_ACCESS_TOKEN": TOKEN},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
        assert line, log.read_text()[-3000:]
        self.port = int(json.loads(line)["port"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def status(self, table: str = "items") -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.port}/status", timeout=TIMEOUT) as answer:
            found: dict[str, Any] = json.load(answer)["tables"][table]
            return found

    def ask(self, path: str) -> bytes:
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=TIMEOUT) as answer:
            found: bytes = answer.read()
            return found

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def java(self) -> psutil.Process:
        """The Java that it started."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return next(child for child in children if child.name() == "java")

    def wait(self) -> int:
        """The status that it ends with by itself."""
        return self._end()

    def stop(self) -> int:
        """Ask it to flush and to end; the status that it ends with."""
        self._process.send_signal(signal.SIGTERM)
        return self._end()

    def hang_up(self) -> int:
        """Close its terminal, which all of its processes notice; the status that it ends with."""
        os.killpg(self._process.pid, signal.SIGHUP)
        return self._end()

    def _end(self) -> int:
        try:
            return self._process.wait(TIMEOUT)
        finally:
            if self._process.stdout:
                self._process.stdout.close()
