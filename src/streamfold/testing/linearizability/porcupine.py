"""S2's public checker, `s2-porcupine`, which judges the same histories with an independent model.

It searches orders of operations. An unanswered append may take effect at any later time, and a few
dozen of them make the search intractable. Our checker's verdict settles the outcome of each, and
`resolved` writes these outcomes into the history. That only makes the public checker's task
stricter: any order it then accepts is also an order of the original history.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamfold.errors import InvalidError
from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationResult,
    StreamOperation,
    write_history,
)
from streamfold.testing.linearizability.log_order import Judgement, Verdict

#: Names a checkout of https://github.com/s2-streamstore/s2-verification, absent from Go's proxy.
SOURCE = "S2_VERIFICATION_SOURCE"
#: Seconds for Go to fetch dependencies and compile the program.
_BUILD_SECONDS = 600
#: Seconds for the public checker to judge one history: the original, and the resolved one.
_ORIGINAL_SECONDS, _RESOLVED_SECONDS = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Porcupine:
    """The s2-porcupine program, once built."""

    program: Path

    @classmethod
    def find(cls, folder: Path, environment: Mapping[str, str] = os.environ) -> Porcupine:
        """Return s2-porcupine from PATH, or build it in `folder`. Raises if both fail."""
        installed = shutil.which("s2-porcupine", path=environment.get("PATH"))
        if installed is not None:
            return cls(Path(installed))
        source = environment.get(SOURCE)
        if not source:
            raise InvalidError(
                "s2-porcupine is not on PATH: install it (s2-verification, make install-go), or set "
                f"{SOURCE} to a checkout of https://github.com/s2-streamstore/s2-verification, from "
                "which Go builds it"
            )
        program = folder / "s2-porcupine"
        module = Path(source) / "golang" / "s2-porcupine"
        try:
            done = subprocess.run(
                ["go", "build", "-o", str(program.resolve()), "."],  # noqa: S607
                cwd=module,
                capture_output=True,
                text=True,
                timeout=_BUILD_SECONDS,
                env=dict(environment),
            )
        except OSError as error:
            raise InvalidError(f"Go cannot build {module}: {error}") from None
        if done.returncode:
            raise InvalidError(f"Go cannot build {module}: {done.stderr}")
        return cls(program)

    def judge(self, path: Path, seconds: float) -> Judgement:
        """Judge one file of JSON lines. Undecided after `seconds`."""
        # The program writes a visualization of each history into its working directory.
        with tempfile.TemporaryDirectory(prefix="streamfold-porcupine-") as folder:
            try:
                done = subprocess.run(
                    [self.program.resolve(), f"-file={path.resolve()}"],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=seconds,
                )
            except subprocess.TimeoutExpired:
                return Judgement.UNDECIDED
        if done.returncode == 0 and "is linearizable" in done.stderr:
            return Judgement.LINEARIZABLE
        if "NOT linearizable" in done.stderr:
            return Judgement.VIOLATION
        raise InvalidError(f"s2-porcupine cannot judge {path}: {done.stderr[-1000:]}")

    def judge_history(self, history: OperationHistory, seconds: float) -> Judgement:
        with tempfile.NamedTemporaryFile(prefix="streamfold-history-", suffix=".jsonl") as file:
            path = Path(file.name)
            write_history(history, path)
            return self.judge(path, seconds)


def resolved(history: OperationHistory, verdict: Verdict) -> OperationHistory:
    """Return the history without unknown outcomes, as settled by `verdict`.

    Each unanswered append in the log succeeds just before the first answer that proves it. The others
    fail after all events.
    """
    tails: dict[int, int] = {}
    tail = 0
    for append in verdict.log:
        tail += append.count
        tails[append.id] = tail
    shown = _shown_at(history, [(tails[op.id], op) for op in verdict.log if op.unknown])
    ending: dict[int, list[StreamOperation]] = {}
    for operation, position in shown:
        ending.setdefault(position, []).append(operation)
    result = OperationHistory(history.name)
    copies: dict[int, StreamOperation] = {}
    for position in range(len(history.events) + 1):
        for append in ending.get(position, ()):
            copies[append.id].tail = tails[append.id]
            result.end(copies[append.id], OperationResult.OK)
        if position == len(history.events):
            break
        operation = history.events[position]
        if operation.began == position:
            copy = replace(operation, began=len(result.events), ended=None)
            copies[operation.id] = copy
            result.operations.append(copy)
            result.events.append(copy)
        else:
            result.end(copies[operation.id], operation.result)
    for operation in history.operations:
        if operation.unknown and operation.id not in tails:
            result.end(copies[operation.id], OperationResult.REFUSED)
    return result


def _shown_at(
    history: OperationHistory, unknown: Iterable[tuple[int, StreamOperation]]
) -> list[tuple[StreamOperation, int]]:
    """Return, for each unanswered append, the position of the first answer whose tail includes it."""
    answers = sorted(
        (op.ended, op.tail)
        for op in history.operations
        if op.ended is not None and op.tail is not None
    )
    result = []
    for tail, append in unknown:
        ends = (ended for ended, told in answers if told >= tail)
        result.append((append, next(ends, len(history.events))))
    return result


@dataclass
class SecondJudge:
    """Runs the public checker on a sample of the histories that ours found linearizable."""

    porcupine: Porcupine
    part: float
    dice: random.Random
    folder: Path
    histories: int = 0
    operations: int = 0
    #: Histories decided only with the outcomes from our checker.
    resolved: int = 0
    undecided: int = 0
    disagreements: list[str] = field(default_factory=list)
    _sample: list[tuple[Path, Path, int]] = field(default_factory=list)

    def keep(self, history: OperationHistory, verdict: Verdict) -> None:
        """Save a sample for later, because the server needs the CPUs now."""
        if verdict.judgement is Judgement.LINEARIZABLE and self.dice.random() < self.part:
            original = self.folder / f"{history.name}.jsonl"
            certain = self.folder / f"{history.name}.resolved.jsonl"
            write_history(history, original)
            write_history(resolved(history, verdict), certain)
            self._sample.append((original, certain, len(history.operations)))

    def judge(self) -> None:
        for original, certain, operations in self._sample:
            self.histories += 1
            self.operations += operations
            judgement = self.porcupine.judge(original, _ORIGINAL_SECONDS)
            if judgement is Judgement.UNDECIDED:
                judgement = self.porcupine.judge(certain, _RESOLVED_SECONDS)
                self.resolved += judgement is not Judgement.UNDECIDED
            if judgement is Judgement.UNDECIDED:
                self.undecided += 1
            elif judgement is Judgement.VIOLATION:
                self.disagreements.append(str(original))
        self._sample.clear()

    def figures(self) -> dict[str, int]:
        return {
            "porcupine histories": self.histories,
            "porcupine operations": self.operations,
            "porcupine resolved": self.resolved,
            "porcupine undecided": self.undecided,
        }
