"""The catalogue of known defects of libraries, and where code and tests cite it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/contributing/upstream-defects.md"
_ENTRY = re.compile(
    r"## (\d+)\. \S.*\n- Version: \S.*\n- Symptom: \S.*\n"
    r"- Workaround: `(\S+)`\n- Test: `(\S+)::(\w+)`\n"
)
_CITED = re.compile(r"upstream\s+defect\s+(\d+)", re.IGNORECASE)


class Entry(NamedTuple):
    number: int
    module: Path
    tests: Path
    test: str


def entries() -> list[Entry]:
    found = _ENTRY.findall(PAGE.read_text())
    return [Entry(int(n), ROOT / module, ROOT / file, test) for n, module, file, test in found]


def cited(path: Path) -> set[int]:
    return {int(number) for number in _CITED.findall(path.read_text())}


def test_entries_are_complete_and_numbered_in_order() -> None:
    assert PAGE.read_text().count("\n## ") == len(entries())
    numbers = [entry.number for entry in entries()]
    assert numbers == sorted(set(numbers))


def test_module_and_test_of_each_entry_cite_it() -> None:
    for entry in entries():
        assert entry.number in cited(entry.module), entry
        assert entry.number in cited(entry.tests), entry
        assert re.search(rf"(def|class) {entry.test}\b", entry.tests.read_text()), entry


def test_each_defect_that_is_cited_is_in_the_catalogue() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")]
    assert {number for file in files for number in cited(file)} <= {e.number for e in entries()}
