"""The simulation is repeatable, passes on a sound store, and detects broken guarantees."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from streamfold.server.auth import Access
from streamfold.server.s2.responses import EventEncoding
from streamfold.store import keys
from streamfold.store.engine.engine import Op
from streamfold.store.read.requests import ReadBatch
from streamfold.testing.simulation import ViolationError, draw_plan, simulate
from streamfold.testing.simulation.loop import quiet
from streamfold.testing.simulation.plan import format_numbers, parse_numbers
from streamfold.testing.simulation.program import shrink
from streamfold.testing.simulation.storage import SimulatedStorage

PROVE = bool(os.environ.get("STREAMFOLD_PROVE"))
SEEDS = range(1, 2001 if PROVE else 31)


@pytest.fixture(autouse=True)
def bury_dead_processes() -> Iterator[None]:
    """Free what killed processes have left: their tasks never end, and Python warns about each."""
    yield
    with quiet():
        for _ in range(3):
            gc.collect()


def test_store_and_faces_keep_their_promises_in_every_run() -> None:
    reports = [simulate(seed) for seed in SEEDS]
    assert sum(report.acked for report in reports) > 15 * len(SEEDS)
    assert sum(report.requests for report in reports) > 30 * len(SEEDS)
    for figure in ("unknown", "refused", "crashes", "stops", "replacements", "vanished"):
        assert any(getattr(report, figure) for report in reports), figure
    assert any(report.faults for report in reports)


def test_the_store_alone_keeps_its_promises_in_every_run() -> None:
    reports = [simulate(seed, faces=False) for seed in SEEDS[: len(SEEDS) // 4]]
    assert sum(report.acked for report in reports) > 10 * len(reports)
    assert not any(report.requests for report in reports)


def test_a_seed_is_one_run() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.steps == second.steps
    assert first.digest != simulate(8).digest


_DIGESTS = """
import logging
logging.disable(logging.CRITICAL)
from streamfold.testing.simulation import simulate
print([(simulate(seed).digest, simulate(seed).steps) for seed in (3, 19)])
"""


def test_a_seed_is_the_same_run_in_another_process() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 2 * 64


def find_violation(seeds: range = range(1, 200), *, faces: bool = False) -> str:
    for seed in seeds:
        try:
            simulate(seed, faces=faces)
        except ViolationError as violation:
            return str(violation)
    raise AssertionError("no run found anything")


def forget_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have storage lose the records of one commit in fifty."""
    apply, commits = SimulatedStorage.apply, 0

    def forget(self: SimulatedStorage, ops: Sequence[Op]) -> None:
        nonlocal commits
        commits += 1
        kept = [op for op in ops if not (keys.is_chunk(op[0]) and commits % 50 == 0)]
        apply(self, kept)

    monkeypatch.setattr(SimulatedStorage, "apply", forget)


def test_storage_that_forgets_an_acknowledged_chunk_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_chunks(monkeypatch)
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


def test_a_token_that_outlives_its_revocation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    grant_of, grants = Access._grant_of, dict[str, object]()

    async def remember(self: Access, header: str) -> object:
        if header not in grants:
            grants[header] = await grant_of(self, header)
        return grants[header]

    monkeypatch.setattr(Access, "_grant_of", remember)
    assert "was accepted after its end" in find_violation(faces=True)


def test_a_follower_that_misses_a_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = EventEncoding.encode

    def forget(self: EventEncoding, batch: ReadBatch) -> tuple[bytes, ...]:
        return () if batch.first_seq_num == 3 else encode(self, batch)

    monkeypatch.setattr(EventEncoding, "encode", forget)
    assert "a follower got" in find_violation(faces=True)


def test_a_violation_shrinks_to_a_program_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = SimulatedStorage.apply

    def forget_some(self: SimulatedStorage, ops: Sequence[Op]) -> None:
        apply(self, [op for op in ops if not (keys.is_chunk(op[0]) and b"13" in (op[1] or b""))])

    monkeypatch.setattr(SimulatedStorage, "apply", forget_some)
    story = find_violation()
    plan = draw_plan(int(story.split()[1].rstrip(":")), faces=False)
    smaller, told = shrink(plan)
    assert 0 < len(smaller.operations) <= 3
    numbers = format_numbers([operation.number for operation in smaller.operations])
    with pytest.raises(ViolationError) as violation:
        simulate(plan.seed, plan=plan.keep(parse_numbers(numbers)))
    assert str(violation.value) == told


def test_numbers_of_operations_are_written_as_ranges() -> None:
    assert format_numbers([3, 4, 5, 9, 11, 12]) == "3-5,9,11-12"
    assert parse_numbers("3-5,9,11-12") == {3, 4, 5, 9, 11, 12}
    assert parse_numbers(format_numbers([])) == set()


def test_the_command_reports_its_figures(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "streamfold.testing.simulation", "--first", "5"]
    subprocess.run([*command, "--seeds", "2", "--report", str(report)], check=True)
    line = json.loads(report.read_text())
    assert line["proof"] == "simulation"
    assert line["violations"] == 0
    assert line["figures"]["programs"] == 2
    assert line["figures"]["steps"] > 1000
