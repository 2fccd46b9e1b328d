"""The examples run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "kv_store": "both replicas have the same 50 keys",
    "agent_log": "records that it read to know that: 1\n",
    "embedded_store": "after the trim the stream begins at seq_num 2",
    "counter": "5 people added 1069 in all, and so it stands",
}


def run(script: list[str], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *script],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_short(name: str, tmp_path: Path) -> None:
    script = ROOT / f"examples/{name}.py"
    assert len(script.read_text().splitlines()) < 100
    assert EXAMPLES[name] in run([str(script)], tmp_path)
