"""Collect histories of a server under faults and judge them, or judge histories that were kept.

python -m streamfold.testing.linearizability run --seed 7 --operations 20000
python -m streamfold.testing.linearizability check HISTORY.jsonl.gz ...
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from streamfold.errors import InvalidError
from streamfold.testing.adversary.storage import FlakyBucket, LocalFolder, Storage
from streamfold.testing.linearizability.campaign import (
    LinearizabilityRun,
    NotLinearizableError,
    RunFigures,
)
from streamfold.testing.linearizability.contradiction import report
from streamfold.testing.linearizability.history import (
    OperationHistory,
    read_history,
    write_history,
)
from streamfold.testing.linearizability.log_order import Judgement, Verdict, check
from streamfold.testing.linearizability.porcupine import Porcupine, SecondJudge
from streamfold.testing.proof_report import ProofReport


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m streamfold.testing.linearizability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="attack a server, and judge what its clients were told")
    run.add_argument("--seed", type=int, help="default: a fresh one, which is printed")
    run.add_argument("--operations", type=int, default=20_000)
    run.add_argument("--streams", type=int, default=12, help="in use at once")
    run.add_argument("--stream-operations", type=int, default=400, help="on each, on average")
    run.add_argument("--seconds", type=float, default=4.0, help="between faults, at most")
    run.add_argument("--minutes", type=float, default=math.inf, help="after which it ends early")
    run.add_argument("--storage", choices=["local", "s3"], default="local")
    run.add_argument("--folder", type=Path, help="kept afterwards; a temporary one by default")
    run.add_argument("--histories", type=Path, help="folder that keeps all histories, compressed")
    run.add_argument("--source", help="folder with another version of the package streamfold")
    ProofReport.add_option(run)
    look = commands.add_parser("check", help="judge histories in the form of s2-verification")
    look.add_argument("histories", nargs="+", type=Path, metavar="HISTORY")
    for command in (run, look):
        command.add_argument(
            "--porcupine",
            type=float,
            default=0.0,
            metavar="PART",
            help="the part of all histories that s2-porcupine judges as well, 0 to 1",
        )
    arguments = parser.parse_args()
    try:
        sys.exit(_run(arguments) if arguments.command == "run" else _check(arguments))
    except InvalidError as error:
        parser.error(error.message)


def _run(arguments: argparse.Namespace) -> int:
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # logs a line for each broken connection
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="streamfold-linearizability-"))
    second = _second_judge(arguments.porcupine, seed, folder)
    storage: Storage = FlakyBucket() if arguments.storage == "s3" else LocalFolder(folder / "store")
    if arguments.histories is not None:
        arguments.histories.mkdir(parents=True, exist_ok=True)
    reporter = ProofReport(f"linearizability-{arguments.storage}", arguments.report)
    started = time.monotonic()

    def progress(figures: RunFigures) -> None:
        print(f"… {time.monotonic() - started:.0f} s: {figures}", file=sys.stderr, flush=True)

    def judged(history: OperationHistory, verdict: Verdict) -> None:
        if arguments.histories is not None:
            write_history(history, arguments.histories / f"{history.name}.jsonl.gz")
        if second is not None:
            second.keep(history, verdict)

    campaign = LinearizabilityRun(
        seed,
        folder,
        storage,
        arguments.operations,
        arguments.streams,
        arguments.stream_operations,
        arguments.seconds,
        60 * arguments.minutes,
        {"PYTHONPATH": arguments.source} if arguments.source else {},
        judged,
        progress,
    )
    violations = []
    try:
        uvloop.run(_until_ended(campaign))
    except NotLinearizableError as error:
        write_history(error.history, folder / "violation.jsonl")
        violations.append(report(error.history, error.contradiction))
    served = time.monotonic() - started
    if second is not None:
        second.judge()
        violations += [
            f"s2-porcupine finds {path} not linearizable" for path in second.disagreements
        ]
    figures = {name.replace("_", " "): value for name, value in vars(campaign.figures).items()}
    del figures["violations"]
    figures |= second.figures() if second is not None else {}
    seconds = time.monotonic() - started
    reporter.write(len(violations), figures)
    summary = ", ".join(f"{name} {value}" for name, value in figures.items())
    if violations:
        print(f"VIOLATION with seed {seed}, after {served:.0f} s: {summary}")
        print("\n".join(violations))
        print(f"The store, the history and the log of the servers are in {folder}.")
        return 1
    print(f"seed {seed}: no violation in {seconds:.0f} s: {summary}")
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _second_judge(part: float, seed: int, folder: Path) -> SecondJudge | None:
    if not part:
        return None
    histories = folder / "histories"
    histories.mkdir(parents=True, exist_ok=True)
    return SecondJudge(Porcupine.find(folder), part, random.Random(seed), histories)


async def _until_ended(campaign: LinearizabilityRun) -> RunFigures:
    task = asyncio.current_task()
    assert task is not None
    # On SIGTERM, cancel the run so that it still ends its servers.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await campaign.run()


def _check(arguments: argparse.Namespace) -> int:
    """Judge history files and print a line for each."""
    with tempfile.TemporaryDirectory(prefix="streamfold-linearizability-") as folder:
        second = _second_judge(arguments.porcupine, 0, Path(folder))
        judgements = [_check_file(path, second) for path in _files(arguments.histories)]
    for judgement in Judgement:
        print(f"{judgement}: {judgements.count(judgement)}")
    return int(Judgement.VIOLATION in judgements)


def _files(paths: Sequence[Path]) -> list[Path]:
    """Expand folders into the history files they contain."""
    return [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl*")) if path.is_dir() else [path])
    ]


def _check_file(path: Path, second: SecondJudge | None) -> Judgement:
    history = read_history(path)
    verdict = check(history)
    judgement = verdict.judgement
    print(f"{path}: {len(history.operations)} operations, {judgement}")
    if verdict.contradiction is not None:
        print(report(history, verdict.contradiction))
    if second is not None:
        second.keep(history, verdict)
        second.judge()
        if second.disagreements:
            print(f"{path}: s2-porcupine finds it not linearizable")
            second.disagreements.clear()
            return Judgement.VIOLATION
    return judgement


if __name__ == "__main__":
    main()
