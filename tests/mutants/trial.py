"""A copy of the sources in which promises are broken, and the checks that run on it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.mutation import SOURCES, Check, Edit, Mutation

ROOT = Path(__file__).parents[2]
#: Seconds that a check may take on sound sources.
_SOUND_LIMIT = 600
#: How Python says that a mutation broke more than its promise.
_BROKEN_SOURCES = re.compile(r"\b(ImportError|ModuleNotFoundError|SyntaxError|NameError)\b")
_SEED = re.compile(r"\bseed (\d+)\b")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a check; `status` is None if it was ended because its time was up."""

    status: int | None
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation; `failure` is None if the check found it."""

    mutation: Mutation
    failure: str | None
    finding: str
    seed: str
    seconds: float


@dataclass
class Laboratory:
    """A folder with copies of the sources; the working tree is only read."""

    folder: Path
    #: Runs on sound sources, by their check.
    _sound: dict[Check, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.folder)

    def try_mutation(self, mutation: Mutation) -> Verdict:
        """Run the check of `mutation` on sound sources, unless it has passed already, and on broken."""
        sound = self._run_sound(mutation.check)
        if sound.status != 0:
            failure = (
                f"{mutation.check.command} fails on sound sources:\n{_shortened(sound.output)}"
            )
            return Verdict(mutation, failure, "", "", sound.seconds)
        with self._broken(mutation) as sources:
            run = self._run(mutation.check, mutation.seconds, sources)
        return _judge(mutation, run)

    def _run_sound(self, check: Check) -> Run:
        if check not in self._sound:
            self._sound[check] = self._run(check, _SOUND_LIMIT, self.folder / "src")
        return self._sound[check]

    @contextmanager
    def _broken(self, mutation: Mutation) -> Iterator[Path]:
        """Sources in which the promise is broken, while the context lasts."""
        sources = self.folder / "src"
        changed = apply_edits(mutation.edits, sources)
        whole = {path: path.read_text() for path in changed}
        try:
            for path, text in changed.items():
                _replace(path, text)
            yield sources
        finally:
            for path, text in whole.items():
                _replace(path, text)

    def _run(self, check: Check, seconds: int, sources: Path) -> Run:
        scratch = self.folder / "scratch"
        scratch.mkdir()
        own = self.folder / "src" if check.takes_sources else sources
        environment = os.environ | {"PYTHONPATH": str(own), "TMPDIR": str(scratch)}
        arguments = [str(sources) if each == SOURCES else each for each in check.arguments]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        status: int | None = None
        try:
            output, _ = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            _end_group(process.pid)
            output, _ = process.communicate()
        finally:
            _end_group(process.pid)
        took = time.monotonic() - began
        shutil.rmtree(scratch)
        return Run(status, output, took)


def _end_group(leader: int) -> None:
    """End the check and every server that it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _judge(mutation: Mutation, run: Run) -> Verdict:
    match = re.search(mutation.violation, run.output)
    finding = _line_of(run.output, match.start()) if match else ""
    seeds = _SEED.search(finding) or _SEED.search(run.output)
    failure: str | None = None
    if run.status is None:
        failure = f"not found within {mutation.seconds} s"
    elif run.status == 0:
        failure = "the check passes although the promise is broken"
    elif match is None or _BROKEN_SOURCES.search(finding):
        failure = f"the check fails without {mutation.violation!r}:\n{_shortened(run.output)}"
    return Verdict(mutation, failure, finding, seeds[1] if seeds else "", run.seconds)


def _shortened(output: str) -> str:
    """Beginning and end of what a check printed."""
    lines = output.splitlines()
    return "\n".join(lines if len(lines) < 60 else [*lines[:20], "…", *lines[-40:]])


def _line_of(text: str, place: int) -> str:
    start = text.rfind("\n", 0, place) + 1
    end = text.find("\n", place)
    return text[start : end if end >= 0 else None].strip()


def apply_edits(edits: Sequence[Edit], sources: Path) -> dict[Path, str]:
    """The changed text of each file; nothing is written. StaleMutationError if an edit is stale."""
    changed: dict[Path, str] = {}
    for edit in edits:
        path = edit.path(sources)
        changed[path] = edit.apply(changed[path] if path in changed else path.read_text())
    return changed


def _replace(path: Path, text: str) -> None:
    """Write `path`, and drop its bytecode, which may look as new."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
