from __future__ import annotations

from collections.abc import Iterator
from itertools import count

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
def basin(shell: Shell) -> str:
    """A basin of this test's own."""
    name = f"test-basin-{next(_NUMBERS)}"
    shell.ok("create-basin", name)
    return name


@pytest.fixture
def stream_uri(shell: Shell, basin: str) -> str:
    """An empty stream."""
    name = f"s2://{basin}/orders"
    shell.ok("create-stream", name)
    return name
