"""Tests that are named as evidence exist, and every promise has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: A file of tests, or a test, which is in the file named before it.
NAMED = re.compile(r"`(tests/[\w/]+\.py|test_\w+)`")
GUARANTEES = (ROOT / "docs/guarantees.md").read_text()
PROMISES = dict(
    re.findall(r"^## (.+)\n(- \*\*Promise\.\*\* (?:.|\n)*?)(?=^## )", GUARANTEES, re.MULTILINE)
)


@pytest.mark.parametrize("page", ["guarantees.md", "findings.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    file, missing = "", []
    names = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(names) > 20
    for name in names:
        if name.startswith("tests/"):
            file = (ROOT / name).read_text() if (ROOT / name).is_file() else ""
            missing += [] if file else [name]
        elif f"def {name}(" not in file:
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("title", PROMISES)
def test_a_promise_says_what_it_means_what_it_leaves_out_and_what_checks_it(title: str) -> None:
    labels = re.findall(r"^- \*\*(.+?)\.\*\* ", PROMISES[title], re.MULTILINE)
    assert labels == ["Promise", "Meaning", "Not covered", "Checked by"]
    assert NAMED.search(PROMISES[title])


def test_the_overview_lists_every_promise_in_order() -> None:
    assert re.findall(r"^\| \[(.+?)\]\(#", GUARANTEES, re.MULTILINE) == list(PROMISES)
