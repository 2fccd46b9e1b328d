"""Options of extensions, read from plain values by the types that they declare."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import pytest

from streamfold.extensions import Options
from streamfold.snapshotter.config.section import Section, read_options


class Every(Options, frozen=True, kw_only=True):
    """An option of each type."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z]+\Z", extra={"rule": "a word"})]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 443
    pause: timedelta = timedelta(seconds=1)
    fast: bool = False
    mode: Literal["a", "b"] = "a"
    topics: tuple[str, ...] = ()
    ratio: Annotated[float | None, msgspec.Meta(description="any other type")] = None


def read(**values: Any) -> tuple[Every | None, list[str]]:
    problems: list[str] = []
    return read_options(Section(values, "events[0]", problems), Every), problems


def test_what_is_left_out_has_its_default() -> None:
    assert read(name="x") == (Every(name="x"), [])


@pytest.mark.parametrize("text", [False, True])
def test_every_type_is_read_from_a_file_and_from_the_text_of_a_variable(text: bool) -> None:
    plain = {"port": 80, "fast": True, "topics": ["x", "y"]}
    words = {"port": "80", "fast": "true", "topics": "x, y"}
    expected = Every(
        name="x", port=80, pause=timedelta(minutes=5), fast=True, mode="b", topics=("x", "y")
    )
    given = {"name": "x", "pause": "5m", "mode": "b", **(words if text else plain)}
    assert read(**given) == (expected, [])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "events[0].name: is missing"),
        ({"name": ""}, "events[0].name:  must be text, and not empty"),
        ({"name": "X1"}, "events[0].name: X1 must be a word"),
        ({"name": "x\n"}, "events[0].name: x\n must be a word"),
        (
            {"name": "x", "port": 0},
            "events[0].port: 0 must be a whole number, between 1 and 65535",
        ),
        ({"name": "x", "pause": "5"}, "events[0].pause: 5 must be a time with a unit"),
        ({"name": "x", "fast": "maybe"}, "events[0].fast: maybe must be true or false"),
        ({"name": "x", "mode": "c"}, "events[0].mode: c must be one of a, b"),
        ({"name": "x", "topics": [1]}, "events[0].topics: [1] must be a list of names"),
        ({"name": "x", "ratio": "half"}, "events[0]: Expected `float | null`"),
        ({"name": "x", "prot": 1}, "events[0].prot: is not known; did you mean port?"),
    ],
)
def test_a_value_that_breaks_its_type_is_refused_with_its_path(
    given: dict[str, Any], problem: str
) -> None:
    found, problems = read(**given)
    assert found is None
    assert len(problems) == 1
    assert problems[0].startswith(problem), problems
