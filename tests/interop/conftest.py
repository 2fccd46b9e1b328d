from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest


def install_packages(folder: Path) -> None:
    """Install what npm has, one process at a time; a lock file would name a registry."""
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    with (folder / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=folder, check=True, timeout=300)


@pytest.fixture(scope="session")
def durable_packages() -> None:
    install_packages(Path(__file__).parent / "durable")
