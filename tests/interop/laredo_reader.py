"""Builds and runs the Go program that reads and writes archives by the rules of Laredo's layout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "laredo"


@dataclass(frozen=True, slots=True)
class LaredoReader:
    """The built program."""

    program: Path

    @classmethod
    def build(cls, folder: Path) -> LaredoReader:
        """Build the program in `folder`; Go keeps what it compiled for the next time."""
        program = folder / "laredo"
        subprocess.run(["go", "build", "-o", program, "."], cwd=SOURCE, check=True, timeout=300)
        return cls(program)

    def read(
        self, archive: Path, form: str, key_fields: Sequence[str], position: str
    ) -> dict[str, Any]:
        """Rebuild a table at a position; fails with what the program reports."""
        command = [str(self.program), "read", str(archive), form, ",".join(key_fields), position]
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def write(self, archive: Path) -> None:
        """Write the archive of a table with two epochs and the key `id`."""
        subprocess.run([str(self.program), "write", str(archive)], check=True, timeout=120)
