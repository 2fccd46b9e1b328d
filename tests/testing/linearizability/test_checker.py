"""The checker rejects every wrong history with a reason, and accepts every right one."""

from __future__ import annotations

from collections import Counter

import pytest

from streamfold.testing.linearizability import Judgement, check, parse_history, report
from streamfold.testing.linearizability.history import lines
from tests.testing.linearizability.exhaustive import linearizable
from tests.testing.linearizability.handmade import RIGHT, WRONG
from tests.testing.linearizability.random_histories import random_history


@pytest.mark.parametrize("name", WRONG)
def test_wrong_histories_are_violations_with_a_reason(name: str) -> None:
    history = WRONG[name].script().history
    assert not linearizable(history)
    verdict = check(history)
    assert verdict.judgement is Judgement.VIOLATION
    assert verdict.contradiction is not None
    printed = report(history, verdict.contradiction)
    assert WRONG[name].sentence in printed


@pytest.mark.parametrize("name", RIGHT)
def test_right_histories_that_look_wrong_are_linearizable(name: str) -> None:
    history = RIGHT[name].script().history
    assert linearizable(history)
    assert check(history).judgement is Judgement.LINEARIZABLE


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_a_history_means_the_same_after_it_was_written_and_read(name: str) -> None:
    original = ({**WRONG, **RIGHT}[name]).script().history
    written = list(lines(original))
    copy = parse_history("copy", written)
    assert list(lines(copy)) == written
    assert check(copy).judgement is check(original).judgement


def test_the_checker_agrees_with_trying_every_order() -> None:
    verdicts: Counter[Judgement] = Counter()
    for seed in range(1500):
        history = random_history(seed)
        verdict = check(history)
        verdicts[verdict.judgement] += 1
        expected = Judgement.LINEARIZABLE if linearizable(history) else Judgement.VIOLATION
        explanation = report(history, verdict.contradiction) if verdict.contradiction else ""
        assert verdict.judgement is expected, f"seed {seed}: {explanation}"
    assert min(verdicts[Judgement.LINEARIZABLE], verdicts[Judgement.VIOLATION]) > 300, verdicts
