"""Starts, kills, stops and pauses server processes."""

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
from streamfold.testing.adversary.machine.faulty_disk import DiskFault

_SERVING = Path(__file__).parent / "machine" / "serving.py"
#: Maximum seconds for a start and a stop on a busy machine.
_START, _STOP = 120.0, 60.0


#: Exit statuses of a server whose disk failed: its own, and that of a concurrent stop.
_FAILED = (1, -signal.SIGTERM)
#: Exit status of a server that lost its store to another.
_REPLACED = 8


def _last_line(log: Path) -> str:
    """Return the last line of a server's log, which tells why it stopped."""
    lines = log.read_bytes()[-4096:].decode(errors="replace").splitlines()
    return lines[-1][:400] if lines else ""


class StartFailedError(Exception):
    """Raised if a server exits before answering. `replaced`: because another one took over."""

    def __init__(self, text: str, *, replaced: bool = False) -> None:
        super().__init__(text)
        self.replaced = replaced


def small_settings(dice: random.Random) -> dict[str, Any]:
    """Return settings under which streams leave memory and background work never ends."""
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
    #: Whether its power can be cut.
    powered: bool = False
    #: Whether its device failed, so that it may have stopped by itself.
    device_failed: bool = False

    @classmethod
    async def start(
        cls,
        location: str,
        settings: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str],
        *,
        take_over: bool = False,
        clock: float = 0,
        disk: Mapping[str, Any] | None = None,
    ) -> ServerProcess:
        """Start a server and wait until it answers. Raises StartFailedError if it never does.

        `clock`: seconds by which its system clock is ahead. `disk`: settings of a faulty disk.
        """
        arguments = {
            "location": location,
            "store": dict(settings),
            "take_over": take_over,
            "clock": clock,
            "disk": disk,
        }
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_SERVING), json.dumps(arguments)),
                stdin=PIPE,
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
            last = await asyncio.to_thread(_last_line, log)
            text = f"a server does not start, status {status}: see {log}, which ends with {last!r}"
            raise StartFailedError(text, replaced=status == _REPLACED)
        powered = disk is not None and disk["spare"] is not None
        return cls(process, json.loads(line)["port"], log, powered)

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send an order, unless the server has exited."""
        # A device error during a sync or in a chunk file ends the server.
        self.device_failed |= order.get("fault") in (DiskFault.SYNC_FAILS, DiskFault.FAILING)
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def cut_power(self, image: Path, seed: float) -> None:
        """Cut the machine's power. `image` receives the remaining files."""
        self.resume()
        self.tell({"cut_power": str(image), "seed": seed})
        async with asyncio.timeout(_STOP):
            status = await self.process.wait()
        if status:
            raise StartFailedError(f"a power cut failed, status {status}: see {self.log}")

    async def kill(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> None:
        """Stop the process gracefully."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP):
                status = await self.process.wait()
        except TimeoutError:
            await self.kill()
            raise BrokenPromiseError(None, f"a server does not stop: see {self.log}") from None
        if status not in (0, _REPLACED) and not (status in _FAILED and self.device_failed):
            raise BrokenPromiseError(None, f"a server stops with status {status}: see {self.log}")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        # Not `Process.send_signal`, which reaps a process that has just ended, so that waiters
        # would miss its status.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
