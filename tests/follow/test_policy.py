from __future__ import annotations

import pytest

from streamfold.errors import InvalidError
from streamfold.follow.snapshots.policy import Policy, SinceSnapshot, due, find_prunable, wait_for
from streamfold.follow.snapshots.snapshot_store import Placement, SnapshotInfo

NONE = Policy(records=None, bytes=None, age=None, replay=None)


@pytest.mark.parametrize(
    ("policy", "since", "reason"),
    [
        (NONE, SinceSnapshot(10**9, 10**12, 10**6), None),
        (Policy(), SinceSnapshot(0, 0, 10**9), None),
        (Policy(records=10), SinceSnapshot(9, 0, 0), None),
        (Policy(records=10), SinceSnapshot(10, 0, 0), "10 records"),
        (Policy(records=1), SinceSnapshot(1, 0, 0), "1 record since"),
        (Policy(records=None, bytes=100), SinceSnapshot(5, 99, 0), None),
        (Policy(records=None, bytes=100), SinceSnapshot(5, 100, 0), "100 bytes"),
        (Policy(records=None, age=60), SinceSnapshot(1, 1, 59.9), None),
        (Policy(records=None, age=60), SinceSnapshot(1, 1, 60), "60 s since"),
        (Policy(records=None, age=60), SinceSnapshot(0, 0, 600), None),
        (Policy(records=None, replay=2), SinceSnapshot(1999, 1, 0, speed=1000), None),
        (Policy(records=None, replay=2), SinceSnapshot(2000, 1, 0, speed=1000), "take 2.0 s"),
        (Policy(records=None, replay=2), SinceSnapshot(99_999, 1, 0), None),
        (Policy(records=None, replay=2), SinceSnapshot(100_000, 1, 0), "take 2.0 s"),
    ],
)
def test_a_snapshot_is_due_when_one_limit_is_reached(
    policy: Policy, since: SinceSnapshot, reason: str | None
) -> None:
    found = due(policy, since)
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


@pytest.mark.parametrize(
    ("policy", "since", "seconds"),
    [
        (Policy(), SinceSnapshot(5, 5, 5), None),
        (Policy(age=60), SinceSnapshot(0, 0, 5), None),
        (Policy(age=60), SinceSnapshot(5, 5, 15), 45.0),
        (Policy(age=60), SinceSnapshot(5, 5, 99), 0.0),
    ],
)
def test_only_age_makes_waiting_worthwhile(
    policy: Policy, since: SinceSnapshot, seconds: float | None
) -> None:
    assert wait_for(policy, since) == seconds


@pytest.mark.parametrize("name", ["records", "bytes", "age", "replay"])
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(InvalidError, match=f"policy {name} 0"):
        Policy(**{name: 0})


@pytest.mark.parametrize(
    ("keep", "max_age", "going"),
    [
        (None, None, []),
        (2, None, [20, 10]),
        (9, None, []),
        (None, 25.0, [10]),
        (3, 15.0, [20, 10]),
        (1, 0.0, [40, 30, 20, 10]),
    ],
)
def test_snapshots_go_by_count_and_age(
    keep: int | None, max_age: float | None, going: list[int]
) -> None:
    found = [
        SnapshotInfo(Placement.EXTERNAL, str(cursor), cursor, "json", 1, created_at=cursor * 1000)
        for cursor in (40, 30, 20, 10)
    ]
    result = find_prunable(found, keep=keep, max_age=max_age, now=40_001)
    assert [info.cursor for info in result] == going
