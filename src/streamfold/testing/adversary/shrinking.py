"""Makes a failing program smaller, as long as it still fails.

Machines decide when things happen, so a program that fails may pass the next time: each candidate runs
a few times, and one failure is enough. What is left is small, not the smallest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from streamfold.testing.adversary.campaign import Campaign
from streamfold.testing.adversary.ledger import BrokenPromiseError
from streamfold.testing.adversary.program import Program
from streamfold.testing.adversary.report import script


@dataclass(frozen=True, slots=True)
class Failure:
    """A program that failed, and the script of that run."""

    program: Program
    violation: BrokenPromiseError
    script: str


async def attack(program: Program, folder: Path, environment: Mapping[str, str]) -> Failure | None:
    """Run a program once, in a folder of its own; None if no promise was broken."""
    campaign = Campaign(program, folder, environment)
    try:
        await campaign.run()
    except BrokenPromiseError as violation:
        return Failure(program, violation, script(campaign.ledger, violation, program.seed))
    return None


@dataclass
class Shrinker:
    """Searches for a smaller failing program, within a number of runs and of seconds."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: int = 60
    seconds: float = 600.0
    #: How often one candidate is tried.
    repeats: int = 2
    progress: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._runs = 0

    async def shrink(self, failure: Failure) -> Failure:
        """The smallest failure that was found."""
        while smaller := await self._smaller(failure):
            failure = smaller
            self.progress(f"still fails: {failure.program}")
        return failure

    async def _smaller(self, failure: Failure) -> Failure | None:
        for candidate in failure.program.smaller():
            for _ in range(self.repeats):
                if self._runs >= self.runs or time.monotonic() > self._deadline:
                    return None
                self._runs += 1
                folder = self.folder / f"shrinking-{self._runs}"
                found = await attack(candidate, folder, self.environment)
                shutil.rmtree(folder, ignore_errors=True)
                if found is not None:
                    return found
        return None
