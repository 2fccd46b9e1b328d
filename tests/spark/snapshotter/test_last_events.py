"""A stop waits for a bounded time until sinks have the last events."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from streamfold.snapshotter.spark.table.archive import TableArchive
from streamfold.snapshotter.spark.table.events import TableEvents
from streamfold.snapshotter.spark.table_job import TableJob
from tests.ports import free_port
from tests.spark.server import Server
from tests.spark.snapshotter.hook import Hook
from tests.spark.snapshotter.tables import table_job
from tests.spark.snapshotter.waiting import TIMEOUT


def _job(folder: Path, url: str) -> TableJob:
    job_server = Server(folder)  # never asked: only the archive is written
    return table_job(
        job_server, "items", folder / "archive", events={"hook": {"type": "webhook", "url": url}}
    )


async def _commit(job: TableJob) -> TableArchive:
    archive = TableArchive(job)
    await archive.open()
    await archive.begin_empty(-1, "first", None, None)
    return archive


def test_the_event_of_a_commit_right_before_the_stop_is_delivered(tmp_path: Path) -> None:
    async def stop(job: TableJob) -> None:
        events = TableEvents(job, last_events=TIMEOUT)
        events.start((await _commit(job)).primary)
        events.wake()
        await events.stop(deliver=True)

    with Hook() as hook:
        asyncio.run(stop(_job(tmp_path, hook.url)))
        assert hook.reported == [("snapshot", "-1")]


def test_a_stop_does_not_wait_for_a_sink_that_is_down_and_the_next_run_sends_the_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    job = _job(tmp_path, f"http://127.0.0.1:{port}/events")

    async def stop(archive: TableArchive, events: TableEvents, *, fails: bool) -> None:
        events.start(archive.primary)
        async with asyncio.timeout(TIMEOUT):
            while fails and not events.errors["hook"]:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)
        await events.stop(deliver=True)

    archive = asyncio.run(_commit(job))
    with caplog.at_level(logging.WARNING, "streamfold.snapshotter"):
        asyncio.run(stop(archive, TableEvents(job, last_events=0.2), fails=True))
    assert "the next run sends them: sink hook: " in caplog.text
    with Hook(port) as hook:
        asyncio.run(stop(archive, TableEvents(job, last_events=TIMEOUT), fails=False))
        assert hook.reported == [("snapshot", "-1")]


def test_a_fenced_writer_leaves_the_events_to_the_one_that_took_the_table(tmp_path: Path) -> None:
    job = _job(tmp_path, f"http://127.0.0.1:{free_port()}/events")
    events = TableEvents(job, last_events=float("inf"))

    async def stop() -> None:
        events.start((await _commit(job)).primary)
        await events.stop(deliver=False)

    asyncio.run(stop())
    assert set(events.errors) == {"hook"}
