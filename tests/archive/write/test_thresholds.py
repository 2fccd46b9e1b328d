from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.archive.write.thresholds import (
    Action,
    ChainState,
    Decision,
    Pending,
    Thresholds,
    chain_state,
    decide,
)
from streamfold.blob import open_blob_store
from streamfold.errors import InvalidError
from tests.archive.tables import Clock, at, changes, open_writer, rows

MINUTE = timedelta(minutes=1)
STATE = ChainState(10 * MINUTE, base_bytes=1000, changes=50, size_bytes=300, diffs=3)
PENDING = Pending(changes=10, size_bytes=100, table_rows=200)
DIFF, NOTHING = Decision(Action.DIFF), Decision(Action.NOTHING)


def base(trigger: str) -> Decision:
    return Decision(Action.BASE, trigger)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, DIFF),
        ({"max_interval": 10 * MINUTE}, base("max_interval")),
        ({"max_interval": 10 * MINUTE + timedelta(microseconds=1)}, DIFF),
        ({"max_diff_bytes": 100}, base("max_diff_bytes")),
        ({"max_diff_bytes": 101}, DIFF),
        ({"max_diff_fraction": 0.1}, base("max_diff_fraction")),
        ({"max_diff_fraction": 0.11}, DIFF),
        ({"max_churn_records": 60}, base("max_churn_records")),
        ({"max_churn_records": 61}, DIFF),
        ({"max_churn_fraction": 0.3}, base("max_churn_fraction")),
        ({"max_churn_fraction": 0.31}, DIFF),
        ({"max_chain_bytes": 400}, base("max_chain_bytes")),
        ({"max_chain_bytes": 401}, DIFF),
        ({"max_chain_diffs": 4}, base("max_chain_diffs")),
        ({"max_chain_diffs": 5}, DIFF),
        ({"max_replay_seconds": 0.2}, base("max_replay_seconds")),
        ({"max_replay_seconds": 0.21}, DIFF),
        # 0 turns a limit off.
        ({"max_diff_bytes": 0, "max_interval": timedelta(0), "max_churn_fraction": 0.0}, DIFF),
        # The floor beats every other limit, max_interval too, and ends at its value.
        ({"min_interval": 11 * MINUTE, "max_diff_bytes": 1, "max_interval": MINUTE}, DIFF),
        ({"min_interval": 10 * MINUTE, "max_diff_bytes": 1}, base("max_diff_bytes")),
        # Of several that are reached the first in the documented order is named.
        ({"max_interval": MINUTE, "max_diff_bytes": 1}, base("max_interval")),
        ({"max_diff_bytes": 1, "max_diff_fraction": 0.01}, base("max_diff_bytes")),
        ({"max_diff_fraction": 0.01, "max_churn_records": 1}, base("max_diff_fraction")),
        ({"max_churn_records": 1, "max_churn_fraction": 0.01}, base("max_churn_records")),
        ({"max_churn_fraction": 0.01, "max_chain_bytes": 1}, base("max_churn_fraction")),
        ({"max_chain_bytes": 1, "max_chain_diffs": 1}, base("max_chain_bytes")),
        ({"max_chain_diffs": 1, "max_replay_seconds": 0.01}, base("max_chain_diffs")),
    ],
)
def test_each_limit_is_reached_at_its_value(limits: dict[str, Any], expected: Decision) -> None:
    assert decide(Thresholds(**limits), STATE, PENDING) == expected


@pytest.mark.parametrize(
    ("state", "limits", "expected"),
    [
        (STATE, {}, NOTHING),
        (STATE, {"max_interval": 10 * MINUTE}, base("max_interval")),
        (STATE, {"max_interval": 11 * MINUTE}, NOTHING),
        (replace(STATE, diffs=0), {"max_interval": MINUTE}, NOTHING),
        (STATE, {"max_interval": MINUTE, "min_interval": 11 * MINUTE}, NOTHING),
        (STATE, {"max_diff_bytes": 1, "max_churn_records": 1, "max_chain_bytes": 1}, NOTHING),
    ],
)
def test_a_quiet_table_is_rebased_only_by_age_and_only_if_it_has_diffs(
    state: ChainState, limits: dict[str, Any], expected: Decision
) -> None:
    quiet = Pending(changes=0, size_bytes=0, table_rows=200)
    assert decide(Thresholds(**limits), state, quiet) == expected


def test_a_fraction_of_an_empty_table_is_not_a_limit() -> None:
    limits = Thresholds(max_diff_fraction=0.01, max_churn_fraction=0.01)
    assert decide(limits, replace(STATE, base_bytes=0), replace(PENDING, table_rows=0)) == DIFF


def test_many_small_diffs_add_up() -> None:
    limits = Thresholds(max_diff_bytes=1000, max_chain_bytes=1000)
    small = Pending(changes=1, size_bytes=10, table_rows=200)
    assert decide(limits, replace(STATE, size_bytes=990), small) == base("max_chain_bytes")


def test_jitter_only_ever_brings_the_age_forward_and_differs_between_tables() -> None:
    limits = Thresholds(max_interval=100 * MINUTE, jitter=0.2)
    for share, due in ((0.0, 100), (0.5, 90), (0.99, 81)):
        state = replace(STATE, jitter_share=share)
        early = replace(state, since_base=(due - 1) * MINUTE)
        assert decide(limits, early, PENDING) == DIFF
        late = replace(state, since_base=due * MINUTE)
        assert decide(limits, late, PENDING).trigger == "max_interval"


@pytest.mark.parametrize(
    "limits",
    [
        {"max_diff_bytes": -1},
        {"max_diff_fraction": float("nan")},
        {"max_churn_fraction": float("inf")},
        {"min_interval": timedelta(seconds=-1)},
        {"jitter": 1.0},
        {"jitter": -0.1},
    ],
)
def test_limits_that_mean_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidError, match=next(iter(limits))):
        Thresholds(**limits)


async def test_the_state_comes_from_the_manifest_so_the_floor_holds_over_restarts() -> None:
    blobs, clock = open_blob_store("memory:"), Clock()
    writer = await open_writer(at(blobs), clock=clock)
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    clock.advance(minutes=3)
    await writer.write_diff(changes(("INSERT", 2, "b"), ("INSERT", 3, "c")), "0", "2")
    again = await open_writer(at(blobs), ids="two", clock=clock)
    assert again.manifest is not None
    state = chain_state(again.manifest, clock.now())
    assert (state.since_base, state.changes, state.diffs) == (3 * MINUTE, 2, 1)
    assert state.size_bytes == again.manifest.chain[0].formats["jsonl"].size_bytes
    assert state.base_bytes == again.manifest.base.formats["jsonl"].size_bytes
    limits = Thresholds(min_interval=5 * MINUTE, max_diff_bytes=1)
    assert decide(limits, state, PENDING) == DIFF
    clock.advance(minutes=-60)
    assert chain_state(again.manifest, clock.now()).since_base == timedelta(0)


AMOUNTS = st.integers(0, 10_000)
INTERVALS = st.none() | st.integers(0, 100).map(lambda minutes: minutes * MINUTE)
LIMITS = st.builds(
    Thresholds,
    min_interval=INTERVALS,
    max_interval=INTERVALS,
    max_diff_bytes=st.none() | AMOUNTS,
    max_diff_fraction=st.none() | st.floats(0, 2),
    max_churn_records=st.none() | AMOUNTS,
    max_churn_fraction=st.none() | st.floats(0, 2),
    max_chain_bytes=st.none() | AMOUNTS,
    max_chain_diffs=st.none() | AMOUNTS,
    max_replay_seconds=st.none() | st.floats(0, 100),
    jitter=st.floats(0, 0.99),
)
STATES = st.builds(
    ChainState,
    since_base=st.integers(0, 200).map(lambda minutes: minutes * MINUTE),
    base_bytes=AMOUNTS,
    changes=AMOUNTS,
    size_bytes=AMOUNTS,
    diffs=AMOUNTS,
    jitter_share=st.floats(0, 1, exclude_max=True),
)
PENDINGS = st.builds(Pending, changes=AMOUNTS, size_bytes=AMOUNTS, table_rows=AMOUNTS)
RANK = {Action.NOTHING: 0, Action.DIFF: 1, Action.BASE: 2}


@given(LIMITS, STATES, PENDINGS, AMOUNTS, AMOUNTS, AMOUNTS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_more_of_anything_never_leads_to_less(
    limits: Thresholds, state: ChainState, pending: Pending, more: int, bytes_more: int, late: int
) -> None:
    grown = replace(
        state,
        changes=state.changes + more,
        size_bytes=state.size_bytes + bytes_more,
        diffs=state.diffs + more,
        since_base=state.since_base + late * MINUTE,
    )
    larger = replace(
        pending, changes=pending.changes + more, size_bytes=pending.size_bytes + bytes_more
    )
    before, after = decide(limits, state, pending), decide(limits, grown, larger)
    assert RANK[after.action] >= RANK[before.action]
    assert (after.trigger is not None) == (after.action is Action.BASE)
    if limits.min_interval and state.since_base < limits.min_interval:
        assert before.action is not Action.BASE
