"""Attack a server: python -m streamfold.testing.adversary --seed 7 --rounds 100 --storage local"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from streamfold.errors import InvalidError
from streamfold.testing.adversary.campaign import Campaign
from streamfold.testing.adversary.ledger import Breach, BrokenPromiseError, Totals
from streamfold.testing.adversary.program import FAULTS, OPERATIONS, Program
from streamfold.testing.adversary.shrinking import FailingProgram, Shrinker, script
from streamfold.testing.proof_report import ProofReport

T = TypeVar("T")
#: Runs of a replayed program, because it fails only sometimes.
_REPLAYS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m streamfold.testing.adversary", description=__doc__
    )
    parser.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ends", type=int, default=0, help="kills and stops to go on for")
    parser.add_argument("--acks", type=int, default=0, help="acknowledged records to go on for")
    parser.add_argument("--storage", choices=["local", "s3"], default="local")
    parser.add_argument("--folder", type=Path, help="kept afterwards; a temporary one by default")
    parser.add_argument("--workers", type=int, default=16, help="clients at work at once")
    parser.add_argument("--seconds", type=float, default=1.5, help="of work in one round")
    parser.add_argument("--source", help="folder with another version of the package streamfold")
    parser.add_argument("--operations", help=f"some of: {', '.join(OPERATIONS)}")
    parser.add_argument("--faults", help=f"some of: {', '.join(FAULTS)}; '' for none")
    parser.add_argument("--shrink", type=float, default=0, metavar="SECONDS", help=_SHRINK)
    parser.add_argument("--replay", type=Path, metavar="FILE", help=_REPLAY)
    ProofReport.add_option(parser)
    arguments = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # logs a line for each broken connection
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="streamfold-adversary-"))
    try:
        run = _Run(_program(arguments), folder, arguments)
    except InvalidError as error:
        parser.error(error.message)
    failed = run.attack()
    if failed:
        print(f"the store and the log are in {folder}")
        sys.exit(1)
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


_SHRINK = "after a violation, look for a smaller program that fails too, for so long"
_REPLAY = f"run the program in this file, up to {_REPLAYS} times, until it fails"


def _program(arguments: argparse.Namespace) -> Program:
    if arguments.replay is not None:
        return Program.read(arguments.replay)
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    program = Program(
        seed,
        arguments.rounds,
        arguments.ends,
        arguments.acks,
        arguments.storage,
        arguments.workers,
        seconds=arguments.seconds,
    )
    for name in ("operations", "faults"):
        names = getattr(arguments, name)
        if names is not None:
            chosen = tuple(part.strip() for part in names.split(",") if part.strip())
            program = program.having(**{name: chosen})
    return program


class _Run:
    """One call of the command."""

    def __init__(self, program: Program, folder: Path, arguments: argparse.Namespace) -> None:
        self._program, self._folder, self._arguments = program, folder, arguments
        self._environment = {"PYTHONPATH": arguments.source} if arguments.source else {}
        self._started = time.monotonic()
        self._report = ProofReport(f"adversary-{program.storage}", arguments.report)

    def attack(self) -> bool:
        """Run the attack. Returns whether a promise was broken."""
        print(f"seed {self._program.seed}", flush=True)
        for number in range(_REPLAYS if self._arguments.replay else 1):
            folder = self._folder / f"run-{number}" if self._arguments.replay else self._folder
            campaign = Campaign(self._program, folder, self._environment, self._progress)
            try:
                totals = _run(campaign.run())
            except BrokenPromiseError as violation:
                self._write_report(campaign.ledger.totals, violation)
                self._explain(campaign, violation)
                return True
            self._write_report(totals, None)
            print(f"seed {self._program.seed}: no violation in {self._passed()}: {totals}")
        return False

    def _passed(self) -> str:
        return f"{time.monotonic() - self._started:.0f} s"

    def _progress(self, totals: Totals) -> None:
        print(f"… {self._passed()}: {totals}", file=sys.stderr, flush=True)

    def _explain(self, campaign: Campaign, violation: BrokenPromiseError) -> None:
        text = script(campaign.ledger, violation, self._program.seed)
        print(f"{text}\nafter {self._passed()}", flush=True)
        failed_in = self._program.having(rounds=campaign.ledger.totals.rounds + 1, ends=0, acks=0)
        failure = FailingProgram(failed_in, violation, text)
        if self._arguments.shrink:
            shrinker = Shrinker(
                self._folder,
                self._environment,
                seconds=self._arguments.shrink,
                progress=lambda text: print(f"… {text}", file=sys.stderr, flush=True),
            )
            failure = _run(shrinker.shrink(failure))
            print(f"\nA small program that fails, after {self._passed()}: {failure.program}")
            print(failure.script)
        path = self._folder / "program.json"
        failure.program.write(path)
        print(
            f"python -m streamfold.testing.adversary --replay {path} runs it again; it may take "
            "several runs to fail, because machines decide when things happen"
        )

    def _write_report(self, totals: Totals, violation: BrokenPromiseError | None) -> None:
        broken = violation.breach if violation is not None else None
        figures = {name.replace("_", " "): value for name, value in vars(totals).items()}
        breaches = {str(breach): int(breach is broken) for breach in Breach}
        self._report.write(int(violation is not None), {**figures, **breaches})


def _run(work: Coroutine[Any, Any, T]) -> T:
    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        # If terminated from outside, it must still stop its servers.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(run())


if __name__ == "__main__":
    main()
