"""Extensions of installed packages: found by entry points, loaded when used, harmless when broken."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamfold.errors import InvalidError
from streamfold.extensions import Extension, ExtensionBrokenError, Registry
from tests.distributions import install

GROUP = "streamfold.colours"
MODULE = """
from tests.test_extensions import Colour

GREEN = Colour(id="green", summary="as grass", warm=False)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colour(Extension):
    """A kind of extension that only these tests have."""

    warm: bool


RED = Colour(id="red", summary="as roses", warm=True)


def colours() -> Registry[Colour]:
    return Registry(GROUP, "colour", Colour, {"red": "tests.test_extensions:RED"})


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages, from which Python imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_entry_point_adds_an_extension_beside_those_that_ship(packages: Path) -> None:
    install(packages, "acme-paint", {GROUP: {"green": "acme_green:GREEN"}}, acme_green=MODULE)
    registry = colours()
    assert registry.ids() == ("red", "green")
    assert [colour.warm for colour in registry] == [True, False]
    assert registry.get("red").summary == "as roses"
    assert "green" in registry


def test_ids_are_known_before_anything_is_imported(packages: Path) -> None:
    install(packages, "acme-paint", {GROUP: {"blue": "acme_blue:BLUE"}}, acme_blue="raise OSError")
    assert colours().ids() == ("red", "blue")
    assert "acme_blue" not in sys.modules


def test_an_unknown_id_is_refused_with_those_that_exist_and_the_likely_one() -> None:
    with pytest.raises(InvalidError, match=re.escape("colour 'rde' must be one of red; did you")):
        colours().get("rde")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("acme_broken:BLUE", "OSError: no paint"),
        ("acme_missing:BLUE", "ModuleNotFoundError: No module named 'acme_missing'"),
        ("acme_whole:NOTHING", "AttributeError: module 'acme_whole' has no attribute 'NOTHING'"),
        ("acme_whole:GREEN", "its id is 'green', not the name of the entry point"),
        ("acme_whole:Colour", "acme_whole:Colour is not a Colour"),
    ],
)
def test_a_broken_extension_is_one_clear_error_and_leaves_the_others_alone(
    packages: Path, reference: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {"acme_broken": "raise OSError('no paint')", "acme_whole": MODULE}
    install(packages, "acme-paint", {GROUP: {"blue": reference}}, **modules)
    registry = colours()
    with pytest.raises(ExtensionBrokenError) as failure:
        registry.get("blue")
    reported = f"colour 'blue' of the package acme-paint 1.0 cannot be loaded ({reason})"
    assert failure.value.message == f"{reported}: repair or uninstall that package"
    with caplog.at_level(logging.WARNING):
        assert list(registry) == [RED]
    assert caplog.messages == [failure.value.message]


def test_an_id_that_two_packages_declare_is_refused_with_both(packages: Path) -> None:
    for name in ("acme-paint", "best-paint"):
        install(packages, name, {GROUP: {"green": "acme_green:GREEN"}}, acme_green=MODULE)
    reported = (
        "colour 'green' is declared by acme-paint 1.0 and best-paint 1.0: uninstall all but one"
    )
    with pytest.raises(ExtensionBrokenError, match=re.escape(reported)):
        colours().get("green")


def test_an_id_that_ships_cannot_be_taken(packages: Path, caplog: pytest.LogCaptureFixture) -> None:
    install(packages, "acme-paint", {GROUP: {"red": "acme_green:GREEN"}}, acme_green=MODULE)
    registry = colours()
    assert registry.ids() == ("red",)
    assert registry.get("red") is RED
    assert "colour 'red' of the package acme-paint 1.0 is ignored" in caplog.text


def test_a_process_may_add_an_extension_of_its_own_once() -> None:
    registry, violet = colours(), Colour(id="violet", summary="as violets", warm=False)
    registry.register(violet)
    assert registry.get("violet") is violet
    with pytest.raises(InvalidError, match="colour 'violet' exists already: choose another id"):
        registry.register(violet)


def test_looking_for_extensions_loads_no_large_library() -> None:
    script = (
        "import sys\n"
        "from streamfold.blob import DESTINATIONS\n"
        "from streamfold.follow import CODECS\n"
        "assert len(list(DESTINATIONS)) == len(list(CODECS)) == 4\n"
        "print([name for name in ('pyarrow', 'boto3', 'pyspark') if name in sys.modules])\n"
        "from streamfold.archive.events import SINKS\n"
        "print([sink.id for sink in SINKS], 'boto3' in sys.modules, 'pyspark' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "[]",
        "['sns', 'sqs', 'kinesis', 'eventbridge', 'webhook'] False False",
    ]
