"""Packages outside the repository, as pip installs them: modules, and metadata with entry points."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "extensions"


def install(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str
) -> Path:
    """Install modules as a distribution, whose entry points are by group and by name."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    return folder


def install_example(folder: Path) -> Path:
    """Install the example of the contributors' guide, as its pyproject.toml describes it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copytree(EXAMPLE / "acme_streamfold", folder / "acme_streamfold")
    return install(folder, project["name"], project["entry-points"])
