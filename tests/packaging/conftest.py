"""Distributions built from the sources, as a release builds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command that must succeed; returns what it prints."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, folder: Path, sources: Path = ROOT) -> Path:
    """Build a wheel or an sdist from sources, without tags and without a network."""
    run(
        sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder),
        cwd=sources,
    )  # fmt: skip
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))
