"""A new archive of a trimmed stream is rejected, or states what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import s2_sdk

import streamfold.archive
from streamfold.archive import Thresholds
from streamfold.snapshotter.errors import StreamTrimmedError
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.errors_from_spark import is_retryable
from streamfold.snapshotter.spark.table_job import TableJob
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.stepping import Table
from tests.spark.snapshotter.tables import manifest_of, state_of, table_job


@pytest.fixture
def open_table(loop: DriverLoop) -> Callable[[TableJob], Table]:
    return lambda job: Table(job, loop)


@pytest.fixture
def job(server: Server, fresh: Callable[[], str], tmp_path: Path) -> TableJob:
    """A table of five rows whose stream has lost the first two, and holds a command at its end."""
    stream = fresh()
    feed(server, stream, [inserted(number) for number in range(5)])
    server.trim(stream, 2)
    return table_job(server, stream, tmp_path / "archive")


def inserted(number: int) -> bytes:
    return envelope("c", {"id": number}, {"id": number, "name": "new", "price": 1.0})


def folder_of(job: TableJob) -> Path:
    return Path(job.destination_specs[0].url.removeprefix("file://"))


def test_a_stream_without_its_beginning_is_refused_with_the_ways_out(
    open_table: Callable[[TableJob], Table], job: TableJob
) -> None:
    with pytest.raises(StreamTrimmedError, match=r"begins at record 2: .*'public.items'") as raised:
        open_table(job).take_in()
    assert not is_retryable(raised.value)
    for way_out in ("--recopy", 'source.on_trimmed = "publish"', "source.start"):
        assert way_out in raised.value.message
    assert not (folder_of(job) / "manifest.json").exists()


def test_a_stream_that_has_lost_everything_is_refused(
    open_table: Callable[[TableJob], Table], server: Server, job: TableJob
) -> None:
    server.trim(job.stream, 7)  # this command included
    with pytest.raises(StreamTrimmedError, match="begins at record 7"):
        open_table(job).take_in()
    status = open_table(replace(job, publish_trimmed=True)).take_in()
    assert (status.incomplete_before, status.manifest_head) == ("7", "6")
    assert state_of(folder_of(job)) == {}


def test_a_table_that_is_accepted_says_what_it_lacks_until_it_is_emptied(
    open_table: Callable[[TableJob], Table], server: Server, job: TableJob
) -> None:
    job = replace(job, publish_trimmed=True, thresholds=Thresholds(max_chain_diffs=2))
    folder = folder_of(job)
    assert open_table(job).take_in().incomplete_before == "2"
    assert set(state_of(folder)) == {2, 3, 4}
    for number in (6, 7, 8):  # diffs, and a base of them
        feed(server, job.stream, [inserted(number)])
        assert open_table(job).take_in().incomplete_before == "2"
    manifest = manifest_of(folder)
    assert manifest.epoch == 2
    assert {artifact.incomplete_before for artifact in manifest.artifacts} == {"2"}
    archive = asyncio.run(_open(folder))
    assert archive.incomplete_before == archive.plan().incomplete_before == "2"
    assert "incomplete: changes before 2 are missing" in f"{archive!r} {archive.plan()}"
    feed(server, job.stream, [envelope("t"), inserted(9)])
    assert open_table(job).take_in().incomplete_before is None
    assert set(state_of(folder)) == {9}
    emptied = asyncio.run(_open(folder))
    assert emptied.incomplete_before is None
    assert emptied.plan(position=manifest.head_position).incomplete_before == "2"


async def _open(folder: Path) -> streamfold.archive.Archive:
    return await streamfold.archive.open(folder)


@pytest.mark.parametrize("most", [100, 2])
def test_a_table_that_is_emptied_later_on_lacks_nothing(
    open_table: Callable[[TableJob], Table], server: Server, job: TableJob, most: int
) -> None:
    feed(server, job.stream, [envelope("t"), *map(inserted, range(10, 13))])
    status = open_table(replace(job, max_records=most)).take_in()
    assert (status.incomplete_before, status.lag_records) == (None, 0)
    assert set(state_of(folder_of(job))) == {10, 11, 12}


def test_a_stream_that_begins_with_a_first_copy_lacks_nothing(
    open_table: Callable[[TableJob], Table], server: Server, job: TableJob
) -> None:
    stream = job.stream
    server.trim(stream, 7)
    declared = envelope("s", columns=[{"name": "id", "type": "BIGINT"}])
    position = [(b"lsn", b"0/10")]
    copied = [
        s2_sdk.Record(body, [*position, (b"copy", b"%d" % number)])
        for number, body in enumerate([declared, inserted(1), inserted(2)])
    ]
    end = s2_sdk.Record(envelope("e", txn="copy 0/10"), [*position, (b"copy", b"end")])
    server.append(stream, [*copied, end])
    assert open_table(job).take_in().incomplete_before is None
    assert set(state_of(folder_of(job))) == {1, 2}


def test_a_start_that_is_given_is_where_the_table_begins(
    open_table: Callable[[TableJob], Table], server: Server, job: TableJob, tmp_path: Path
) -> None:
    assert open_table(replace(job, start="2")).take_in().incomplete_before is None
    later = table_job(server, job.stream, tmp_path / "later", start="latest")
    assert open_table(later).take_in().incomplete_before == "6"  # it leaves out what was before
    feed(server, job.stream, [inserted(9)])
    assert open_table(later).take_in().incomplete_before == "6"


def test_a_stream_that_never_had_a_record_is_whole(
    open_table: Callable[[TableJob], Table],
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
) -> None:
    for start in ("earliest", "latest"):
        empty = table_job(server, fresh(), tmp_path / start, start=start)
        assert open_table(empty).take_in().incomplete_before is None
