"""The command line as people and scripts run it: a process, its output and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.cli import forking

#: Starts the command line; arguments follow.
COMMAND = forking.COMMAND


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()

    @property
    def objects(self) -> list[Any]:
        """The JSON lines on standard output."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def error(self) -> Any:
        """The failure that --json printed."""
        return json.loads(self.stderr)["error"]


class Shell:
    """Runs verbs against one server."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        # The file of the person who runs the tests must not matter.
        own = {"STREAMFOLD_CONFIG": "/nonexistent/config.toml"}
        self.environment = {**os.environ, **own, **variables}

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Run a verb to its end, whatever that is."""
        done = forking.COMMANDS.run(arguments, self.environment, stdin)
        stderr = done.stderr.decode()
        assert "Traceback" not in stderr, stderr
        return Outcome(done.returncode, done.stdout, stderr)

    def ok(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Run a verb that must succeed."""
        outcome = self(*arguments, stdin=stdin)
        assert outcome.status == 0, outcome.stderr
        return outcome

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """The one JSON object that a verb prints, which must succeed."""
        (found,) = self.ok(*arguments, "--json", stdin=stdin).objects
        return found

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[Process]:
        """A verb that runs until it is stopped."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=self.environment
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


def read_terminal(terminal: int) -> bytes:
    """Everything that is shown at a terminal until all processes have closed their end; closes ours."""
    shown = b""
    with suppress(OSError):  # how the system says that the other end is closed
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    return shown


async def line_of(process: Process) -> str:
    """The next line on standard output."""
    assert process.stdout is not None
    async with asyncio.timeout(120):
        return (await process.stdout.readline()).decode()


async def ending_of(process: Process) -> Outcome:
    """How a process ends, with what it printed since it was last looked at."""
    async with asyncio.timeout(120):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Outcome(process.returncode, stdout, stderr.decode())
