"""What tasks and driver do, without Spark: errors on their way, lag, jobs, status over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamfold.archive import SchemaIncompatibleError, TableSchema
from streamfold.cli.failures import VerbFailedError
from streamfold.cli.snapshotter import snapshotter
from streamfold.errors import (
    BlobUnavailableError,
    ConflictError,
    InvalidError,
    NotFoundError,
    StreamfoldError,
)
from streamfold.snapshotter.configuration import read_configuration
from streamfold.snapshotter.decoding import EnvelopeDecoder
from streamfold.snapshotter.netting import net_schema
from streamfold.snapshotter.service import Counts, Failure, State, StatusServer, TableStatus
from streamfold.snapshotter.transactions import CLOSED
from streamfold.spark import DataLossError
from streamfold.spark.writer import DeadLetterStream, Place, table_jobs
from streamfold.spark.writer.decode import DecodeReport, DecodeStep, decode
from streamfold.spark.writer.failures import QueryFailedError, may_pass, told_by
from streamfold.spark.writer.listener import lag_of
from streamfold.spark.writer.parcels import (
    REPORT,
    Batches,
    Parcel,
    parcels_of,
    raise_failures,
    task,
)
from streamfold.spark.writer.unsent import fill_unsent, has_unsent
from streamfold.testing.change_decoder_kit import records
from tests.spark.writer.feeding import envelope
from tests.spark.writer.tables import table_schema


@task
def _failing(batches: Batches, error: StreamfoldError) -> Iterator[Parcel]:
    yield from parcels_of(batches)
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
        raise_failures(rows)
    assert (raised.value.message, raised.value.__dict__) == (error.message, error.__dict__)


def test_errors_that_spark_made_text_of_are_found_again() -> None:
    text = f"""An exception was thrown from the Python worker:
    raise found
streamfold.spark.failures.DataLossError: {DataLossError("s", 1, 5, 9).message}
SQLSTATE: 38000"""
    found = told_by(RuntimeError(text))
    assert isinstance(found, DataLossError)
    assert found.message == DataLossError("s", 1, 5, 9).message
    assert not may_pass(found)
    other = told_by(RuntimeError("Job aborted"))
    assert isinstance(other, QueryFailedError)
    assert may_pass(other)


def test_the_lag_is_what_lies_between_two_offsets() -> None:
    assert lag_of('{"s": 5}', '{"s": 12}') == 7
    assert lag_of('{"s": 5}', '{"s": 5}') == 0
    assert lag_of(None, '{"s": 5}') == lag_of("null", "null") == 0


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
    """Reports and first records of parcels of one batch, and the letters that were written."""
    letters = _Letters()
    step = DecodeStep(EnvelopeDecoder(("id",)), table_schema(), 1, -1, letters)
    rows = [
        batch.to_pylist()[0]
        for records_batch in records(bodies).to_batches()
        for batch in decode([records_batch], step=replace(step, **changed))
    ]
    reports = [row["payload"] for row in rows if row["bucket"] == REPORT]
    told = [msgspec.json.decode(payload, type=DecodeReport) for payload in reports]
    return told, [row["seq_num"] for row in rows if row["bucket"] >= 0], letters.written


class _Letters:
    """Keeps letters here."""

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
    (before, inside), parcels, written = _decoded(bodies)
    assert (before.first, before.last, before.records) == (0, 4, 5)
    assert (before.changes, before.dead, before.ignored, before.truncated_at) == (3, 1, 1, 2)
    assert (inside.first, inside.last, inside.records) == (5, 8, 4)
    assert (inside.changes, inside.dead, inside.ignored, inside.truncated_at) == (3, 1, 0, 7)
    assert (before.tail, inside.tail.id, inside.tail.since) == (CLOSED, "b", 5)
    assert parcels == [0, 5]
    assert written == [1, 6]
    # Read a second time, after the first six were looked at: their letters are there already.
    assert _decoded(bodies, lettered=5)[2] == [6]
    (whole,), parcels, _ = _decoded(bodies[5:])
    assert (whole.first, whole.records, whole.tail.joins, parcels) == (0, 4, True, [0])


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
    assert job.places[0].url == (tmp_path / "orders").as_uri()
    assert [form.extension for form in job.diff_formats] == [".jsonl.zst"]
    assert job.transactions.max_records == 5
    [again] = table_jobs(configuration, {})
    assert list(again.events) == list(job.events)
    with pytest.raises(InvalidError, match="memory"):
        Place("memory:")


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


class _Tables:
    """Two tables in known states."""

    def statuses(self) -> dict[str, TableStatus]:
        failure = Failure("schema_incompatible", "column 'a'", "2026-06-03T12:00:00Z")
        counts = Counts(bases=1, diffs=2, destination_errors={"s3://b/": 3})
        fine = TableStatus(table="a", stream="s", state=State.RUNNING, ready=True, counts=counts)
        stopped = TableStatus(table="b", stream="t", state=State.STOPPED, last_error=failure)
        return {"a": fine, "b": stopped}

    def request_snapshot(self, table: str) -> None:
        if table not in self.statuses():
            raise NotFoundError("no such table")
        if table == "b":
            raise ConflictError("it stopped")


def test_the_status_of_every_table_is_served() -> None:
    with StatusServer(_Tables(), "127.0.0.1", 0) as served:

        def ask(method: str, path: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
            connection.request(method, path, body=b"ignored" if method == "POST" else None)
            answer = connection.getresponse()
            found = answer.status, answer.read()
            connection.close()
            return found

        status, body = ask("GET", "/status")
        shown = json.loads(body)["tables"]
        assert (status, shown["b"]["last_error"]["code"]) == (200, "schema_incompatible")
        assert ask("GET", "/health/live")[0] == 200
        assert ask("GET", "/health/ready")[0] == 503
        posts = {
            path: ask("POST", f"/snapshot{path}")[0]
            for path in ("?table=a", "?table=b", "?table=c", "")
        }
        assert posts == {"?table=a": 202, "?table=b": 409, "?table=c": 404, "": 400}
        assert ask("POST", "/status")[0] == ask("GET", "/snapshot")[0] == 404
        metrics = ask("GET", "/metrics")[1].decode()
    assert 'snapshotter_artifacts_written_total{kind="diff",table="a"} 2.0' in metrics
    assert 'snapshotter_destination_errors_total{dest="s3://b/",table="a"} 3.0' in metrics
    assert 'snapshotter_up{table="b"} 0.0' in metrics


def test_two_writers_on_one_machine_are_told_apart() -> None:
    source = {"server": "h:1", "table": "t", "schema": "public"}
    places = [{"type": "local", "path": "/archive"}]
    named = {"source": source | {"client_id": "archive-1"}, "destinations": places}
    unnamed = {"source": source, "destinations": places}
    ids = [table_jobs(read_configuration(raw), {})[0].writer_id for raw in (named, named, unnamed)]
    assert len(set(ids)) == 3
    assert all(f"{socket.gethostname()}/{os.getpid()}-" in name for name in ids)
    assert ids[0].startswith("archive-1@")


def test_a_table_keeps_its_archive_though_its_name_has_its_schema_now() -> None:
    source = {"server": "h:1", "table": "t", "schema": "public"}
    raw = {"source": source, "destinations": [{"type": "local", "path": "/archive"}]}
    [job] = table_jobs(read_configuration(raw), {})
    assert (job.table, job.former_names, job.places[0].url) == (
        "public.t",
        ("t",),
        "file:///archive/t",
    )
