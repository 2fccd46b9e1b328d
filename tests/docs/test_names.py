"""Files and types that pages for developers name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "streamfold"
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md")
#: A path of a module or of a package, below the sources or in the repository.
PATH = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+(?:\.py|\.md)?)?)`")
TYPE = re.compile(r"`([A-Z][A-Za-z]+)(?:\.[a-z_]+)?`")


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    named = set(PATH.findall((ROOT / page).read_text())) - {"application/json"}
    assert named
    assert [path for path in sorted(named) if not _exists(path)] == []


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
