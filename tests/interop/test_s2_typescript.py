"""npm `@s2-dev/streamstore`, as published, against `streamfold serve` as a user starts it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.interop.conftest import install_packages
from tests.interop.serving import serving

FOLDER = Path(__file__).parent / "typescript"


@pytest.fixture(scope="module")
def packages() -> None:
    install_packages(FOLDER)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("storage", ["memory", "local"])
def test_the_typescript_sdk_works(storage: str, tmp_path: Path) -> None:
    options = [] if storage == "memory" else ["--local-root", str(tmp_path)]
    with serving(*options) as exports:
        done = subprocess.run(
            ["node", "s2.mjs"],
            cwd=FOLDER,
            env=os.environ | exports,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 7
