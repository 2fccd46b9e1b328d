"""Task and driver code without Spark: error transport, lag, decoding, jobs."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from streamfold.archive import SchemaIncompatibleError, TableSchema
from streamfold.archive.manifest.model import Artifact, FormatFiles
from streamfold.backoff import Backoff
from streamfold.cli.exit_status import VerbFailedError
from streamfold.cli.servers.snapshotter import snapshotter
from streamfold.errors import (
    BlobUnavailableError,
    InvalidError,
    StreamfoldError,
)
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.decoding import EnvelopeDecoder
from streamfold.snapshotter.errors import ValuesIncompatibleError
from streamfold.snapshotter.net_changes import fill_unsent, has_unsent, net_schema
from streamfold.snapshotter.spark import DeadLetterStream, DestinationSpec, Snapshotter, table_jobs
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.errors_from_spark import (
    ChangesLostError,
    QueryFailedError,
    error_from_spark,
    in_terms_of_tables,
    is_retryable,
)
from streamfold.snapshotter.spark.table import writer as writer_module
from streamfold.snapshotter.spark.table.archive import utc_now
from streamfold.snapshotter.spark.table.failures import TableFailures
from streamfold.snapshotter.spark.table.progress import CommitLog, TableProgress, commit_line
from streamfold.snapshotter.spark.tasks.batch import TableWork
from streamfold.snapshotter.spark.tasks.decode import DecodeReport, DecodeStep, decode
from streamfold.snapshotter.spark.tasks.results import (
    REPORT,
    Batches,
    TaskResult,
    raise_task_errors,
    task,
    task_results,
)
from streamfold.snapshotter.status.table_status import State
from streamfold.snapshotter.transactions import CLOSED
from streamfold.spark import DataLossError, StreamGoneError
from streamfold.spark.errors import CarriesErrors
from streamfold.testing.change_decoder_kit import records
from tests.ports import free_port
from tests.spark.server import Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.stepping import Table, TasksInThisProcess
from tests.spark.snapshotter.tables import state_of, table_job, table_schema
from tests.spark.snapshotter.waiting import wait_for


@task
def _failing(batches: Batches, error: StreamfoldError) -> Iterator[TaskResult]:
    yield from task_results(batches)
    raise error


@pytest.mark.parametrize(
    "error", [SchemaIncompatibleError("price", "int64", "string"), BlobUnavailableError("away")]
)
def test_an_error_of_a_task_reaches_the_driver_whole(error: StreamfoldError) -> None:
    class Row:
        def __init__(self, batch: pa.RecordBatch) -> None:
            self.bucket = batch["bucket"][0].as_py()
            self.payload = batch["payload"][0].as_py()

    rows = [Row(batch) for batch in _failing([], error=error)]
    with pytest.raises(type(error)) as raised:
        raise_task_errors(rows)
    assert (raised.value.message, raised.value.__dict__) == (error.message, error.__dict__)


class _Reader(CarriesErrors):
    def plan(self) -> None:
        raise DataLossError("s", 1, 5, 9)

    def read(self) -> Iterator[int]:
        yield 1
        self.plan()


# Upstream defect 12.
@pytest.mark.parametrize("call", [_Reader.plan, lambda reader: list(reader.read())])
def test_an_error_that_spark_made_text_of_is_found_again_with_its_fields(
    call: Callable[[_Reader], object],
) -> None:
    with pytest.raises(DataLossError) as raised:
        call(_Reader())
    text = "".join(traceback.format_exception(raised.value))
    assert text.count("streamfold-error: ") == 1
    found = error_from_spark(RuntimeError(f"Job aborted: {text}SQLSTATE: 38000\n\tat org.apache"))
    assert isinstance(found, DataLossError)
    assert vars(found) == vars(DataLossError("s", 1, 5, 9))
    assert not is_retryable(found)


def test_all_that_spark_calls_carries_our_errors() -> None:
    for module in ("archive.readers", "archive.source", "stream.sink", "stream.source"):
        import_module(f"streamfold.spark.{module}")
    called = [*_below(DataSource), *_below(DataSourceReader), *_below(DataSourceStreamReader)]
    called += [*_below(DataSourceArrowWriter), *_below(DataSourceStreamArrowWriter)]
    ours = [kind for kind in called if kind.__module__.startswith("streamfold.")]
    assert len(ours) >= 8
    assert all(issubclass(kind, CarriesErrors) for kind in ours)


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def test_only_what_our_errors_carry_counts_not_their_names_in_a_text() -> None:
    for text in (
        "streamfold.spark.errors.DataLossError: records 1 to 4 of stream 's' are gone",
        "streamfold-error: {not JSON}",
        'streamfold-error: {"kinds": ["builtins.OSError"], "fields": {}}',
        'a row says streamfold-error: {"code": "data_loss"}',
    ):
        assert isinstance(error_from_spark(RuntimeError(text)), QueryFailedError)
    assert is_retryable(error_from_spark(RuntimeError("Job aborted")))


@pytest.mark.parametrize(
    "error",
    [
        DataLossError("orders", 20, 30, 30),
        StreamGoneError("orders", 20),
        ChangesLostError.shortened("orders", 10, 20),
    ],
)
def test_lost_records_are_answered_with_options_that_the_snapshotter_has(
    error: StreamfoldError,
) -> None:
    found = in_terms_of_tables(error, "http://127.0.0.1:1")
    assert isinstance(found, DataLossError)
    assert found.code == "data_loss"
    assert not is_retryable(found)
    assert "'orders'" in found.message
    assert "key_prefix" in found.message
    assert "failOnDataLoss" not in found.message
    assert StreamfoldError.from_wire(found.to_wire()).message == found.message


def test_columns_that_were_not_sent_come_from_the_table_as_it_was() -> None:
    fields = [("id", pa.int64()), ("photo", pa.list_(pa.string())), ("name", pa.string())]
    schema = TableSchema.of(pa.schema(fields), ["id"])
    state = [{"id": n, "photo": [str(n)], "name": "old"} for n in range(5)]
    wanted = [(2, ["photo"]), (3, []), (4, ["name", "photo"]), (9, ["photo"])]
    net = pa.Table.from_pylist(
        [
            {
                "action": "UPDATE",
                "key": {"id": key},
                "before": None,
                "after": {"id": key, "photo": None, "name": "new"},
                "unchanged": unchanged,
            }
            for key, unchanged in wanted
        ],
        schema=net_schema(schema),
    )
    assert has_unsent(net)
    batches = [pa.RecordBatch.from_pylist([row], schema=schema.arrow) for row in state]
    rows = fill_unsent(net, batches, schema)["after"].to_pylist()
    assert [(row["photo"], row["name"]) for row in rows] == [
        (["2"], "new"),
        (None, "new"),
        (["4"], "old"),
        (None, "new"),
    ]


def _decoded(bodies: list[bytes], **changed: Any) -> tuple[list[DecodeReport], list[int], Any]:
    """Reports and first records of task results of one batch, and the letters that were written."""
    letters = _Letters()
    step = DecodeStep(EnvelopeDecoder(("id",)), table_schema(), 1, -1, letters)
    rows = [
        batch.to_pylist()[0]
        for records_batch in records(bodies).to_batches()
        for batch in decode([records_batch], step=replace(step, **changed))
    ]
    reports = [row["payload"] for row in rows if row["bucket"] == REPORT]
    reported = [msgspec.json.decode(payload, type=DecodeReport) for payload in reports]
    return reported, [row["seq_num"] for row in rows if row["bucket"] >= 0], letters.written


class _Letters:
    """Keeps letters here."""

    location = "nowhere"

    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, letters: pa.Table) -> None:
        self.written += letters["seq_num"].to_pylist()


def test_a_batch_is_split_where_the_transaction_begins_that_it_ends_in() -> None:
    bodies = [
        envelope("c", after={"id": 0}),
        b"junk",
        envelope("t"),
        envelope("c", after={"id": 1}, txn="a"),
        envelope("e", txn="a"),
        envelope("c", after={"id": 2}, txn="b"),
        b"junk",
        envelope("t", txn="b"),
        envelope("c", after={"id": 3}, txn="b"),
    ]
    (before, inside), results, written = _decoded(bodies)
    assert (before.first, before.last, before.records) == (0, 4, 5)
    assert (before.changes, before.dead, before.ignored, before.truncated_at) == (3, 1, 1, 2)
    assert (inside.first, inside.last, inside.records) == (5, 8, 4)
    assert (inside.changes, inside.dead, inside.ignored, inside.truncated_at) == (3, 1, 0, 7)
    assert (before.tail, inside.tail.id, inside.tail.since) == (CLOSED, "b", 5)
    assert results == [0, 5]
    assert written == [1, 6]
    # Read a second time, after the first six were looked at: their letters are there already.
    assert _decoded(bodies, lettered=5)[2] == [6]
    (whole,), results, _ = _decoded(bodies[5:])
    assert (whole.first, whole.records, whole.tail.joins, results) == (0, 4, True, [0])


def test_jobs_follow_the_configuration_and_show_no_secret(tmp_path: Path) -> None:
    secret = "wHiSpEr-42"
    source = {"server": "http://127.0.0.1:1", "basin": "some-basin", "table": "orders"}
    configuration = read_configuration(
        {
            "source": {**source, "stream": "changes"},
            "destinations": [{"type": "local", "path": str(tmp_path)}],
            "dead_letters": {"stream": "dead"},
            "events": [{"type": "webhook", "url": "http://127.0.0.1:2/hook"}],
            "formats": {"snapshot": ["parquet"], "diff": ["jsonl.zst"]},
            "transactions": {"max_records": 5},
        }
    )
    [job] = table_jobs(configuration, {"S2_ACCESS_TOKEN": secret})
    assert (job.table, job.stream, job.source["accessToken"]) == ("orders", "changes", secret)
    assert secret not in repr(job)
    assert isinstance(job.dead_letters, DeadLetterStream)
    assert job.destination_specs[0].url == (tmp_path / "orders").as_uri()
    assert [form.extension for form in job.diff_formats] == [".jsonl.zst"]
    assert job.transactions.max_records == 5
    [again] = table_jobs(configuration, {})
    assert list(again.events) == list(job.events)
    with pytest.raises(InvalidError, match="memory"):
        DestinationSpec("memory:")


def test_validate_says_what_is_in_effect_and_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "writer.toml"
    file.write_text(
        'source = {server = "http://127.0.0.1:1", table = "t"}\n'
        f'destinations = [{{type = "local", path = "{tmp_path}"}}]\n'
    )
    done = CliRunner().invoke(snapshotter, ["validate", "--config", str(file)])
    assert done.exit_code == 0
    assert "diff.interval" in done.output
    given = ["validate", "--config", str(file), "--set", "diff.interval=never"]
    failed = CliRunner().invoke(snapshotter, given)
    assert isinstance(failed.exception, VerbFailedError)
    assert failed.output.startswith("diff.interval: never must be")


def test_two_writers_on_one_machine_are_distinguished() -> None:
    source = {"server": "h:1", "table": "t", "schema": "public"}
    destinations = [{"type": "local", "path": "/archive"}]
    named = {"source": source | {"client_id": "archive-1"}, "destinations": destinations}
    unnamed = {"source": source, "destinations": destinations}
    ids = [table_jobs(read_configuration(raw), {})[0].writer_id for raw in (named, named, unnamed)]
    assert len(set(ids)) == 3
    assert all(f"{socket.gethostname()}/{os.getpid()}-" in name for name in ids)
    assert ids[0].startswith("archive-1@")


def test_a_table_keeps_its_archive_though_its_name_has_its_schema_now() -> None:
    source = {"server": "h:1", "table": "t", "schema": "public"}
    raw = {"source": source, "destinations": [{"type": "local", "path": "/archive"}]}
    [job] = table_jobs(read_configuration(raw), {})
    assert (job.table, job.former_names, job.destination_specs[0].url) == (
        "public.t",
        ("t",),
        "file:///archive/t",
    )


def test_an_error_of_a_task_says_which_destination_failed(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    spec = DestinationSpec((tmp_path / "taken").as_uri())

    @task
    def opening(batches: Batches) -> Iterator[TaskResult]:
        spec.open()
        yield from task_results(batches)

    class Row:
        bucket, payload = -2, next(opening([]))["payload"][0].as_py()

    with pytest.raises(BlobUnavailableError, match="is a file") as failure:
        raise_task_errors([Row()])
    assert failure.value.destination == spec.uri


def test_destinations_and_servers_are_checked_without_spark_and_the_others_continue(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, nobody = fresh(), f"http://127.0.0.1:{free_port()}"
    away = {**server.options, "endpoint": nobody}
    jobs = [
        table_job(server, stream, tmp_path / "good", table="good"),
        table_job(server, stream, Path("/dev/null/x"), table="bad"),
        table_job(server, stream, tmp_path / "lost", table="lost", source=away),
    ]
    states = {"good": State.STARTING, "bad": State.RETRYING, "lost": State.RETRYING}
    with Snapshotter(jobs, scratch=tmp_path / "scratch") as writer:
        writer.check()  # waits for a few seconds only: the checks of a busy machine may take longer
        seen = wait_for(
            writer.statuses, lambda seen: {name: seen[name].state for name in seen} == states
        )
    good, bad, lost = (seen[name] for name in states)
    assert good.last_error is None
    assert bad.last_error is not None
    assert bad.last_error.message.startswith("folder /dev/null/x cannot be used (Not a directory)")
    assert bad.counts.destination_errors.keys() == {"file:///dev/null/x/"}
    assert bad.counts.destination_errors["file:///dev/null/x/"] >= 1  # checked until it publishes
    assert lost.last_error is not None
    assert lost.last_error.message.startswith(f"source.server {nobody} cannot be reached")
    assert set(lost.counts.destination_errors.values()) == {0}


def test_a_failure_of_spark_is_a_sentence() -> None:
    error = error_from_spark(RuntimeError("Job aborted.\n  at org.apache.spark\n  at java.base"))
    assert isinstance(error, QueryFailedError)
    assert error.message == (
        "a query or a job of Spark failed with RuntimeError: Job aborted; run with --verbose to see "
        "the whole error"
    )


def test_the_way_through_a_backlog_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "streamfold")
    log = CommitLog("t")
    log.follows("s", 100, 1100)
    log.took(599, 50.0)
    log.took(1099, 50.0)  # what comes from now on is not backlog
    log.took(1200, 50.0)
    assert [record.getMessage() for record in caplog.records] == [
        "table t: follows stream s from record 100 on, 1000 records behind",
        "table t: 500 of 1000 records of the backlog taken in (50 %), 50 records/s, about 10 s left",
    ]


def test_a_failure_that_differs_in_a_random_name_alone_is_logged_once_until_the_table_recovers(
    caplog: pytest.LogCaptureFixture,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamfold.snapshotter.spark.table.failures._REPEAT", 0.0)
    job = table_job(server, "any", tmp_path)
    progress = TableProgress(job.table, job.stream, job.destinations, utc_now)
    failures = TableFailures(job, progress, Backoff())
    with caplog.at_level(logging.WARNING):
        for name in ("1f0a9b3c4d5e", "99aa88bb77cc"):
            failures.note(BlobUnavailableError(f"diff-7-{name}t12.parquet: permission denied"))
        failures.note(BlobUnavailableError("diff-8-99aa88bb77cct13.parquet: permission denied"))
        progress.recover()
        failures.note(BlobUnavailableError("diff-8-22aa88bb77cct13.parquet: permission denied"))
    assert [text.split()[2] for text in caplog.messages] == [
        "diff-7-1f0a9b3c4d5et12.parquet:",
        "diff-8-99aa88bb77cct13.parquet:",
        "diff-8-22aa88bb77cct13.parquet:",
    ]
    assert progress.status({}).counts.failures == 4


def test_one_record_and_one_row_are_logged_in_the_singular(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "streamfold")
    CommitLog("t").follows("s", 100, 101)
    assert caplog.records[0].getMessage().endswith("from record 100 on, 1 record behind")
    files = {"jsonl": FormatFiles(uri="a.jsonl", size_bytes=70, parts=())}
    at: dict[str, Any] = {
        "epoch": 2,
        "to_position": "9",
        "created_at": "2026-06-03T12:00:00Z",
        "formats": files,
    }
    base = Artifact(kind="snapshot", from_position=None, row_count=1, commit_id="a", **at)
    diff = Artifact(kind="diff", from_position="5", change_count=2, commit_id="b", **at)
    assert commit_line(base, True, 0.5).startswith("base at 9 of epoch 2: 1 row, 70 bytes, 0.50 s")
    assert commit_line(diff, False, 0.5).startswith("diff (5, 9] of epoch 2: 2 rows, 70 bytes")


@pytest.mark.parametrize("stops", [False, True])
def test_a_search_for_a_truncate_ends_after_a_step_if_a_stop_waits_for_it(
    stops: bool,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of a stream may take hours to read."""
    monkeypatch.setattr(writer_module, "STOP_SEARCH_SECONDS", 0.0)
    stream = fresh()
    bodies = [envelope("c", after={"id": n, "name": "fits", "price": 1}) for n in range(9)]
    unfit = envelope("c", after={"id": 9, "name": "unfit", "price": "dear"})
    feed(server, stream, [bodies[0], unfit, *bodies[1:], envelope("t")])
    searched: list[tuple[int, int]] = []

    class Searched(TasksInThisProcess):
        async def first_truncate(self, work: TableWork) -> int | None:
            searched.append((work.start, work.end))
            if stops:
                table.writer.stop()
            return await super().first_truncate(work)

    with DriverLoop() as loop:
        job = table_job(server, stream, tmp_path / "table", max_records=3, schema=table_schema())
        table = Table(job, loop, Searched())
        table.open()
        if stops:
            with pytest.raises(ValuesIncompatibleError):
                table.advance()
            assert searched == [(2, 5)]
        else:
            table.advance()
            assert searched == [(2, 5), (5, 8), (8, 11)]
            assert state_of(tmp_path / "table") == {}


class _Page(BaseHTTPRequestHandler):
    """Answers every request with a page, as a proxy in front of the wrong server does."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>welcome</html>")

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def test_a_server_that_answers_with_something_else_is_reported_by_its_own_table_only(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as wrong:
        threading.Thread(target=wrong.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{wrong.server_address[1]}"
        odd = table_job(server, "odd", tmp_path / "odd", table="odd")
        odd = replace(odd, source={**server.options, "endpoint": url})
        fine = table_job(server, fresh(), tmp_path / "fine", table="fine")
        with Snapshotter([odd, fine], scratch=tmp_path / "scratch") as writer:
            writer.check()
            found = wait_for(lambda: writer.statuses()["odd"], lambda s: s.last_error is not None)
            assert found.state is State.RETRYING
            assert writer.statuses()["fine"].last_error is None
        wrong.shutdown()
