"""Files, types and functions that pages for developers name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "streamfold"
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md")
#: A path of a module or of a package, below the sources or in the repository.
PATH = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+(?:\.py|\.md)?)?)`")
#: A method or a function, with its type or its module.
MEMBER = re.compile(r"`([A-Z][A-Za-z]+|[a-z_]+)\.([a-z_]+)`")
#: A name of a stream.
EXAMPLES = {"a/b"}
TYPE = re.compile(r"`([A-Z][A-Za-z]+)(?:\.[a-z_]+)?`")


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = set(PATH.findall((ROOT / page).read_text())) - {"application/json", "dist/"}
    assert named
    assert [path for path in sorted(named) if not _exists(path)] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_the_files_methods_and_functions_that_a_decision_names_exist(page: Path) -> None:
    text = page.read_text()
    assert [path for path in sorted(set(PATH.findall(text)) - EXAMPLES) if not _exists(path)] == []
    named = {f"{owner}.{name}" for owner, name in MEMBER.findall(text)}
    assert [member for member in sorted(named) if not _is_defined(*member.split("."))] == []


def test_the_types_of_the_glossary_exist() -> None:
    named = set(TYPE.findall((ROOT / "docs/glossary.md").read_text())) - {"SparkSession"}
    defined = {
        name
        for path in SOURCES.rglob("*.py")
        for name in re.findall(
            r"^(?:class )?([A-Z]\w+)\b(?:\(|:| =)", path.read_text(), re.MULTILINE
        )
    }
    assert len(named) > 30
    assert sorted(named - defined) == []


def _exists(path: str) -> bool:
    return (SOURCES / path).exists() or (ROOT / path).exists()


def _is_defined(owner: str, name: str) -> bool:
    """Whether a module or package, or a file with the class `owner`, defines the function `name`."""
    if owner[0].islower():
        files = [*SOURCES.rglob(f"{owner}.py"), *SOURCES.rglob(f"{owner}/*.py")]
    else:
        files = [path for path in SOURCES.rglob("*.py") if f"class {owner}" in path.read_text()]
    return any(re.search(rf"^ *(?:async )?def {name}\b", path.read_text(), re.M) for path in files)
