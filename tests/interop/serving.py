"""Runs `streamfold serve`, and programs on uvicorn, in processes of their own, as a user does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(*options: str) -> Iterator[dict[str, str]]:
    """A server on a free port; yields the variables that it prints for clients."""
    command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _exports(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=120) == 0
    finally:
        server.kill()
        server.wait()
        if server.stdout:
            server.stdout.close()


def _exports(server: subprocess.Popen[str]) -> dict[str, str]:
    exports: dict[str, str] = {}
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            exports[name] = value
        if len(exports) == 3:
            return exports
    raise AssertionError(f"the server ended with {server.wait()} before it served")


class UvicornProcess:
    """A program on uvicorn that listens. It logs to a file: a pipe that nobody reads would stop it."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._process = subprocess.Popen(command, stderr=self._log, **options)
        deadline = time.monotonic() + 120
        while b"Uvicorn running" not in (log := self._logged()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it does not serve: {log.decode()}")
            time.sleep(0.02)

    def _logged(self) -> bytes:
        return os.pread(self._log.fileno(), 1 << 20, 0)  # the program's own place stays

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
