from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def durable_packages() -> None:
    """Install what npm has for Durable Streams; without a lock file, as that would name a registry."""
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(command, cwd=Path(__file__).parent / "durable", check=True, timeout=300)
