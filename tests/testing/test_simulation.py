"""The simulation: repeatable, quiet while the store keeps its promises, loud when it breaks one."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from streamfold.store import keys
from streamfold.store.engine.engine import Op
from streamfold.testing.simulation import ViolationError, simulate
from streamfold.testing.simulation.storage import SimulatedStorage

#: Runs of half a second each.
SEEDS = range(1, 2001 if os.environ.get("STREAMFOLD_PROVE") else 13)

pytestmark = pytest.mark.filterwarnings(
    # A crash ends a process between two steps: what it was doing never ends.
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::RuntimeWarning",
)


def test_a_store_keeps_its_promises_in_every_run() -> None:
    acked = unknown = crashes = 0
    for seed in SEEDS:
        report = simulate(seed)
        acked += report.acked
        unknown += report.unknown
        crashes += report.crashes
    assert acked > 100 * len(SEEDS)
    assert unknown
    assert crashes > len(SEEDS)


def test_a_seed_is_one_run() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.digest != simulate(8).digest


def find_violation(seeds: range = range(1, 100)) -> str:
    for seed in seeds:
        try:
            simulate(seed)
        except ViolationError as violation:
            return str(violation)
    raise AssertionError("no run found anything")


def test_storage_that_forgets_an_acknowledged_chunk_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply, commits = SimulatedStorage.apply, 0

    def forget(self: SimulatedStorage, ops: Sequence[Op]) -> None:
        nonlocal commits
        commits += 1
        kept = [op for op in ops if not (keys.is_chunk(op[0]) and commits % 50 == 0)]
        apply(self, kept)

    monkeypatch.setattr(SimulatedStorage, "apply", forget)
    story = find_violation()
    assert story.startswith("seed ")
    assert "append" in story


def test_storage_that_brings_an_old_state_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, former = SimulatedStorage.apply, dict[bytes, bytes]()

    def bring_back(self: SimulatedStorage, ops: Sequence[Op]) -> None:
        states = [(key, value) for key, value in ops if key.startswith(b"\x03") and value]
        for key, value in states:
            if len(former) < 3:
                former.setdefault(key, value)
        apply(self, [(key, former.get(key, value)) if value else (key, None) for key, value in ops])

    monkeypatch.setattr(SimulatedStorage, "apply", bring_back)
    story = find_violation()
    assert "tail went back" in story or "acknowledged" in story
