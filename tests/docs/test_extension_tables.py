"""Extension tables in the documentation match the extensions' declarations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from streamfold.archive.events import SINKS
from streamfold.archive.formats import FORMATS
from streamfold.archive.formats.format import format_names
from streamfold.blob import DESTINATIONS
from streamfold.extensions import Extension, Options, Registry
from streamfold.follow import CODECS
from streamfold.snapshotter.decoding import DECODERS

DOCS = Path(__file__).parents[2] / "docs"


def option_table(setting: str, kinds: Iterable[tuple[Extension, type[Options]]]) -> str:
    """The table of a kind: one line for each option of each extension."""
    lines = [f"| `{setting}` | option | default | |", "|---|---|---|---|"]
    for extension, options in kinds:
        first = f"`{extension.id}`: {extension.summary}"
        for name, default, description in described(options):
            lines.append(f"| {first} | `{name}` | {default} | {description} |")
            first = ""
        if first:
            lines.append(f"| {first} | | | |")
    return "\n".join(line.replace("|  |", "| |") for line in lines) + "\n"


def described(options: type[Options]) -> Iterator[tuple[str, str, str]]:
    """Name, default and description of each option, those that are required first."""
    fields = msgspec.structs.fields(options)
    for field in sorted(fields, key=lambda field: not field.required):
        kind = inspect.type_info(field.type)
        assert isinstance(kind, inspect.Metadata), f"{field.name} has no description"
        default = f"`{field.default}`" if field.default else ""
        description = (kind.extra_json_schema or {})["description"]
        yield field.name, "required" if field.required else default, description


@pytest.mark.parametrize(
    ("setting", "kinds"), [("type", SINKS), ("type", DESTINATIONS), ("kind", DECODERS)]
)
def test_the_configuration_page_has_every_option_of_every_extension(
    setting: str, kinds: Iterable[Any]
) -> None:
    table = option_table(setting, ((kind, kind.options) for kind in kinds))
    assert table in (DOCS / "reference" / "snapshotter-config.md").read_text(), table


@pytest.mark.parametrize(
    ("page", "heading", "registry"),
    [
        ("reference/archive-events.md", "## Sinks", SINKS),
        ("reference/archive-format.md", "## Encodings", FORMATS),
    ],
)
def test_a_table_of_a_page_has_a_line_for_each_extension(
    page: str, heading: str, registry: Registry[Extension]
) -> None:
    section = (DOCS / page).read_text().partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(registry.ids())


@pytest.mark.parametrize("registry", [SINKS, FORMATS, DECODERS, DESTINATIONS, CODECS])
def test_the_guide_has_a_line_for_each_kind_of_extension(registry: Registry[Extension]) -> None:
    [declared_by] = {type(extension).__name__ for extension in registry}
    guide = (DOCS / "contributing" / "extending.md").read_text()
    assert f"| `{registry.group}` | `{declared_by}` |" in guide


def test_the_configuration_page_has_every_name_of_a_format() -> None:
    names = ", ".join(f"`{name}`" for name in format_names())
    page = (DOCS / "reference" / "snapshotter-config.md").read_text()
    assert f'| `["jsonl"]` | of {names}; limits measure the first |' in page


def test_the_page_about_spark_has_the_order_in_which_formats_are_preferred() -> None:
    kinds = sorted(FORMATS, key=lambda kind: kind.read_cost)
    names = ", ".join(f"`{kind.id}`" for kind in kinds)
    assert f"the best first: {names} | that order |" in (DOCS / "reference/spark.md").read_text()
