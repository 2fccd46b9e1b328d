"""The pinned packages install on every Python that the package supports."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def requires_python(pin: Requirement) -> SpecifierSet:
    """The versions of Python that an installed package accepts; all, if it is not installed here."""
    try:
        return SpecifierSet(str(metadata(pin.name).json.get("requires_python", "")))
    except PackageNotFoundError:
        return SpecifierSet()


def test_every_pinned_package_accepts_the_oldest_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (oldest,) = SpecifierSet(project["requires-python"])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(pin) for pin in (line.partition("#")[0] for line in lines) if pin]
    refusals = {pin.name: requires_python(pin) for pin in pins}
    assert len(pins) > 100
    assert not {
        name: str(accepted)
        for name, accepted in refusals.items()
        if not accepted.contains(f"{oldest.version}.0")
    }
