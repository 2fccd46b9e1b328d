"""Runs `streamfold serve` in a process of its own, as a user does."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(*options: str) -> Iterator[dict[str, str]]:
    """A server on a free port; yields the variables that it prints for clients."""
    command = [sys.executable, "-m", "streamfold.cli.main", "serve", "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _exports(server)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
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
