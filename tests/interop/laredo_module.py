"""Builds and runs a Go program on Laredo's own packages: its reader and its writer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.interop.laredo_reader import LaredoReader

PROGRAM = Path(__file__).parent / "laredo_module"
MODULE = "github.com/zourzouvillys/laredo"
#: The commit that layout `laredo` was made for.
COMMIT = "22b2bc5"
#: Seconds that Go may take to fetch and compile the module and what it needs.
BUILD_SECONDS = 600

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaredoModule(LaredoReader):
    """The built program; it reads as LaredoReader does, with Laredo's code."""

    @classmethod
    def build(cls, folder: Path) -> LaredoModule:
        """Build with the checkout that LAREDO_SOURCE names, else with the module from Go's proxy."""
        source = os.environ.get("LAREDO_SOURCE")
        for path in PROGRAM.glob("*.go"):
            shutil.copy(path, folder)
        go(folder, "mod", "init", "streamfold.test/laredo-module")
        if source:
            checkout = Path(source).resolve()
            go(folder, "mod", "edit", f"-replace={MODULE}={checkout}", f"-require={MODULE}@v0.0.0")
        else:
            go(folder, "get", f"{MODULE}@{COMMIT}")
        go(folder, "build", "-mod=mod", "-o", "laredo-module", ".")
        return cls(folder / "laredo-module")

    def write_steps(
        self, archive: Path, table: str, key_fields: Sequence[str], steps: Sequence[Row]
    ) -> None:
        """Write an archive: a step is a base with `Rows`, or a diff with `Changes` (`Old`, `New`)."""
        command = [str(self.program), "write", str(archive), table, ",".join(key_fields)]
        done = subprocess.run(
            command, input=json.dumps(steps).encode(), capture_output=True, timeout=90
        )
        assert done.returncode == 0, done.stderr.decode()


def go(folder: Path, *arguments: str) -> None:
    """Run Go; what it reports comes with what to do about it."""
    done = subprocess.run(
        ["go", *arguments], cwd=folder, capture_output=True, text=True, timeout=BUILD_SECONDS
    )
    if done.returncode:
        raise RuntimeError(
            f"go {' '.join(arguments)} failed:\n{done.stderr}\n"
            f"This proof needs Laredo's own code. Set LAREDO_SOURCE to a checkout of "
            f"https://{MODULE} at {COMMIT}, or a Go proxy that has the module (GOPROXY)."
        )
