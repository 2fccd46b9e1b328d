"""A process that has imported the command line, and forks a process for each command.

Every command has its own process, environment, working folder and standard streams, as a shell gives
it; only the imports, most of a command's processor time, are shared. Forking is safe: no thread runs
there but Python's and that of Arrow's allocator, which expects forks.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

COMMAND = (sys.executable, "-m", "streamfold.cli.main")
_REPOSITORY = Path(__file__).parents[2]
#: Where an interpreter looks for modules, which it reads when it starts.
_SEARCH = "PYTHONPATH"
_SEARCHED = os.environ.get(_SEARCH)
#: Seconds for a command, far above what any takes.
TIMEOUT = 300.0
#: Imported once: what commands import when they run.
_PREPARED = ("s2_sdk", "httpx", "pyarrow.csv", "pyarrow.parquet", "streamfold.archive.engines.sql")
#: Streams of a command, its description, and where its exit status goes.
_DESCRIPTORS = 5


class Commands:
    """Starts commands; used from any thread."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._connection: socket.socket | None = None

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end; in a new interpreter if it finds its modules elsewhere."""
        if environment.get(_SEARCH) != _SEARCHED:
            return subprocess.run(
                [*COMMAND, *arguments],
                input=stdin,
                capture_output=True,
                env=environment,
                cwd=folder,
                timeout=TIMEOUT,
                check=False,
            )
        described = {
            "arguments": arguments,
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        sent, written = os.pipe()
        shown, out = os.pipe()
        failed, err = os.pipe()
        ended, reported = socket.socketpair()
        request = os.memfd_create("command")
        os.write(request, json.dumps(described).encode())
        passed = (sent, out, err, request, reported.fileno())
        socket.send_fds(self._prepared(environment), [b"run"], passed)
        for descriptor in passed[:4]:
            os.close(descriptor)
        reported.close()
        output = _Reader(shown), _Reader(failed)
        feeding = threading.Thread(target=_write, args=(written, stdin))
        feeding.start()
        with ended:
            ended.settimeout(TIMEOUT)
            status = ended.recv(16)
        feeding.join()
        assert status, "the process that forks commands has ended"
        return subprocess.CompletedProcess(
            arguments, int(status), *(each.read() for each in output)
        )

    def _prepared(self, environment: Mapping[str, str]) -> socket.socket:
        with self._starting:
            if self._connection is None:
                self._connection, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with served:
                    process = subprocess.Popen(
                        [sys.executable, "-m", __name__, str(served.fileno())],
                        pass_fds=[served.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env=environment,
                        cwd=_REPOSITORY,
                    )
                atexit.register(_end, self._connection, process)
            return self._connection


#: Shared by all tests of a process.
COMMANDS = Commands()


class _Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._file: IO[bytes] = os.fdopen(descriptor, "rb")
        self._found = b""
        self.start()

    def run(self) -> None:
        with self._file:
            self._found = self._file.read()

    def read(self) -> bytes:
        self.join()
        return self._found


def _write(descriptor: int, content: bytes) -> None:
    with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait(TIMEOUT)


def serve(connection: socket.socket) -> list[str] | None:
    """Fork for each request; returns the arguments in the process of a command, else None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects those that wait
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 16, _DESCRIPTORS)
        if not message:
            return None
        if os.fork() == 0:
            connection.close()
            return _become(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(stdin: int, stdout: int, stderr: int, request: int, reported: int) -> list[str]:
    """Fork once more: one process becomes the command, and the other reports its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        for descriptor in (stdin, stdout, stderr, request):
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        os.write(reported, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(reported)
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.lseek(request, 0, os.SEEK_SET)
    with os.fdopen(request, "rb") as file:
        described = json.load(file)
    os.environ.clear()
    os.environ.update(described["environment"])
    os.chdir(described["folder"])
    arguments: list[str] = described["arguments"]
    return arguments


if __name__ == "__main__":
    from importlib import import_module
    from pkgutil import walk_packages

    import streamfold.cli
    from streamfold.cli.main import main

    for module in walk_packages(streamfold.cli.__path__, "streamfold.cli."):
        import_module(module.name)
    for name in _PREPARED:
        import_module(name)
    gc.freeze()  # so that no command visits what was imported
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        sys.argv = ["streamfold", *command]
        main()
