"""Ten tables of one process, three of which misbehave in different ways: the others do not notice."""

# mypy: disallow-subclassing-any=False
# The listener's base class is Spark's, which the checker does not follow.

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

from streamfold.archive import TableSchema
from streamfold.snapshotter.decoding import EnvelopeDecoder
from streamfold.snapshotter.decoding.decoder import Decoded
from streamfold.snapshotter.spark import query as query_module
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.errors_from_spark import StreamMissingError
from streamfold.snapshotter.spark.query import ChangeQuery
from streamfold.snapshotter.status.table_status import State
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import Feed, envelope, feed
from tests.spark.snapshotter.live import running
from tests.spark.snapshotter.stepping import Table
from tests.spark.snapshotter.tables import check_every_boundary, state_of, table_job
from tests.spark.snapshotter.waiting import TIMEOUT, wait_for

#: Tables that behave, and how often each gets records while the others misbehave.
QUIET, ROUNDS, RECORDS = 7, 3, 40


@dataclass(frozen=True, slots=True)
class GatedDecoder:
    """Decodes envelopes, but not before a file exists: a table whose records take for ever."""

    gate: Path
    inner: EnvelopeDecoder = EnvelopeDecoder(("id",))  # noqa: RUF009 - frozen

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def key_fields(self) -> tuple[str, ...]:
        return self.inner.key_fields

    def decode(self, records: pa.RecordBatch | pa.Table, schema: TableSchema | None) -> Decoded:
        while len(records) and not self.gate.exists():
            time.sleep(0.05)
        return self.inner.decode(records, schema)


def test_seven_tables_publish_while_one_is_poisoned_one_has_no_stream_and_one_never_ends(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    gate, absent = tmp_path / "gate", f"{fresh()}-later"
    quiet = {f"quiet-{number}": fresh() for number in range(QUIET)}
    poisoned, stuck = fresh(), fresh()
    jobs = [
        table_job(server, stream, tmp_path / table, table=table) for table, stream in quiet.items()
    ]
    jobs += [
        table_job(server, poisoned, tmp_path / "poisoned", table="poisoned"),
        table_job(server, absent, tmp_path / "absent", table="absent"),
        table_job(server, stuck, tmp_path / "stuck", table="stuck", decoder=GatedDecoder(gate)),
    ]
    bodies = {table: list(Feed(n).changes(ROUNDS * RECORDS)) for n, table in enumerate(quiet)}
    with running(spark, tmp_path / "scratch", *jobs) as live:
        for table in (*quiet, "poisoned", "stuck"):
            live.wait_for_head(table, -1)
        waiting = live.wait_for_state("absent", State.RETRYING)
        assert waiting.last_error is not None
        assert waiting.last_error.code == StreamMissingError.code
        assert absent in waiting.last_error.message
        feed(server, stuck, [envelope("c", after={"id": 1, "name": "late"})])
        feed(server, poisoned, [envelope("c", after={"id": 1, "name": ["no", "text"]})])
        for number in range(ROUNDS):
            for table, stream in quiet.items():
                feed(server, stream, bodies[table][number * RECORDS : (number + 1) * RECORDS])
            for table in quiet:
                live.wait_for_head(table, (number + 1) * RECORDS - 1)
        assert live.wait_for_state("poisoned", State.STOPPED).manifest_head == "-1"
        held_up = wait_for(lambda: live.status("stuck"), lambda found: found.lag_records == 1)
        assert held_up.manifest_head == "-1"
        # Each of the others returns as soon as its cause is gone.
        gate.touch()
        live.wait_for_head("stuck", 0)
        server.create(absent)
        feed(server, absent, [envelope("c", after={"id": 2, "name": "created later"})])
        live.wait_for_head("absent", 0)
        for table in quiet:
            found = live.status(table)
            assert (found.state, found.counts.failures) == (State.RUNNING, 0), found
            assert found.spark.jobs >= ROUNDS
            assert found.spark.rows == ROUNDS * RECORDS
        assert live.writer.spark().rows == QUIET * ROUNDS * RECORDS + 2
    for table in quiet:
        assert check_every_boundary(tmp_path / table, bodies[table])
    assert state_of(tmp_path / "stuck") == {1: {"id": 1, "name": "late", "price": None}}
    assert state_of(tmp_path / "absent") == {2: {"id": 2, "name": "created later", "price": None}}


def test_a_stream_that_is_deleted_stops_its_own_table_only(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    gone, other = fresh(), fresh()
    jobs = [
        table_job(server, gone, tmp_path / "gone", table="gone"),
        table_job(server, other, tmp_path / "other", table="other"),
    ]
    bodies = list(Feed(5).changes(60))
    feed(server, gone, bodies[:20])
    with running(spark, tmp_path / "scratch", *jobs) as live:
        live.wait_for_head("gone", 19)
        _delete(server, gone)
        stopped = live.wait_for_state("gone", State.STOPPED)
        assert stopped.last_error is not None
        assert stopped.last_error.code == "data_loss"
        feed(server, other, bodies)
        live.wait_for_head("other", 59)
    assert check_every_boundary(tmp_path / "gone", bodies[:20])
    assert check_every_boundary(tmp_path / "other", bodies)


class Lags(StreamingQueryListener):
    """How far each table is, and where its stream ends, as listeners of Spark are told."""

    def __init__(self) -> None:
        self.last: tuple[Any, Any] | None = None

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        (source,) = event.progress.sources
        end, latest = (
            (json.loads(offset) if offset else {}).get("records", {})
            for offset in (source.endOffset, source.latestOffset)
        )
        self.last = end, latest

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass


def test_spark_shows_the_tables_of_each_job_and_the_lag_of_every_table(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    gate, lags = tmp_path / "gate", Lags()
    streams = {"first": fresh(), "second": fresh(), "stuck": fresh()}
    jobs = [
        table_job(server, stream, tmp_path / table, table=table)
        for table, stream in streams.items()
    ]
    jobs[-1] = replace(jobs[-1], decoder=GatedDecoder(gate))
    spark.streams.addListener(lags)
    try:
        with running(spark, tmp_path / "scratch", *jobs) as live:
            for table in streams:
                live.wait_for_head(table, -1)
            feed(server, streams["stuck"], Feed(7).changes(5))
            # Its batch ends without it, and it continues apart.
            wait_for(
                lambda: lags.last, lambda found: found is not None and found[1].get("stuck") == 5
            )
            for table in ("first", "second"):
                feed(server, streams[table], Feed(7).changes(30))
            for table in ("first", "second"):
                live.wait_for_head(table, 29)
            ends, tails = {"first": 30, "second": 30, "stuck": 0}, dict.fromkeys(streams, 30)
            wait_for(lambda: lags.last, lambda found: found == (ends, {**tails, "stuck": 5}))
            assert live.ask("POST", "/snapshot?table=first&wait=200s")[0] == 200
            gate.touch()
            live.wait_for_head("stuck", 4)
    finally:
        spark.streams.removeListener(lags)
    wait_for(  # Spark shows jobs a moment after they began
        lambda: _descriptions(spark),
        lambda shown: (
            any("take in " in text and "first [0, 30)" in text for text in shown)
            and any(text.startswith("fold first to ") for text in shown)
        ),
    )


def test_tables_continue_when_their_query_ends_and_again_with_the_next_one(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, bodies = fresh(), list(Feed(9).changes(90))
    job = table_job(server, stream, tmp_path / "archive")
    with running(spark, tmp_path / "scratch", job) as live:
        feed(server, stream, bodies[:30])
        live.wait_for_head(job.table, 29)
        (query,) = wait_for(lambda: spark.streams.active, lambda active: len(active) == 1)
        while (tmp_path / "scratch").exists():  # as a cleaner of temporary folders does
            shutil.rmtree(tmp_path / "scratch", ignore_errors=True)  # Spark may write there
        query.stop()
        feed(server, stream, bodies[30:60])
        live.wait_for_head(job.table, 59)
        wait_for(lambda: spark.streams.active, lambda active: active and active[0].id != query.id)
        feed(server, stream, bodies[60:])
        live.wait_for_head(job.table, 89)
        assert live.status(job.table).counts.failures == 0
    assert check_every_boundary(tmp_path / "archive", bodies)


def test_tables_return_to_their_query_as_soon_as_it_serves(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(query_module, "_UNPLANNED", 0.2)
    bodies, query = list(Feed(11).changes(90)), ChangeQuery(spark, tmp_path / "scratch")
    job = table_job(server, fresh(), tmp_path / "archive")
    with DriverLoop() as loop, closing(query):
        table = Table(job, loop, query)
        for number in range(2):  # the first range waits for the query, the second one does not
            feed(server, job.stream, bodies[number * 30 : (number + 1) * 30])
            assert table.take_in().manifest_head == str(number * 30 + 29)
        monkeypatch.setattr(query_module, "_UNPLANNED", TIMEOUT)
        query.start()
        wait_for(lambda: query.has_served, bool)
        feed(server, job.stream, bodies[60:])
        assert table.take_in().manifest_head == "89"
        (running_query,) = spark.streams.active
        wait_for(
            lambda: [progress.numInputRows for progress in running_query.recentProgress],
            lambda rows: sum(rows) == 1,
        )
    assert check_every_boundary(tmp_path / "archive", bodies)


def _descriptions(spark: SparkSession) -> list[str]:
    """What Spark's UI says of jobs."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    found = (jobs.apply(number).description() for number in range(jobs.size()))
    return [str(text.get()) for text in found if text.isDefined()]


def _delete(server: Server, stream: str) -> None:
    async def work(basin: Any) -> None:
        await basin.delete_stream(stream)

    server.talk(work)
