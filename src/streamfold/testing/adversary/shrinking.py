"""Shrinks a failing program while it still fails.

Timing varies, so a failing program may pass the next time. Each candidate runs a few times, and one
failure is enough. The result is small, but not necessarily minimal.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamfold.testing.adversary.campaign import Campaign
from streamfold.testing.adversary.ledger import BrokenPromiseError, Ledger
from streamfold.testing.adversary.program import Program

#: Maximum lines of a script. The oldest are dropped, except those about the affected appends.
_LINES = 120


def script(ledger: Ledger, violation: BrokenPromiseError, seed: int) -> str:
    """Return the steps before a violation, of the affected stream, servers and storage."""
    history = violation.history
    lines = list(ledger.events)
    affected: set[str] = set()
    if history is not None:
        for life in history.lives:
            for ancestor in life.ancestors():
                lines += ancestor.history.lines if ancestor.history is not history else []
        lines += history.lines
        affected = set(re.findall(r"append \d+|snapshot \d+", str(violation)))
    lines = sorted(set(lines))
    named = [line for line in lines if any(re.search(rf"\b{name}\b", line[1]) for name in affected)]
    recent = lines[-_LINES:]
    shown = sorted(set(named) | set(recent))
    where = f" (stream {history})" if history is not None else ""
    head = [
        f"VIOLATION{where}: {violation}",
        f"seed {seed}, after {ledger.totals}",
        f"{len(lines)} steps concern it, {len(shown)} are shown; * names it:",
    ]
    marked = set(named)
    return "\n".join(
        [*head, *(f"{'*' if line in marked else ' '} t{line[0]}: {line[1]}" for line in shown)]
    )


@dataclass(frozen=True, slots=True)
class FailingProgram:
    """A failed program and the script of its run."""

    program: Program
    violation: BrokenPromiseError
    script: str


async def attack(
    program: Program, folder: Path, environment: Mapping[str, str]
) -> FailingProgram | None:
    """Run a program once in its own folder. Returns None if it found no violation."""
    campaign = Campaign(program, folder, environment)
    try:
        await campaign.run()
    except BrokenPromiseError as violation:
        return FailingProgram(program, violation, script(campaign.ledger, violation, program.seed))
    return None


@dataclass
class Shrinker:
    """Searches for a smaller failing program within limits of runs and seconds."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: int = 60
    seconds: float = 600.0
    #: Runs per candidate.
    repeats: int = 2
    progress: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._runs = 0

    async def shrink(self, failure: FailingProgram) -> FailingProgram:
        """Return the smallest failure found."""
        while smaller := await self._smaller(failure):
            failure = smaller
            self.progress(f"still fails: {failure.program}")
        return failure

    async def _smaller(self, failure: FailingProgram) -> FailingProgram | None:
        for candidate in failure.program.smaller():
            for _ in range(self.repeats):
                if self._runs >= self.runs or time.monotonic() > self._deadline:
                    return None
                self._runs += 1
                folder = self.folder / f"shrinking-{self._runs}"
                failing = await attack(candidate, folder, self.environment)
                shutil.rmtree(folder, ignore_errors=True)
                if failing is not None:
                    return failing
        return None
