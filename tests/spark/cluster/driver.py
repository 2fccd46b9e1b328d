"""A snapshotter as the driver of a cluster, in its own process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from tests.spark.cluster.cluster import QUICK, Cluster, command_of
from tests.spark.server import TOKEN

#: What the machine of a test has room for.
SMALL = {
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
}


class Driver:
    """One run; `command` prints its port as JSON once it serves its status."""

    def __init__(self, command: Sequence[str | Path], cluster: Cluster, log: Path) -> None:
        environment = {
            "S2_ACCESS_TOKEN": TOKEN,
            "PYSPARK_PYTHON": str(cluster.python),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                env={**os.environ, **environment},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, log.read_text()[-3000:]
        self._origin = f"http://127.0.0.1:{json.loads(line)['port']}"

    def status(self) -> dict[str, Any]:
        with urlopen(f"{self._origin}/status", timeout=240) as answer:
            found: dict[str, Any] = json.load(answer)["tables"]["items"]
            return found

    def request_snapshot(self) -> None:
        with urlopen(Request(f"{self._origin}/snapshot?table=items", method="POST"), timeout=240):
            pass

    def child(self, word: str) -> psutil.Process:
        """The one process that it started whose command has this word, or it itself."""
        own = psutil.Process(self._process.pid)
        (found,) = [one for one in (own, *own.children()) if word in command_of(one)]
        return found

    def wait(self) -> int:
        """Wait for its end, and return its status."""
        try:
            return self._process.wait(300)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it, if it has not ended yet."""
        self._process.kill()
        self._process.wait(240)
        if self._process.stdout:
            self._process.stdout.close()
