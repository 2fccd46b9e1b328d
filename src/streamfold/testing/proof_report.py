"""Reports of long-running proofs: one JSON line of figures per run, in one form for all programs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec


class ProofReport:
    """Appends the figures of one run to the `--report` file."""

    def __init__(self, proof: str, file: Path | None) -> None:
        self._proof = proof
        self._file = file
        self._started = time.monotonic()

    @staticmethod
    def add_option(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--report", type=Path, metavar="FILE", help="append the figures as JSON"
        )

    def write(self, violations: int, figures: Mapping[str, int | float]) -> None:
        """Append the line if a file was given. Figure names are words separated by spaces."""
        if self._file is None:
            return
        line = {
            "proof": self._proof,
            "violations": violations,
            "seconds": round(time.monotonic() - self._started, 1),
            "figures": dict(figures),
            "command": _command(),
        }
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _command() -> str:
    """Return the command that reruns this program, without the `--report` option."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    words = iter(sys.argv[1:])
    options = []
    for word in words:
        if word == "--report":
            next(words, None)
        elif not word.startswith("--report="):
            options.append(word)
    return shlex.join(["python", "-m", module, *options])
