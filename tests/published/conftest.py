"""A server and the clients that the published examples use: curl, and the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.commands import Shell
from tests.interop.serving import serving

BASIN = "my-basin"


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """A server in memory, with the basin of the examples; yields the variables that it prints."""
    with serving("--no-access-log") as exports:
        Shell(exports).ok("create-basin", BASIN)
        yield exports


@pytest.fixture(scope="module")
def endpoint(variables: dict[str, str]) -> str:
    return variables["S2_BASIN_ENDPOINT"]


@pytest.fixture(scope="module")
def shell(variables: dict[str, str]) -> Shell:
    return Shell(variables)
