"""Lag is the distance from the table to the stream's tail, or None if unknown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest
from streamfold.errors import BlobUnavailableError
from streamfold.snapshotter.spark.table.progress import TableProgress, UnreadRecords
from streamfold.snapshotter.spark.tasks.intake import Batch
from streamfold.snapshotter.status.table_status import State

NOW = datetime(2026, 6, 3, 12, 0, tzinfo=UTC)


@pytest.fixture
def progress() -> TableProgress:
    return TableProgress("public.items", "items", ["file:///archive/"], lambda: NOW)


def _manifest(head: int) -> Manifest:
    base = Artifact(
        kind="snapshot",
        epoch=1,
        from_position=None,
        to_position=str(head),
        created_at="2026-06-03T11:00:00.000000Z",
        row_count=1,
        formats={"jsonl": FormatFiles(uri="file:///archive/a", size_bytes=1)},
    )
    return Manifest(
        table="public.items",
        epoch=1,
        updated_at=base.created_at,
        head_position=base.to_position,
        artifacts=(base,),
        position_order="seq_num",
        commit_number=1,
    )


def _batch(last: int, timestamp: datetime) -> Batch:
    return Batch(
        last=last, records=last + 1, changes=1, ignored=0, dead=0, size_bytes=1,
        truncated_at=-1, timestamp=_milliseconds(timestamp), seen=last,
    )  # fmt: skip


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _lag(progress: TableProgress) -> tuple[int | None, float | None]:
    status = progress.status({})
    return status.lag_records, status.lag_seconds


def test_a_lag_of_which_one_end_is_unknown_is_unknown(progress: TableProgress) -> None:
    assert _lag(progress) == (None, None)
    progress.tail = 12  # what is committed is not known
    assert _lag(progress) == (None, None)
    progress.adopt(_manifest(9), {})
    assert _lag(progress) == (2, None)
    progress.tail = None  # the server is away
    assert _lag(progress) == (None, None)
    progress.tail = 10
    assert _lag(progress) == (0, 0.0)


def test_a_table_without_an_archive_lacks_everything_from_its_start_on(
    progress: TableProgress,
) -> None:
    progress.start = 4
    progress.tail = 10
    assert _lag(progress) == (6, None)


def test_a_table_that_is_stuck_shows_what_the_stream_has_more(progress: TableProgress) -> None:
    progress.adopt(_manifest(9), {})
    progress.enter(State.RUNNING)
    progress.tail = 10
    progress.caught_up = True
    assert progress.status({}).ready
    progress.tail = 40
    progress.unread = UnreadRecords(10, _milliseconds(NOW - timedelta(seconds=7)))
    # New records come all the time: those since the last update do not make it unready.
    assert progress.status({}).ready
    assert _lag(progress) == (30, 7.0)
    progress.fail(BlobUnavailableError("away"), State.RETRYING)
    assert not progress.status({}).ready
    assert _lag(progress) == (30, 7.0)


def test_the_age_of_the_lag_follows_what_is_taken_in(progress: TableProgress) -> None:
    progress.adopt(_manifest(9), {})
    progress.tail = 40
    progress.unread = UnreadRecords(10, _milliseconds(NOW - timedelta(seconds=7)))
    progress.take(_batch(29, NOW - timedelta(seconds=3)), 1.0, None)
    assert _lag(progress) == (10, 3.0)
    # Records without a change are taken in, although no artifact ends there.
    progress.take(_batch(39, NOW), 1.0, None)
    assert _lag(progress) == (0, 0.0)
