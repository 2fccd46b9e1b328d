"""Tables that follow their streams: on their own, on request, side by side, and to the end."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from streamfold.archive.events import Backoff
from streamfold.snapshotter.decoding import DEAD_LETTER, EnvelopeDecoder
from streamfold.snapshotter.service import State, StatusServer, TableStatus
from streamfold.spark.writer.job import TableJob
from streamfold.spark.writer.places import Place
from streamfold.spark.writer.service import SnapshotWriter
from tests.spark.server import Server
from tests.spark.writer.feeding import Feed, envelope, feed
from tests.spark.writer.hook import Hook
from tests.spark.writer.s3 import RestartableS3
from tests.spark.writer.tables import check_every_boundary, manifest_of, state_of, table_job
from tests.spark.writer.waiting import wait_for

#: Options of storage that give up after seconds, not minutes.
IMPATIENT = {"attempts": "2", "request_timeout": "5", "connect_timeout": "2"}


class Running:
    """A writer and its HTTP side."""

    def __init__(self, writer: SnapshotWriter, port: int) -> None:
        self.writer = writer
        self._port = port

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            kind = response.headers["Content-Type"]
            return response.status, json.loads(body) if "json" in kind else body.decode()
        finally:
            connection.close()

    def status(self, table: str) -> TableStatus:
        return self.writer.statuses()[table]

    def wait_for_head(self, table: str, position: int) -> TableStatus:
        return wait_for(
            lambda: self.status(table), lambda found: found.manifest_head == str(position)
        )

    def wait_for_state(self, table: str, state: State) -> TableStatus:
        return wait_for(lambda: self.status(table), lambda found: found.state is state)


@contextmanager
def running(spark: SparkSession, scratch: Path, *jobs: TableJob) -> Iterator[Running]:
    writer = SnapshotWriter(spark, jobs, scratch=scratch, backoff=Backoff(0.2, 1.0))
    with writer, StatusServer(writer, "127.0.0.1", 0) as served:
        yield Running(writer, served.port)


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
        assert live.ask("POST", "/snapshot")[0] == 400
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
        wait_for(lambda: hook.told, lambda told: told[: len(announced)] == announced)
        feed(server, stream, bodies[800:])
    assert live.writer.is_whole
    assert manifest_of(folder).head_position == "899"
    assert check_every_boundary(folder, bodies) >= 6


def test_a_table_that_fails_stops_alone_and_says_why(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    good, bad, scratch = fresh(), fresh(), tmp_path / "scratch"
    bodies = list(Feed(3).changes(100))
    fine = table_job(server, good, tmp_path / "good", table="good")
    broken = table_job(server, bad, tmp_path / "bad", table="bad", schema=None)
    with running(spark, scratch, fine, broken) as live:
        assert live.ask("POST", "/snapshot?table=bad")[0] == 409  # nothing to be a base of
        feed(server, bad, [envelope("c", after={"id": 1, "name": "one"})])
        live.wait_for_head("bad", 0)
        feed(server, bad, [envelope("c", after={"id": 2, "name": ["no", "text"]})])
        stopped = live.wait_for_state("bad", State.STOPPED)
        assert stopped.last_error is not None
        assert stopped.last_error.code == "schema_incompatible"
        assert "name" in stopped.last_error.message
        assert live.ask("POST", "/snapshot?table=bad")[0] == 409
        assert live.ask("GET", "/health/ready")[0] == 503
        feed(server, good, bodies)
        live.wait_for_head("good", 99)
    assert state_of(tmp_path / "bad") == {1: {"id": 1, "name": "one"}}
    assert check_every_boundary(tmp_path / "good", bodies)
    assert not live.writer.is_whole
    # Nothing was lost: a decoder that keeps such records apart goes on from there.
    tolerant = replace(broken, decoder=EnvelopeDecoder(("id",), DEAD_LETTER))
    with running(spark, scratch, tolerant) as live:
        live.wait_for_state("bad", State.RUNNING)
        feed(server, bad, [envelope("c", after={"id": 3, "name": "three"})])
        live.wait_for_head("bad", 2)
    assert set(state_of(tmp_path / "bad")) == {1, 3}
    assert list((tmp_path / "bad" / "dead-letters").iterdir())


def test_the_destination_goes_away_and_comes_back_and_a_second_writer_takes_over(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, bodies = fresh(), list(Feed(5).changes(300))
    folder = tmp_path / "mirror"
    with RestartableS3() as s3:
        first_place = Place(s3.url("archive"), {**s3.options, **IMPATIENT})
        job = table_job(server, stream, folder, places=(first_place, Place(folder.as_uri())))
        feed(server, stream, bodies[:100])
        with running(spark, tmp_path / "first", job) as first:
            first.wait_for_head(job.table, 99)
            s3.stop()
            feed(server, stream, bodies[100:200])
            failed = first.wait_for_state(job.table, State.RETRYING)
            assert failed.last_error is not None
            assert failed.last_error.code in ("blob_unavailable", "blob_outcome_unknown")
            assert list(failed.counts.destination_errors) == [s3.url("archive") + "/"]
            s3.start()
            first.wait_for_head(job.table, 199)
            first.wait_for_state(job.table, State.RUNNING)
            _take_over(spark, server, first, job, bodies[200:], tmp_path / "second")
    # The second destination was brought forward with the first one, commit by commit.
    assert check_every_boundary(folder, bodies) >= 3


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
        feed(server, job.stream, bodies)
        second.wait_for_head(job.table, 299)
        fenced = first.wait_for_state(job.table, State.FENCED)
        assert fenced.last_error is not None
        assert fenced.last_error.code == "writer_fenced_out"
        assert "writer-2" in fenced.last_error.message


def test_a_server_that_is_down_is_waited_for_and_lost_records_stop_the_table(
    spark: SparkSession, own_server: Server, tmp_path: Path
) -> None:
    stream, folder, bodies = "orders", tmp_path / "archive", list(Feed(9).changes(60))
    own_server.create(stream)
    feed(own_server, stream, bodies[:20])
    options = {**own_server.options, "retryTimeout": "1"}
    job = table_job(own_server, stream, folder, source=options)
    own_server.kill()
    with running(spark, tmp_path / "first", job) as live:
        down = live.wait_for_state(job.table, State.RETRYING)
        assert down.last_error is not None
        assert down.last_error.code == "endpoint_unavailable"
        own_server.start()
        live.wait_for_head(job.table, 19)
        own_server.kill()  # and once more, in the middle
        live.wait_for_state(job.table, State.RETRYING)
        own_server.start()
        live.wait_for_state(job.table, State.RUNNING)
    feed(own_server, stream, bodies[20:40])
    own_server.trim(stream, 30)
    with running(spark, tmp_path / "second", job) as live:
        lost = live.wait_for_state(job.table, State.STOPPED)
        assert lost.last_error is not None
        assert lost.last_error.code == "data_loss"
        assert "20" in lost.last_error.message
    assert manifest_of(folder).head_position == "19"
    assert check_every_boundary(folder, bodies) == 1
