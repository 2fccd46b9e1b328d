"""Server processes: start, kill, stop, pause."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamfold.testing.adversary.ledger import BrokenPromiseError

_SERVING = Path(__file__).with_name("serving.py")
#: Seconds that a start or a stop may take on a busy machine.
_START, _STOP = 120.0, 60.0


#: The status of a server that lost its store to another.
_REPLACED = 8


class StartFailedError(Exception):
    """A server ended before it answered."""


def small_settings(dice: random.Random) -> dict[str, Any]:
    """Settings with which streams leave memory and the background work is never done."""
    return {
        "idle_streams": dice.choice([1, 4, 16, 1000]),
        "recent_bytes": dice.choice([0, 4096, 64 << 20]),
        "upkeep_interval": dice.choice([0.2, 1.0, 60.0]),
        "trim_grace": dice.choice([0.0, 0.3]),
        "reclaim_after": dice.choice([1.0, 5.0, 600.0]),
        "chunk_file_bytes": dice.choice([2048, 1 << 17, 1 << 20]),
        "commits_in_flight": dice.choice([1, 2, 2]),
        "commit_timeout": dice.choice([2.0, 5.0]),
    }


@dataclass
class ServerProcess:
    """A server under attack."""

    process: Process
    port: int
    log: Path

    @classmethod
    async def start(
        cls,
        location: str,
        settings: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str],
        *,
        kernels: bool = False,
        take_over: bool = False,
    ) -> ServerProcess:
        """Start a server, and return once it answers; StartFailedError if it never does."""
        arguments = {
            "location": location,
            "store": dict(settings),
            "kernels": kernels,
            "take_over": take_over,
        }
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_SERVING), json.dumps(arguments)),
                stdout=PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            if process.returncode is None:
                process.kill()
            status = await process.wait()
            raise StartFailedError(f"a server does not start, status {status}: see {log}")
        return cls(process, json.loads(line)["port"], log)

    async def kill(self) -> None:
        """End the process at once."""
        self._signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> None:
        """Ask the process to stop, and wait until it has drained."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP):
                status = await self.process.wait()
        except TimeoutError:
            await self.kill()
            raise BrokenPromiseError(None, f"a server does not stop: see {self.log}") from None
        if status not in (0, _REPLACED):
            raise BrokenPromiseError(None, f"a server stops with status {status}: see {self.log}")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # Not `Process.send_signal`, which takes the status of a process that has just ended away from
        # those who wait for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
