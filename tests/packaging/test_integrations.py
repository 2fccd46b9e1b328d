"""Packages of `integrations/` build without a network, with their types and their requirements."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.conftest import ROOT, run

PACKAGES = sorted(project.parent for project in ROOT.glob("integrations/*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda folder: str(folder.name))
def test_an_integration_builds_as_a_wheel_of_its_own(package: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), cwd=package)
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as files:
        names = files.namelist()
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        text = files.read(metadata).decode()
    assert f"streamfold_{package.name}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name or "bench" in name]
    assert f"Name: streamfold-{package.name}\n" in text
    if package.name != "yjs":  # it speaks HTTP to a server, and imports nothing of ours
        assert "Requires-Dist: streamfold[client]" in text
