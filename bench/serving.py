"""Runs `streamfold serve` in a process of its own, as a user does, to be measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.store import BASIN, MIB

#: Seconds that a server may take to stop.
_STOP_TIMEOUT = 30


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is up, with the basin of the benchmark."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss) / MIB


@contextmanager
def serving(backend: str, streams: Iterable[str], folder: Path) -> Iterator[Served]:
    """A server with these streams; its log, and records that are not in memory, are below `folder`."""
    resources, log = folder / "resources.json", folder / "server.log"
    resources.write_text(json.dumps(_resources(streams)))
    command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--json", "--host=127.0.0.1"]
    command += ["--port=0", f"--init-file={resources}", *_storage(backend, folder)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    with server:
        try:
            yield Served(server.pid, _port(server, log))
            server.send_signal(signal.SIGTERM)
            server.wait(_STOP_TIMEOUT)
        finally:
            server.kill()
    if server.returncode:
        raise RuntimeError(f"the server ended with {server.returncode}: {_last_words(log)}")


def _resources(streams: Iterable[str]) -> dict[str, object]:
    return {"basins": [{"name": BASIN, "streams": [{"name": stream} for stream in streams]}]}


def _storage(backend: str, folder: Path) -> list[str]:
    if backend == "memory":
        return []
    return [f"--local-root={folder / 'served'}", *["--no-fsync"] * (backend == "local")]


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    line = server.stdout.readline() if server.stdout else b""
    if not line:
        raise RuntimeError(f"the server did not start: {_last_words(log)}")
    return int(json.loads(line)["port"])


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
