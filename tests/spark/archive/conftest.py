"""Archives shared by several tests. Tests that modify one copy it first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .tables import History, folder_at, write_history

Written = Callable[..., tuple[Path, History]]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Gives the archive of `write_history` with these arguments, and its history."""
    known: dict[str, tuple[Path, History]] = {}

    def find(**arguments: object) -> tuple[Path, History]:
        name = repr(sorted(arguments.items()))
        if name not in known:
            folder = tmp_path_factory.mktemp("archive")
            known[name] = folder, write_history(folder_at(folder), **arguments)  # type: ignore[arg-type]
        return known[name]

    return find


@pytest.fixture
def copied(written: Written, tmp_path: Path) -> Written:
    """Gives a copy that the test may damage; its history cannot go on."""

    def find(**arguments: object) -> tuple[Path, History]:
        folder, history = written(**arguments)
        shutil.copytree(folder, tmp_path / "copy")
        return tmp_path / "copy", history

    return find
