"""Tables that follow their streams: on their own, on request, side by side, and to the end."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import s2_sdk
from pyspark.sql import SparkSession

from streamfold.archive import Thresholds
from streamfold.snapshotter.decoding import DEAD_LETTER, EnvelopeDecoder
from streamfold.snapshotter.spark.destinations import DestinationSpec
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.status.table_status import State
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, envelope, feed
from tests.spark.snapshotter.hook import Hook
from tests.spark.snapshotter.live import Running, running
from tests.spark.snapshotter.s3 import RestartableS3
from tests.spark.snapshotter.tables import (
    check_every_boundary,
    manifest_of,
    place_manifest,
    state_of,
    table_job,
)
from tests.spark.snapshotter.waiting import wait_for

#: Storage that is down refuses connections, so two attempts notice it; slow storage is waited for.
IMPATIENT = {"attempts": "2", "request_timeout": "60", "connect_timeout": "60"}
#: Errors of a destination that is down.
UNAVAILABLE = ("blob_unavailable", "blob_outcome_unknown")
#: Failed tries of an outage.
RETRIES = 4


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as listening:
        yield listening


def test_a_table_is_published_as_it_changes_and_says_how_it_is(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path, hook: Hook
) -> None:
    stream, bodies = fresh(), list(Feed(11).changes(900))
    folder = tmp_path / "archive"
    job = table_job(server, stream, folder, events={"hook": {"type": "webhook", "url": hook.url}})
    with running(spark, tmp_path / "scratch", job) as live:
        wait_for(lambda: live.ask("GET", "/health/ready")[0], lambda status: status == 200)
        assert manifest_of(folder).head_position == "-1"
        for start in range(0, 800, 200):
            feed(server, stream, bodies[start : start + 200])
            live.wait_for_head(job.table, start + 199)
        assert live.ask("POST", "/snapshot?table=nobodys")[0] == 404
        epoch = manifest_of(folder).epoch
        assert live.ask("POST", f"/snapshot?table={job.table}")[0] == 202
        wait_for(lambda: manifest_of(folder).epoch, lambda found: found == epoch + 1)
        assert manifest_of(folder).base.rebase_reason == "requested"
        status, shown = live.ask("GET", "/status")
        assert (status, shown["tables"][job.table]["state"]) == (200, "running")
        metrics = live.ask("GET", "/metrics")[1]
        assert f'snapshotter_manifest_head_position{{table="{job.table}"}} 799.0' in metrics
        assert f'artifacts_written_total{{kind="diff",table="{job.table}"}}' in metrics
        assert live.ask("GET", "/health/live")[0] == 200
        assert live.ask("GET", "/nothing")[0] == 404
        announced = [
            (artifact.kind, artifact.to_position) for artifact in manifest_of(folder).artifacts
        ]
        wait_for(lambda: hook.reported, lambda reported: reported[: len(announced)] == announced)
        feed(server, stream, bodies[800:])
    assert live.writer.is_whole
    assert manifest_of(folder).head_position == "899"
    # The stop wrote the last diff, and waited for its event.
    assert hook.reported[-1] == ("diff", "899")
    assert check_every_boundary(folder, bodies) >= 6


def test_a_table_that_fails_stops_alone_and_says_why(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    good, bad, scratch = fresh(), fresh(), tmp_path / "scratch"
    bodies = list(Feed(3).changes(100))
    fine = table_job(server, good, tmp_path / "good", table="good")
    broken = table_job(server, bad, tmp_path / "bad", table="bad", schema=None)
    with running(spark, scratch, fine, broken) as live:
        feed(server, bad, [envelope("c", after={"id": 1, "name": "one"})])
        live.wait_for_head("bad", 0)
        feed(server, bad, [envelope("c", after={"id": 2, "name": ["no", "text"]})])
        stopped = live.wait_for_state("bad", State.STOPPED)
        assert stopped.last_error is not None
        assert stopped.last_error.code == "schema_incompatible"
        assert "name" in stopped.last_error.message
        # Its stream grows: what is not published is what the stream has more.
        feed(server, bad, [envelope("c", after={"id": n, "name": "later"}) for n in range(4, 7)])
        behind = wait_for(lambda: live.status("bad"), lambda found: found.lag_records == 4)
        assert behind.lag_seconds is not None
        assert behind.lag_seconds > 0
        assert live.ask("POST", "/snapshot?table=bad")[0] == 409
        assert live.ask("GET", "/health/ready")[0] == 503
        feed(server, good, bodies)
        live.wait_for_head("good", 99)
    assert state_of(tmp_path / "bad") == {1: {"id": 1, "name": "one"}}
    assert check_every_boundary(tmp_path / "good", bodies)
    assert not live.writer.is_whole
    # Nothing was lost: a decoder that makes dead letters of such records continues from there.
    tolerant = replace(broken, decoder=EnvelopeDecoder(("id",), DEAD_LETTER))
    with running(spark, scratch, tolerant) as live:
        live.wait_for_state("bad", State.RUNNING)
        feed(server, bad, [envelope("c", after={"id": 3, "name": "three"})])
        live.wait_for_head("bad", 5)
    assert set(state_of(tmp_path / "bad")) == {1, 3, 4, 5, 6}
    assert list((tmp_path / "bad" / "dead-letters").iterdir())


def test_a_destination_goes_away_and_comes_back_and_a_second_writer_takes_over(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, bodies = fresh(), list(Feed(5).changes(300))
    mirror, copied = tmp_path / "mirror", tmp_path / "copied"
    with RestartableS3() as s3:
        far, farther = (
            DestinationSpec(s3.url(name), {**s3.options, **IMPATIENT}) for name in ("a", "b")
        )
        job = table_job(
            server, stream, mirror, destination_specs=(far, DestinationSpec(mirror.as_uri()))
        )
        # For this one it is the second destination that goes away.
        other = table_job(
            server,
            stream,
            copied,
            table="copied",
            destination_specs=(DestinationSpec(copied.as_uri()), farther),
        )
        feed(server, stream, bodies[:100])
        with running(spark, tmp_path / "first", job, other) as first:
            for table in (job.table, "copied"):
                first.wait_for_head(table, 99)
            s3.stop()
            feed(server, stream, bodies[100:200])
            for table, spec in ((job.table, far), ("copied", farther)):
                errors = first.wait_for_error(table, *UNAVAILABLE).counts.destination_errors
                assert [uri for uri, count in errors.items() if count] == [spec.uri]
                assert len(errors) == 2
                stuck = wait_for(
                    partial(first.status, table), lambda found: found.lag_records not in (0, None)
                )
                assert stuck.lag_records == 100
                assert stuck.manifest_head == "99"
            for table, folder in ((job.table, mirror), ("copied", copied)):
                wait_for(
                    partial(first.status, table), lambda found: found.counts.failures >= RETRIES
                )
                assert len(list(folder.glob("epoch=1/diff-*"))) == 1  # tried again, written once
            s3.start()
            for table in (job.table, "copied"):
                first.wait_for_head(table, 199)
                assert first.wait_for_state(table, State.RUNNING).last_error is None
            for folder in (mirror, copied):
                assert len(list(folder.glob("epoch=1/diff-*"))) == 1
            _take_over(spark, server, first, job, bodies[200:], tmp_path / "second")
            first.wait_for_head("copied", 299)
        assert place_manifest(farther).commit_id == manifest_of(copied).commit_id
    # The second destination was brought forward with the first one, commit by commit.
    assert check_every_boundary(mirror, bodies) >= 3
    assert check_every_boundary(copied, bodies) >= 3


def _take_over(
    spark: SparkSession,
    server: Server,
    first: Running,
    job: TableJob,
    bodies: list[bytes],
    scratch: Path,
) -> None:
    with running(spark, scratch, replace(job, writer_id="writer-2")) as second:
        second.wait_for_state(job.table, State.RUNNING)
        # Before there is anything to commit.
        fenced = first.wait_for_state(job.table, State.FENCED)
        assert not fenced.ready
        assert first.ask("GET", "/health/ready")[0] == 503
        feed(server, job.stream, bodies)
        second.wait_for_head(job.table, 299)
        assert fenced.last_error is not None
        assert fenced.last_error.code == "writer_fenced_out"
        assert "writer-2" in fenced.last_error.message


def test_a_server_that_is_down_is_waited_for_and_lost_records_stop_their_table_alone(
    spark: SparkSession, own_server: Server, tmp_path: Path
) -> None:
    stream, folder, bodies = "orders", tmp_path / "archive", list(Feed(9).changes(60))
    own_server.create(stream, "others")
    for name in (stream, "others"):
        feed(own_server, name, bodies[:20])
    options = {**own_server.options, "retryTimeout": "1"}
    job = table_job(own_server, stream, folder, source=options)
    other = table_job(own_server, "others", tmp_path / "o", table="others", source=options)
    own_server.kill()
    with running(spark, tmp_path / "first", job) as live:
        live.wait_for_error(job.table, "endpoint_unavailable")
        own_server.start()
        live.wait_for_head(job.table, 19)
        own_server.kill()  # and once more, in the middle
        live.wait_for_state(job.table, State.RETRYING)
        away = wait_for(lambda: live.status(job.table), lambda found: found.lag_records is None)
        assert (away.lag_seconds, away.ready) == (None, False)
        own_server.start()
        live.wait_for_state(job.table, State.RUNNING)
    feed(own_server, stream, bodies[20:40])
    own_server.trim(stream, 30)
    with running(spark, tmp_path / "second", job, other) as live:
        lost = live.wait_for_state(job.table, State.STOPPED)
        assert lost.last_error is not None
        assert lost.last_error.code == "data_loss"
        assert "records 20 to 29 " in lost.last_error.message
        # Only options that a table has: the error of a query of Spark names others.
        assert "key_prefix" in lost.last_error.message
        assert "failOnDataLoss" not in lost.last_error.message
        feed(own_server, "others", bodies[20:])
        live.wait_for_head("others", 59)
    assert manifest_of(folder).head_position == "19"
    assert check_every_boundary(folder, bodies) == 1
    assert check_every_boundary(tmp_path / "o", bodies)


def test_a_stream_that_was_created_anew_is_refused_although_it_is_longer(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    bodies = list(Feed(9).changes(60))
    feed(server, stream, bodies[:20])
    job = table_job(server, stream, folder)
    for start in range(2):  # the second start finds the record that it knows
        with running(spark, tmp_path / f"run{start}", job) as live:
            live.wait_for_head(job.table, 19 + 10 * start)
            feed(server, stream, bodies[20 + 10 * start : 30 + 10 * start])
            live.wait_for_head(job.table, 29 + 10 * start)
    server.recreate(stream)
    feed(server, stream, bodies)
    with running(spark, tmp_path / "anew", job) as live:
        stopped = live.wait_for_state(job.table, State.STOPPED)
    assert stopped.last_error is not None
    assert stopped.last_error.code == "stream_replaced"
    assert "record 39" in stopped.last_error.message
    assert manifest_of(folder).head_position == "39"


def test_a_stream_that_is_created_anew_within_an_interval_is_refused(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    bodies = list(Feed(9).changes(60))
    feed(server, stream, bodies[:20])
    job = table_job(server, stream, folder, interval=timedelta(seconds=5))
    with running(spark, tmp_path / "scratch", job) as live:
        live.wait_for_head(job.table, 19)
        server.recreate(stream)
        feed(server, stream, bodies)
        stopped = wait_for(lambda: live.status(job.table), lambda found: found.state.is_final)
        assert stopped.state is State.STOPPED
    assert stopped.last_error is not None
    assert stopped.last_error.code in ("stream_replaced", "data_loss")  # by when it looks
    assert manifest_of(folder).head_position == "19"


def test_another_stream_is_refused_although_it_is_longer_and_a_copy_is_taken(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, other, copy, folder = fresh(), fresh(), fresh(), tmp_path / "archive"
    bodies = list(Feed(9).changes(60))
    feed(server, stream, bodies[:20])
    job = table_job(server, stream, folder)
    with running(spark, tmp_path / "first", job) as live:
        live.wait_for_head(job.table, 19)
    feed(server, other, bodies)
    with running(spark, tmp_path / "other", replace(job, stream=other)) as live:
        stopped = live.wait_for_state(job.table, State.STOPPED)
    assert stopped.last_error is not None
    assert stopped.last_error.code == "stream_replaced"
    assert "made from another one" in stopped.last_error.message
    assert manifest_of(folder).head_position == "19"
    records = server.records(stream)
    server.append(copy, [s2_sdk.Record(r.body, timestamp=r.timestamp) for r in records])
    feed(server, copy, bodies[20:])
    with running(spark, tmp_path / "copy", replace(job, stream=copy)) as live:
        live.wait_for_head(job.table, 59)
    assert check_every_boundary(folder, bodies)


def test_e26_status_says_all_a_snapshot_needs_no_table_and_a_stop_writes_the_last_diff(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "streamfold")
    stream, folder = fresh(), tmp_path / "archive"
    bodies = [envelope("c", after={"id": f"k{n}", "n": n, "note": None}) for n in range(25)]
    # Columns are not declared, and a learned base must come from records.
    job = table_job(
        server, stream, folder, schema=None, thresholds=Thresholds(max_churn_records=99)
    )
    with running(spark, tmp_path / "scratch", job) as live:
        wait_for(lambda: live.ask("GET", "/health/ready")[0], lambda status: status == 200)
        empty = manifest_of(folder)
        assert (empty.head_position, empty.base.row_count or 0) == ("-1", 0)
        assert state_of(folder) == {}
        feed(server, stream, bodies[:20])
        live.wait_for_head(job.table, 19)
        shown = live.ask("GET", "/status")[1]["tables"][job.table]
        assert (shown["position"], shown["manifest_head"], shown["epoch"]) == (19, "19", 1)
        assert (shown["last_base"]["position"], shown["last_diff"]["position"]) == ("-1", "19")
        assert shown["buffer_depth"] == 0
        assert live.ask("POST", "/snapshot")[0] == 202
        wait_for(lambda: manifest_of(folder).epoch, lambda epoch: epoch == 2)
        status, answer = live.ask("POST", "/snapshot?wait=200s")
        assert (status, answer["bases"][job.table]["epoch"]) == (200, 3)
        assert manifest_of(folder).epoch == 3
        feed(server, stream, bodies[20:])
    assert live.writer.is_whole
    assert manifest_of(folder).head_position == "24"
    found = sorted(state_of(folder).values(), key=lambda row: row["n"])
    assert found == [{"id": f"k{n}", "n": n, "note": None} for n in range(25)]
    lines = [r.getMessage() for r in caplog.records if "committed" in r.getMessage()]
    line = re.compile(
        r"table public.items: committed (base at|diff \(-?\d+,) -?\d+\]? of epoch \d: \d+ rows, "
        r"\d+ bytes, \d+\.\d\d s, reason \w+"
    )
    assert [text for text in lines if not line.fullmatch(text)] == []
    assert "base at -1 of epoch 1: 0 rows" in lines[0]
    assert "diff (-1, 19] of epoch 1: 20 rows" in lines[1]
    assert lines[2].endswith("reason requested")
    assert "diff (19, 24] of epoch 3: 5 rows" in lines[-1]


def test_a_folder_that_becomes_a_file_holds_up_its_table_alone_until_it_is_one_again(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, bodies = fresh(), list(Feed(17).changes(60))
    first, second = (DestinationSpec((tmp_path / name).as_uri()) for name in ("first", "second"))
    job = table_job(server, stream, tmp_path / "first", destination_specs=(first, second))
    other = table_job(server, stream, tmp_path / "other", table="other")
    with running(spark, tmp_path / "scratch", job, other) as live:
        feed(server, stream, bodies[:20])
        for table in (job.table, "other"):
            live.wait_for_head(table, 19)
        (tmp_path / "second").rename(tmp_path / "aside")
        (tmp_path / "second").write_text("in the way")
        feed(server, stream, bodies[20:40])
        failed = live.wait_for_error(job.table, *UNAVAILABLE)
        assert failed.last_error is not None
        assert failed.last_error.message.startswith(f"{tmp_path / 'second'} is a file")
        assert failed.counts.destination_errors[first.uri] == 0
        assert failed.counts.destination_errors[second.uri] > 0
        assert live.wait_for_head("other", 39).last_error is None
        # At once: the writer, which tries all the time, would make a folder of its own in between.
        (tmp_path / "link").symlink_to(tmp_path / "aside")
        (tmp_path / "link").replace(tmp_path / "second")
        live.wait_for_head(job.table, 39)
        assert live.wait_for_state(job.table, State.RUNNING).last_error is None
        feed(server, stream, bodies[40:])
    assert live.writer.is_whole
    for folder in ("first", "second", "other"):
        assert check_every_boundary(tmp_path / folder, bodies) >= 3
