"""The example that reads an archive without Streamfold, against the reader that has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import streamfold.archive
from tests.archive.reading import HISTORY, reopened, state_at, write_history
from tests.archive.tables import changes

EXAMPLE = Path(__file__).parents[3] / "examples" / "rebuild_table.py"


def rebuilt(folder: Path) -> subprocess.CompletedProcess[str]:
    # Isolated: not even by accident could it find the package.
    command = [sys.executable, "-I", "-S", str(EXAMPLE), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    assert done.returncode == 0, done.stderr
    return {row["id"]: row["name"] for row in json.loads(done.stdout)}


async def test_plain_python_rebuilds_the_same_table(tmp_path: Path) -> None:
    writer = await write_history(tmp_path)
    assert rows_of(rebuilt(tmp_path)) == HISTORY["31"]
    await writer.write_diff(changes(("DELETE", 4, None), ("INSERT", 5, "e")), "31", "40")
    assert rows_of(rebuilt(tmp_path)) == await state_at(await reopened(tmp_path))
    await writer.write_diff(changes(("TRUNCATE", None, None), ("INSERT", 6, "f")), "40", "41")
    assert rows_of(rebuilt(tmp_path)) == {6: "f"}


async def test_plain_python_refuses_a_file_that_was_changed(tmp_path: Path) -> None:
    await write_history(tmp_path)
    archive = await streamfold.archive.open(tmp_path)
    [part] = archive.manifest.base.parts()
    path = tmp_path / part.path
    path.write_bytes(path.read_bytes().replace(b'"c"', b'"x"'))
    done = rebuilt(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "was changed" in done.stderr
