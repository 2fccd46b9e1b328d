from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamfold.testing.proof_report import ProofReport
from tests.prove.proofs import PROOFS, Program, ProofTests
from tests.prove.published import BEGIN, END, PAGE, publish, read_published, with_table
from tests.prove.results import ProofResult, terminal_table
from tests.prove.runner import ROOT, run_proofs

REPORTING = """
import sys
from pathlib import Path
from streamfold.testing.proof_report import ProofReport
ProofReport("p", Path(sys.argv[-1])).write({violations}, {{"steps": 1200, "acknowledged records": 7}})
sys.exit({status})
"""


@dataclass(frozen=True, slots=True)
class Script:
    """A proof of a few lines; it gets the file for its report as the last word."""

    name: str
    code: str
    needs: tuple[str, ...] = ()

    def command(self, seed: int, short: bool) -> str:
        return shlex.join(["python", "-c", self.code, str(seed)])

    def environment(self, seed: int, short: bool) -> dict[str, str]:
        return {}

    def arguments(self, seed: int, short: bool, report: Path) -> list[str]:
        return [sys.executable, "-c", self.code, str(seed), str(report)]


def reporting(name: str, violations: int = 0, status: int = 0) -> Script:
    return Script(name, REPORTING.format(violations=violations, status=status))


def test_a_proof_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    proofs = (
        reporting("violated", violations=2, status=1),
        Script("silent", "pass"),
        reporting("crashed", status=3),
        Script("absent", "", needs=("no-such-program",)),
        reporting("held"),
    )
    results = list(run_proofs(proofs, tmp_path / "logs", seed=None, short=True))
    assert [(result.proof, result.violations, result.held) for result in results] == [
        ("violated", 2, False),
        ("silent", None, False),
        ("crashed", 0, False),
        ("absent", None, False),
        ("held", 0, True),
    ]
    failures = [result.failure for result in results]
    assert failures == [
        "",
        "failed: ended without a report, exit status 0",
        "failed: exit status 3",
        "not run: no-such-program not installed",
        "",
    ]
    assert results[-1].figures == {"steps": 1200, "acknowledged records": 7}
    assert "1,200 steps, 7 acknowledged records" in terminal_table(results)


def test_seeds_are_fresh_unless_one_is_given(tmp_path: Path) -> None:
    def seeds(seed: int | None) -> list[str]:
        proofs = (reporting("one"), reporting("other"))
        results = run_proofs(proofs, tmp_path, seed=seed, short=True)
        return [shlex.split(result.command)[-1] for result in results]

    assert seeds(7) == ["7", "7"]
    assert len({*seeds(None), *seeds(None)}) == 4


def test_failed_tests_are_violations_and_skipped_ones_are_no_proof(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\n"
        "def test_holds(record_property): record_property('kills', 20)\n"
        "def test_holds_too(record_property): record_property('kills', 3)\n"
        "def test_fails(): assert False\n"
        "def test_cannot_run(): pytest.skip('no database')\n"
    )
    proof = ProofTests("some", str(tests))
    (result,) = run_proofs((proof,), tmp_path / "logs", seed=None, short=True)
    assert result.violations == 1
    assert result.figures == {"tests": 3, "kills": 23, "tests skipped": 1}


def test_a_path_without_tests_does_not_hold(tmp_path: Path) -> None:
    empty = tmp_path / "test_none.py"
    empty.write_text("")
    (result,) = run_proofs((ProofTests("none", str(empty)),), tmp_path / "logs", seed=1, short=True)
    assert (result.violations, result.held) == (None, False)


def test_every_proof_names_what_exists() -> None:
    assert len({proof.name for proof in PROOFS}) == len(PROOFS)
    for proof in PROOFS:
        assert re.fullmatch(r"[a-z0-9-]+", proof.name)
        assert proof.command(1, short=True) != proof.command(1, short=False)
        if isinstance(proof, Program):
            assert importlib.util.find_spec(proof.module), proof
        if isinstance(proof, ProofTests):
            assert [path for path in proof.paths.split() if not (ROOT / path).is_file()] == []


def test_the_published_table_is_that_of_the_published_figures() -> None:
    assert with_table(PAGE.read_text(), read_published()) == PAGE.read_text()


def test_a_published_proof_replaces_its_row_only(tmp_path: Path) -> None:
    figures, page = tmp_path / "proofs.json", tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}{END}after\n")

    def row(proof: str, steps: int) -> ProofResult:
        return ProofResult(proof, 0, 1.0, {"steps": steps}, "python -m x", "2026-01-01", "abc", 2)

    publish([row("kills", 1), row("simulation", 2)], figures, page)
    publish([row("kills", 3)], figures, page)
    assert [(row.proof, row.figures["steps"]) for row in read_published(figures)] == [
        ("simulation", 2),
        ("kills", 3),
    ]
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("after\n")
    assert "| kills | 0 | 3 steps | 1 s | 2026-01-01, abc, 2 cores | `python -m x` |" in text


def test_a_report_is_written_only_where_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ProofReport("p", None).write(0, {})
    assert list(tmp_path.iterdir()) == []
