"""Names offered by `import streamfold`, and its cost."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import streamfold
from streamfold.errors import InvalidError
from tests.interop.serving import serving


@pytest.mark.parametrize("name", streamfold.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(streamfold, name)
    assert value.__doc__
    assert name in dir(streamfold)
    if not isinstance(value, ModuleType):
        assert getattr(streamfold, name) is value


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'streamfold' has no attribute 'opened'"):
        _ = streamfold.opened


def test_nothing_is_loaded_before_it_is_used() -> None:
    script = (
        "import sys, streamfold\n"
        "print([name for name in sys.modules if name.startswith('streamfold.')])\n"
        "streamfold.Record\n"
        "print('pyspark' in sys.modules, 'streamfold._native' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "False False"]


async def test_connect_takes_the_endpoint_or_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("S2_ACCOUNT_ENDPOINT", "S2_BASIN_ENDPOINT"):
        monkeypatch.setenv(name, "http://localhost:9")
    async with streamfold.connect() as named, streamfold.connect("http://localhost:8") as given:
        assert type(named) is type(given)


async def test_connect_takes_an_address_of_this_machine_without_a_scheme() -> None:
    with serving("--host", "127.0.0.1", "--no-access-log") as exports:
        address = exports["S2_ACCOUNT_ENDPOINT"].removeprefix("http://")
        async with streamfold.connect(address) as s2:
            assert (await s2.list_basins()).items == []


def test_connect_without_a_server_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S2_ACCOUNT_ENDPOINT", "http://localhost:9")
    monkeypatch.delenv("S2_BASIN_ENDPOINT", raising=False)
    with pytest.raises(InvalidError, match=r'call connect\("http://localhost:8080"\), or set S2_'):
        streamfold.connect()
