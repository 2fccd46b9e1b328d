"""npm `@durable-streams/client` and `state`, as published, against `streamfold serve`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.interop.serving import serving

FOLDER = Path(__file__).parent / "durable"


def run_node(script: str, url: str) -> str:
    """What a script prints that tests the server at `url`; it must succeed."""
    done = subprocess.run(
        ["node", script],
        cwd=FOLDER,
        env=os.environ | {"STREAMFOLD_URL": url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("durable_packages")
@pytest.mark.parametrize("storage", ["memory", "local"])
def test_the_typescript_client_works(storage: str, tmp_path: Path) -> None:
    options = [] if storage == "memory" else ["--local-root", str(tmp_path)]
    with serving("--host", "127.0.0.1", "--no-access-log", *options) as exports:
        assert run_node("client.mjs", exports["S2_ACCOUNT_ENDPOINT"]).count("ok ") == 9


@pytest.mark.usefixtures("durable_packages")
def test_the_state_package_gets_a_cursor_with_each_change() -> None:
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        assert run_node("state.mjs", exports["S2_ACCOUNT_ENDPOINT"]).count("ok ") == 2
