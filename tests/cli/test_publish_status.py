"""What `publish` shows of a table at a terminal: everything, in lines that fit."""

from __future__ import annotations

import pytest

from streamfold.cli.publishing.status import PublishedArtifact, TableSummary
from streamfold.snapshotter.status.table_status import SparkCounts

ARTIFACT = PublishedArtifact("2026-01-31T12:00:00Z", "1", 10, 2000)
TABLE = TableSummary(
    "public.orders",
    "publishing",
    position="0/17",
    lag_bytes=2500,
    lag_records=3,
    last_diff=ARTIFACT,
    last_base=ARTIFACT,
    spark=SparkCounts(jobs=24, tasks=24, rows=2104, bytes=1),
)


@pytest.mark.parametrize(("width", "count"), [(200, 1), (100, 2), (80, 3)])
def test_a_status_is_broken_between_its_parts(width: int, count: int) -> None:
    lines = TABLE.lines(width)
    assert len(lines) == count
    assert max(map(len, lines)) <= width
    assert "  ".join(line.strip() for line in lines) == str(TABLE)


def test_a_part_that_is_too_long_for_a_line_is_cut() -> None:
    assert TABLE.lines(20)[0] == "public.orders  publi"
    assert all(len(line) <= 20 for line in TABLE.lines(20))
