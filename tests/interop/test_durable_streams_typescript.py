"""npm `@durable-streams/client`, as published, against `streamfold serve` as a user starts it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interop.serving import serving

FOLDER = Path(__file__).parent / "durable"

pytestmark = pytest.mark.skipif(
    shutil.which("npm") is None, reason="node and npm are not installed"
)


@pytest.mark.usefixtures("durable_packages")
@pytest.mark.parametrize("storage", ["memory", "local"])
def test_the_typescript_client_works(storage: str, tmp_path: Path) -> None:
    options = [] if storage == "memory" else ["--local-root", str(tmp_path)]
    with serving("--host", "127.0.0.1", "--no-access-log", *options) as exports:
        done = subprocess.run(
            ["node", "client.mjs"],
            cwd=FOLDER,
            env=os.environ | {"STREAMFOLD_URL": exports["S2_ACCOUNT_ENDPOINT"]},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 9
