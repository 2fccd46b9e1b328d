"""A stop waits, for a bounded time, until sinks have the events of what was committed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.archive import TableArchive, TableEvents
from tests.ports import free_port
from tests.spark.server import Server
from tests.spark.snapshotter.hook import Hook
from tests.spark.snapshotter.tables import table_job, table_schema


def _job(folder: Path, url: str) -> TableJob:
    job_server = Server(folder)  # never asked: only the archive is written
    return table_job(
        job_server, "items", folder / "archive", events={"hook": {"type": "webhook", "url": url}}
    )


def _commit(job: TableJob, loop: DriverLoop) -> TableArchive:
    archive = TableArchive(job, loop)
    archive.begin_empty(table_schema(), -1, "first")
    return archive


def test_the_event_of_a_commit_right_before_the_stop_is_delivered(
    loop: DriverLoop, tmp_path: Path
) -> None:
    with Hook() as hook:
        job = _job(tmp_path, hook.url)
        events = TableEvents(job, loop)
        events.start(_commit(job, loop).primary)
        events.wake()
        events.stop(deliver=True)
        assert hook.reported == [("snapshot", "-1")]


def test_a_stop_does_not_wait_for_a_sink_that_is_down_and_the_next_run_sends_the_event(
    loop: DriverLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    job = _job(tmp_path, f"http://127.0.0.1:{port}/events")
    events = TableEvents(job, loop, last_events=0.2)
    archive = _commit(job, loop)
    events.start(archive.primary)
    with caplog.at_level(logging.WARNING, "streamfold.snapshotter"):
        events.stop(deliver=True)
    assert "the next run sends them: sink hook: " in caplog.text
    with Hook(port) as hook:
        again = TableEvents(job, loop)
        again.start(archive.primary)
        again.stop(deliver=True)
        assert hook.reported == [("snapshot", "-1")]


def test_a_fenced_writer_leaves_the_events_to_the_one_that_took_the_table(
    loop: DriverLoop, tmp_path: Path
) -> None:
    job = _job(tmp_path, f"http://127.0.0.1:{free_port()}/events")
    events = TableEvents(job, loop, last_events=float("inf"))
    events.start(_commit(job, loop).primary)
    events.stop(deliver=False)
    assert set(events.errors) == {"hook"}
