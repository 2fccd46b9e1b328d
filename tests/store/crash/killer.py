"""The parent process: starts and kills writers, and records what they reported."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.store.crash.ledger import Event, Ledger, Stored, Verified
from tests.store.crash.process import WriterProcess

#: Share of the kills that hit the start of the process, its opening of the store or its comparison.
_EARLY = 0.2
#: Seconds from the start of a process within which an early kill falls.
_EARLY_WITHIN = 1.5


class WriterFailedError(AssertionError):
    """The writer ended on its own: it found something wrong, or could not open the store."""


@dataclass(slots=True)
class Summary:
    """What a series of kills has shown so far."""

    seed: int
    kills: int = 0
    kills_before_ack: int = 0
    acked_batches: int = 0
    acked_records: int = 0
    unknown_batches: int = 0
    unknown_found: int = 0
    verifications: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kills} kills (seed {self.seed}, {self.kills_before_ack} of them before the "
            f"first ack): {self.acked_records} records in {self.acked_batches} batches "
            f"acknowledged, none lost, doubled, changed or reordered in {self.verifications} "
            f"comparisons; of {self.unknown_batches} batches that were on their way, "
            f"{self.unknown_found} were there as a whole and the others not at all; "
            f"{self.seconds:.0f} s"
        )

    def figures(self) -> dict[str, int | float]:
        return {
            "kills": self.kills,
            "acknowledged records": self.acked_records,
            "batches of unknown outcome": self.unknown_batches,
            "comparisons": self.verifications,
        }


class Killer:
    """A series of kills on one folder, the same for the same seed but for the timing of machines."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._dice = random.Random(seed)
        self._ledger = Ledger()
        self.summary = Summary(seed)

    async def run(self, kills: int, progress: Callable[[Summary], None] | None = None) -> Summary:
        """Kill so many times, then let one writer compare what is left."""
        started = time.monotonic()
        while self.summary.kills < kills:
            early = self._dice.random() < _EARLY
            max_wait = self._dice.random() * _EARLY_WITHIN if early else None
            acks = self._dice.choice([1, 10, 100, 500]) * self._dice.random()
            await self._start_and_kill(1 + int(acks), max_wait)
            self.summary.kills += 1
            self.summary.seconds = time.monotonic() - started
            if progress:
                progress(self.summary)
        await self._start_and_kill(0, None)
        return self.summary

    async def _start_and_kill(self, acks: int, max_wait: float | None) -> None:
        """Start a writer, and kill it after its comparison and `acks` acks, or after `max_wait`."""
        ledger = self._folder / "ledger.json"
        ledger.write_bytes(msgspec.json.encode(self._ledger))
        url = (self._folder / "store").as_uri()
        run, seed = f"run{self.summary.kills}", self.summary.seed
        writer = await WriterProcess.start(url, run, seed, ledger)
        heard = _Heard()
        try:
            async with asyncio.timeout(max_wait):
                while not heard.enough(acks):
                    if (event := await writer.event()) is None:
                        _, errors = await writer.end()
                        raise WriterFailedError(f"seed {seed}, {run}, {self._folder}:\n{errors}")
                    self._take(event, heard)
        except TimeoutError:
            pass
        await asyncio.sleep(self._dice.random() * 0.02)  # so that the kill hits any moment
        writer.kill()
        while event := await writer.event():  # what it reported before it died counts
            self._take(event, heard)
        await writer.end()
        self.summary.kills_before_ack += acks > 0 and not heard.acks

    def _take(self, event: Event, heard: _Heard) -> None:
        if isinstance(event, Stored):
            if event.acknowledged:
                heard.acks += 1
                self.summary.acked_batches += 1
                self.summary.acked_records += event.end - event.start
            else:
                self.summary.unknown_found += 1
                self.summary.unknown_batches += 1
        if isinstance(event, Verified):
            heard.verified = True
            self.summary.verifications += 1
            self.summary.unknown_batches += sum(1 for _ in self._ledger.unsettled())
        self._ledger.apply(event)


@dataclass(slots=True)
class _Heard:
    """What one writer reported."""

    verified: bool = False
    acks: int = 0

    def enough(self, acks: int) -> bool:
        return self.verified and self.acks >= acks
