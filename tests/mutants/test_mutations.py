"""Mutations fit the current sources and count as caught only by the right failure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutation import Check, Edit, Mutation, StaleMutationError
from tests.mutants.mutations import MUTATIONS
from tests.mutants.results import markdown_table, replace_table, text_table
from tests.mutants.trial import ROOT, Laboratory, Verdict, apply_edits

PAGE = ROOT / "docs" / "contributing" / "mutations.md"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_sources(mutation: Mutation) -> None:
    sources = ROOT / "src"
    assert mutation.edits
    for path, text in apply_edits(mutation.edits, sources).items():
        compile(text, str(path), "exec")
        assert text != path.read_text()


def test_every_test_that_finds_a_mutation_exists() -> None:
    for mutation in MUTATIONS:
        path, _, function = mutation.check.arguments[-1].partition("::")
        if path.endswith(".py"):
            assert f"def {function}" in (ROOT / path).read_text()


def test_names_are_unique_and_the_page_has_them_all() -> None:
    names = Counter(mutation.name for mutation in MUTATIONS)
    assert max(names.values()) == 1
    page = PAGE.read_text()
    assert [name for name in names if f"\n| {name} | " not in page] == []
    assert [m.promise for m in MUTATIONS if m.promise not in page] == []


def test_a_run_replaces_the_table_of_the_page(tmp_path: Path) -> None:
    page, first, last = tmp_path / "mutations.md", MUTATIONS[0], MUTATIONS[-1]
    page.write_text(PAGE.read_text())
    replace_table(page, [Verdict(first, None, "", "7", 1.2)])
    prose, row, rest = page.read_text().partition(f"| {first.name} | ")
    assert PAGE.read_text().startswith(prose)
    assert row
    assert f"| {last.name} | " not in rest


def test_text_that_does_not_occur_exactly_once_is_refused() -> None:
    edit = Edit("wording.py", "once", "twice")
    with pytest.raises(StaleMutationError, match=r"wording\.py has this text 2 times, not once"):
        edit.apply("once upon once")
    with pytest.raises(StaleMutationError, match="0 times"):
        edit.apply("never")


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"))


PLURALS = "from streamfold.wording import noun; assert noun(2, 'record') == 'records', 'no plural'"


def spoil_plurals(new: str, program: str, violation: str = "no plural") -> Mutation:
    edit = Edit("wording.py", '    return one if count == 1 else many or f"{one}s"\n', new)
    return Mutation("plural", "Plurals.", (edit,), Check("plurals", ("-c", program)), violation)


def test_a_broken_promise_is_caught_and_the_sources_are_whole_again(laboratory: Laboratory) -> None:
    broken = spoil_plurals("    return one\n", PLURALS)
    for _ in range(2):  # the second time shows that the first left nothing behind
        verdict = laboratory.try_mutation(broken)
        assert verdict.failure is None
        assert verdict.finding.endswith("no plural")
    copied = laboratory.folder / "src" / "streamfold" / "wording.py"
    assert copied.read_text() == (ROOT / "src" / "streamfold" / "wording.py").read_text()


@pytest.mark.parametrize(
    ("new", "program", "violation", "failure"),
    [
        ("    return one\n", "import streamfold.wording", "no plural", "the check passes"),
        ("    return plural\n", PLURALS, "no plural", "fails without 'no plural'"),
        ("    return plural\n", PLURALS, "Error", "fails without 'Error'"),
        ("    return one\n", "raise SystemExit(1)", "", "fails on sound sources"),
    ],
)
def test_a_promise_that_is_not_caught_is_told_with_the_reason(
    laboratory: Laboratory, new: str, program: str, violation: str, failure: str
) -> None:
    verdict = laboratory.try_mutation(spoil_plurals(new, program, violation))
    assert verdict.failure is not None
    assert failure in verdict.failure


def test_a_check_that_takes_too_long_is_ended(laboratory: Laboratory) -> None:
    program = PLURALS.replace("'no plural'", "__import__('time').sleep(600)")
    slow = spoil_plurals("    return one\n", program)
    hanging = Mutation(slow.name, slow.promise, slow.edits, slow.check, slow.violation, seconds=1)
    verdict = laboratory.try_mutation(hanging)
    assert verdict.failure == "not found within 1 s"


def test_results_tell_who_caught_what() -> None:
    mutation = spoil_plurals("", PLURALS)
    verdicts = [
        Verdict(mutation, None, "seed 7: no plural", "7", 1.2),
        Verdict(mutation, "the check passes", "", "", 3.0),
    ]
    _, caught, missed = text_table(verdicts).splitlines()
    assert caught.split() == ["plural", "Plurals.", "plurals", "7", "1"]
    assert missed.split() == ["plural", "Plurals.", "NOT", "CAUGHT", "-", "3"]
    assert "| plural | Plurals. | plurals | 7 | 1 |\n" in markdown_table(verdicts)
