"""S2's public checker agrees with ours. Run by `make prove`; needs s2-verification."""

from __future__ import annotations

import pytest

from streamfold.testing.linearizability import Judgement, check
from streamfold.testing.linearizability.porcupine import Porcupine, resolved
from tests.testing.linearizability.handmade import RIGHT, WRONG
from tests.testing.linearizability.random_histories import public_part, random_history

SECONDS = 60.0


@pytest.fixture(scope="module")
def porcupine(tmp_path_factory: pytest.TempPathFactory) -> Porcupine:
    return Porcupine.find(tmp_path_factory.mktemp("porcupine"))


@pytest.mark.parametrize("name", WRONG)
def test_it_finds_the_wrong_histories_that_its_model_covers(
    porcupine: Porcupine, name: str
) -> None:
    expected = Judgement.VIOLATION if WRONG[name].public else Judgement.LINEARIZABLE
    assert porcupine.judge_history(WRONG[name].script().history, SECONDS) is expected


@pytest.mark.parametrize("name", RIGHT)
def test_it_accepts_the_right_histories(porcupine: Porcupine, name: str) -> None:
    history = RIGHT[name].script().history
    assert porcupine.judge_history(history, SECONDS) is Judgement.LINEARIZABLE
    certain = resolved(history, check(history))
    assert not any(operation.unknown for operation in certain.operations)
    assert check(certain).judgement is Judgement.LINEARIZABLE
    assert porcupine.judge_history(certain, SECONDS) is Judgement.LINEARIZABLE


def test_both_judges_agree_on_random_histories(porcupine: Porcupine) -> None:
    judgements = []
    for seed in range(300):
        history = public_part(random_history(seed, 14))
        expected = check(history).judgement
        actual = porcupine.judge_history(history, SECONDS)
        assert actual is expected, f"seed {seed}"
        judgements.append(actual)
    assert min(map(judgements.count, (Judgement.LINEARIZABLE, Judgement.VIOLATION))) > 50
