"""Distributions built from the sources, as a release builds them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command that must succeed; returns what it prints."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, folder: Path, sources: Path = ROOT) -> Path:
    """Build a wheel or an sdist from sources, without tags and without a network."""
    command = {"wheel": ("build", "--release", "--locked", "--offline"), "sdist": ("sdist",)}[
        target
    ]
    # What the crate depends on is compiled once. Two builds at a time would take each other's library.
    compiled = str(ROOT / "native/target")
    with (ROOT / "native/Cargo.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(
            sys.executable, "-m", "maturin", *command, "--out", str(folder),
            cwd=sources, CARGO_TARGET_DIR=compiled,
        )  # fmt: skip
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tmp_path_factory.mktemp("sdist"))
