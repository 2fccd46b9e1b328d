from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import httpx
import pytest

from tests.cli.commands import Shell
from tests.interop.serving import serving

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def variables() -> Iterator[dict[str, str]]:
    """What a server in memory prints for its clients."""
    with serving("--host", "127.0.0.1", "--no-access-log", "--trim-grace", "0") as exports:
        yield exports


@pytest.fixture(scope="session")
def shell(variables: dict[str, str]) -> Shell:
    return Shell(variables)


@pytest.fixture
def basin(variables: dict[str, str]) -> str:
    """A basin of this test's own."""
    name = f"test-basin-{next(_NUMBERS)}"
    create(variables, f"basins/{name}")
    return name


@pytest.fixture
def stream_uri(variables: dict[str, str], basin: str) -> str:
    """An empty stream."""
    create(variables, "streams/orders", basin)
    return f"s2://{basin}/orders"


def create(variables: Mapping[str, str], path: str, basin: str = "") -> None:
    """Create what a test needs by one request: a verb for it would be a process of its own."""
    url = f"{variables['S2_ACCOUNT_ENDPOINT']}/v1/{path}"
    httpx.put(url, headers={"s2-basin": basin}, json={}, timeout=60).raise_for_status()
