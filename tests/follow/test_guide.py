"""The guide's Python runs as it is written; so do the examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.serving import serving

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/snapshot-and-follow.md"
EXAMPLES = {
    "kv_store": "both replicas have the same 50 keys",
    "agent_log": "it read 1 records to know that",
    "counter": "5 people added 1069 in all, and so it stands",
}


def run(script: list[str], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *script],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_runs_as_it_is_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 7
    body = "".join(f"    {line}\n" for block in blocks for line in block.splitlines())
    (tmp_path / "guide.py").write_text(
        f"import asyncio\n\nasync def main():\n{body}\nasyncio.run(main())\n"
    )
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        shown = run(["guide.py"], tmp_path, **exports)
    assert "replay  500 records from 0" in shown
    assert "change 500 -> 7" in shown
    assert "replay  1 records from 501" in shown
    assert "load    record snapshot" in shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_short(name: str, tmp_path: Path) -> None:
    script = ROOT / f"examples/{name}.py"
    assert len(script.read_text().splitlines()) < 100
    assert EXAMPLES[name] in run([str(script)], tmp_path)
