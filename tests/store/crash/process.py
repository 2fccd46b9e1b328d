"""A writer in a process of its own, as its parent sees it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from tests.store.crash.ledger import Event

#: Seconds after which a silent writer counts as hung.
_TIMEOUT = 120.0
#: Bytes that a line may have.
_LINE_BYTES = 1 << 20

_events = msgspec.json.Decoder(Event)


class WriterProcess:
    """Start one with `start`; then take its events, and kill it or let it end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._lines = process.stdout
        self._errors = asyncio.create_task(process.stderr.read())

    @classmethod
    async def start(
        cls, url: str, run: str, seed: int, ledger: Path | None = None
    ) -> WriterProcess:
        """Without a ledger the writer compares nothing, and writes at once."""
        module = "tests.store.crash.writer"
        arguments = (url, run, str(seed), str(ledger or ""))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        return cls(process)

    async def event(self) -> Event | None:
        """The next event that it reported; None at its end. An unfinished line does not count."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                line = await self._lines.readuntil()
        except asyncio.IncompleteReadError:
            return None
        event: Event = _events.decode(line)
        return event

    def kill(self) -> None:
        """Kill it as `kill -9` does; what it reported before can still be read."""
        self._process.kill()

    async def end(self) -> tuple[int, str]:
        """Its exit code and what it wrote to standard error, once it has ended."""
        errors = await self._errors
        return await self._process.wait(), errors.decode()
