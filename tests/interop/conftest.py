from __future__ import annotations

import fcntl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.markdown import blocks_of
from tests.docs.test_reading import ROOT, WRONG, lend, reading
from tests.server.console.conftest import browser

__all__ = ["browser", "durable_packages", "follow_guide", "install_packages"]


def install_packages(folder: Path) -> None:
    """Install what npm has, one process at a time; a lock file would name a registry."""
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    with (folder / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=folder, check=True, timeout=300)


@pytest.fixture(scope="session")
def durable_packages() -> None:
    install_packages(Path(__file__).parent / "durable")


def follow_guide(guide: Path, folder: Path) -> None:
    """Do what a reader of a guide does who has a clone of the sources."""
    lend(folder / "lent")
    (folder / "reader").mkdir()
    with reading(folder / "reader", folder / "lent") as reader:
        for block in blocks_of(guide):
            text = block.text.replace("PATH/TO/CLONE/examples", str(ROOT / "examples"))
            shown = reader.follow(replace(block, text=text))
            wrong = [text for text in WRONG if text in shown]
            assert not wrong, f"{guide.name}:{block.line} showed {wrong}:\n{shown}"
            expected = block.how.get("expect", "")
            assert expected in shown, f"{block.line} did not show {expected!r}:\n{shown}"
