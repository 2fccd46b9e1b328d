"""Runs proofs one after the other, whatever the ones before have shown."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.prove.proofs import Proof
from tests.prove.results import Figures, NoReportError, ProofResult, read_report

ROOT = Path(__file__).parents[2]
#: Lines of its output that are shown of a proof that did not hold: usually the seed and the steps.
_TAIL_LINES = 40


def run_proofs(
    proofs: Sequence[Proof], folder: Path, seed: int | None, short: bool
) -> Iterator[ProofResult]:
    """Run each proof with a fresh seed, or with this one, and keep its output in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for proof in proofs:
        chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        yield _run(proof, folder, chosen, short)


def _run(proof: Proof, folder: Path, seed: int, short: bool) -> ProofResult:
    command = proof.command(seed, short)
    missing = [program for program in proof.needs if shutil.which(program) is None]
    if missing:
        names = " and ".join(missing)
        return _result(proof, command, f"not run: {names} not installed")
    log, report = folder / f"{proof.name}.log", folder / f"{proof.name}.report"
    report.unlink(missing_ok=True)
    print(f"{proof.name}, seed {seed}: {command}\n  output in {log}", flush=True)
    started = time.monotonic()
    with log.open("wb") as output:
        status = subprocess.run(
            proof.arguments(seed, short, report),
            cwd=ROOT,
            env={**os.environ, **proof.environment(seed, short)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    seconds = time.monotonic() - started
    violations, figures, failure = _judge(report, status)
    result = _result(proof, command, failure, violations, seconds, figures)
    if not result.held:
        print(
            "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]), file=sys.stderr
        )
    return result


def _judge(report: Path, status: int) -> tuple[int | None, Figures, str]:
    """A proof holds only if its report says so and its exit status agrees."""
    try:
        violations, figures = read_report(report)
    except NoReportError as error:
        return None, {}, f"failed: {error}, exit status {status}"
    if status != 0 and violations == 0:
        return violations, figures, f"failed: exit status {status}"
    return violations, figures, ""


def _result(
    proof: Proof,
    command: str,
    failure: str,
    violations: int | None = None,
    seconds: float = 0.0,
    figures: Figures | None = None,
) -> ProofResult:
    return ProofResult(
        proof=proof.name,
        violations=violations,
        seconds=round(seconds, 1),
        figures=figures or {},
        command=command,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        commit=_commit(),
        cores=os.cpu_count() or 1,
        failure=failure,
    )


def _commit() -> str:
    """Return the commit that is checked out, and whether its files were changed."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
