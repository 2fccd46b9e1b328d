"""Exports that need optional packages load them at their first use, not with the package."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

import streamfold.testing


def modules_after(script: str) -> set[str]:
    """Run a script in a fresh interpreter; return the modules that it loaded."""
    command = [sys.executable, "-c", f"{script}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


def test_importing_the_kits_loads_neither_pytest_nor_hypothesis() -> None:
    assert not {"pytest", "hypothesis", "pyarrow"} & modules_after("import streamfold.testing")


def test_importing_what_every_verb_needs_loads_neither_an_http_client_nor_pandas() -> None:
    assert "httpx" not in modules_after("import streamfold.cli.errors_from_s2")
    assert "pandas" not in modules_after("import streamfold.archive")


def test_a_kit_loads_pytest_at_its_first_use() -> None:
    loaded = modules_after("import streamfold.testing; streamfold.testing.BlobStoreConformance")
    assert "pytest" in loaded
    assert "hypothesis" not in loaded


@pytest.mark.parametrize("name", streamfold.testing.__all__)
def test_every_exported_kit_and_double_can_be_imported(name: str) -> None:
    found = getattr(streamfold.testing, name)
    assert found.__name__ == name
    assert found.__module__.startswith("streamfold.testing.")


@pytest.mark.parametrize(
    ("package", "name", "module"),
    [
        ("streamfold.follow", "ArrowCodec", "streamfold.follow.encoding.arrow_codec"),
        ("streamfold.follow", "ServerSnapshots", "streamfold.follow.snapshots.server_snapshots"),
        ("streamfold.archive", "Profiles", "streamfold.archive.destinations.aws_credentials"),
    ],
)
def test_an_export_is_loaded_at_its_first_use(package: str, name: str, module: str) -> None:
    assert find_spec(module)
    assert module not in modules_after(f"import {package}")
    assert module in modules_after(f"from {package} import {name}")


@pytest.mark.parametrize(
    "package", ["streamfold.testing", "streamfold.follow", "streamfold.archive"]
)
def test_an_unknown_name_is_an_attribute_error_that_names_the_package(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonsense'"):
        _ = importlib.import_module(package).nonsense
