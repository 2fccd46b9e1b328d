"""The Delta Lake log of a published table: after each base, and never in the way of a commit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import polars as pl
import pytest
from deltalake import DeltaTable
from moto.moto_server.werkzeug_app import create_backend_app
from pyspark.sql import SparkSession
from werkzeug.serving import make_server

from streamfold.archive import Retention
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.spark import table_jobs
from streamfold.snapshotter.status.table_status import State
from tests.s3 import OneAtATime, S3Server, s3_client
from tests.spark.server import BASIN, TOKEN, Server
from tests.spark.snapshotter.feeding import envelope, feed
from tests.spark.snapshotter.live import Running, running
from tests.spark.snapshotter.process import Process
from tests.spark.snapshotter.tables import manifest_of, place_manifest, state_of, table_job
from tests.spark.snapshotter.waiting import TIMEOUT, wait_for

TABLE = "items"


def change(key: int) -> bytes:
    return envelope("c", after={"id": key, "name": f"n{key}"})


def write_base(live: Running, table: str) -> None:
    status, _ = live.ask("POST", f"/snapshot?table={table}&wait=200s")
    assert status == 200


def test_bases_are_versions_and_a_broken_log_delays_only_itself(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, folder = fresh(), tmp_path / "items"
    job = table_job(
        server, stream, folder, delta=True, buckets=2, retention=Retention(keep_epochs=3)
    )
    feed(server, stream, [change(n) for n in range(4)])
    with running(spark, tmp_path / "scratch", job) as live:
        live.wait_for_head(job.table, 3)
        wait_for(lambda: DeltaTable.is_deltatable(str(folder)), bool)
        feed(server, stream, [change(4)])
        write_base(live, job.table)
        wait_for(lambda: DeltaTable(folder).history()[0]["streamfold.position"], "4".__eq__)
        # The files that the log names are those of the base, and Spark reads them.
        files = DeltaTable(folder).file_uris()
        assert {row.id for row in spark.read.parquet(*files).collect()} == {0, 1, 2, 3, 4}
        assert set(pl.read_delta(str(folder))["id"]) == {0, 1, 2, 3, 4}

        newest = max((folder / "_delta_log").glob("*.json"))
        entry = newest.read_bytes()
        newest.write_bytes(b"{")
        feed(server, stream, [change(5)])
        write_base(live, job.table)
        failed = wait_for(
            lambda: live.status(job.table), lambda found: found.counts.delta_errors > 0
        )
        assert (failed.state, failed.manifest_head) == (State.RUNNING, "5")
        assert set(state_of(folder)) == {0, 1, 2, 3, 4, 5}
        assert "snapshotter_delta_errors_total" in live.ask("GET", "/metrics")[1]

        newest.write_bytes(entry)
        feed(server, stream, [change(6)])
        write_base(live, job.table)
        wait_for(lambda: DeltaTable(folder).history()[0]["streamfold.position"], "6".__eq__)
    assert set(DeltaTable(folder).to_pyarrow_table()["id"].to_pylist()) == set(range(7))
    epochs = [int(entry["streamfold.epoch"]) for entry in DeltaTable(folder).history()]
    assert epochs[0] == manifest_of(folder).epoch
    assert epochs == sorted(epochs, reverse=True)


class GuardedLog:
    """An S3 server that, while it is guarded, stores everything but Delta logs."""

    def __init__(self) -> None:
        self._app: Any = OneAtATime(create_backend_app)
        self.guarded = True
        #: Set when a client wants to write to a log; it gets its answer after `answer` is set.
        self.wanted, self.answer = Event(), Event()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        logged = "/_delta_log/" in environ["PATH_INFO"] and environ["REQUEST_METHOD"] == "PUT"
        if logged and self.guarded:
            self.wanted.set()
            self.answer.wait(TIMEOUT)
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer


@contextmanager
def guarded_s3(log: GuardedLog, bucket: str) -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, log, threaded=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        found = S3Server(f"http://127.0.0.1:{server.server_port}", bucket)
        s3_client(found).create_bucket(Bucket=bucket)
        yield found
    finally:
        log.answer.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Mirrored:
    """A table in a bucket and in a folder, both with a Delta log."""

    def __init__(self, server: Server, stream: str, folder: Path, aws: S3Server) -> None:
        source = {"server": server.url, "basin": BASIN, "stream": stream, "table": TABLE}
        self.configuration = {
            "source": source,
            "schema": "id BIGINT NOT NULL, name STRING",
            "key_prefix": f"{TABLE}/",
            "diff": {"interval": "500ms"},
            "formats": {"snapshot": ["parquet"], "diff": ["jsonl"]},
            "destinations": [
                {"type": "s3", "bucket": aws.bucket},
                {"type": "local", "path": str(folder)},
            ],
            "retention": {"keep_epochs": 3},
            "delta": True,
            "http": {"host": "127.0.0.1", "port": 0},
        }
        [self.job] = table_jobs(read_configuration(self.configuration), {"S2_ACCESS_TOKEN": TOKEN})
        self._folder = folder / TABLE
        self._aws = aws

    def of_folder(self) -> dict[str, set[int]]:
        """The ids in every version, read from its files, by the position of its base."""
        entries = sorted((self._folder / "_delta_log").glob("*.json"))
        positions = [_position(entry.read_bytes()) for entry in entries]
        return _versions(str(self._folder), positions, {})

    def of_bucket(self) -> dict[str, set[int]]:
        """The same of the bucket."""
        client, bucket = s3_client(self._aws), self._aws.bucket
        listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{TABLE}/_delta_log/")
        keys = sorted(found["Key"] for found in listed.get("Contents", ()))
        bodies = [client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys]
        options = {f"aws_{name}": value for name, value in self._aws.options().items()}
        options["aws_allow_http"] = "true"
        return _versions(f"s3://{bucket}/{TABLE}", [_position(body) for body in bodies], options)


def _position(entry: bytes) -> str:
    """The position in an entry of the log; `DeltaTable.history` would block the S3 server here."""
    actions = [json.loads(line) for line in entry.splitlines()]
    (found,) = (a["commitInfo"]["streamfold.position"] for a in actions if "commitInfo" in a)
    return str(found)


def _versions(uri: str, positions: list[str], options: dict[str, str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for version, position in enumerate(positions):
        table = DeltaTable(uri, version=version, storage_options=options)
        found[position] = set(table.to_pyarrow_table()["id"].to_pylist())
    return found


@pytest.fixture
def log() -> GuardedLog:
    return GuardedLog()


@pytest.fixture
def aws(
    log: GuardedLog, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Server]:
    with guarded_s3(log, f"delta-{uuid4().hex[:12]}") as found:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
            # Tasks run in processes that were given their variables when Spark started.
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
        yield found


def test_a_destination_that_refuses_its_delta_log_delays_only_that_one(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    log: GuardedLog,
    aws: S3Server,
) -> None:
    stream = fresh()
    table = Mirrored(server, stream, tmp_path, aws)
    log.answer.set()
    feed(server, stream, [change(n) for n in range(3)])
    with running(spark, tmp_path / "scratch", table.job) as live:
        live.wait_for_head(TABLE, 2)
        wait_for(table.of_folder, {"2": {0, 1, 2}}.__eq__)
        status = wait_for(lambda: live.status(TABLE), lambda found: found.counts.delta_errors > 0)
        assert (status.state, table.of_bucket()) == (State.RUNNING, {})
        log.guarded = False
        feed(server, stream, [change(3)])
        write_base(live, TABLE)
        both = {"2": {0, 1, 2}, "3": {0, 1, 2, 3}}
        assert wait_for(table.of_bucket, both.__eq__) == table.of_folder()


def test_a_kill_between_the_commit_and_the_delta_log_is_made_up_for_at_the_next_start(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    log: GuardedLog,
    aws: S3Server,
) -> None:
    stream = fresh()
    table = Mirrored(server, stream, tmp_path / "published", aws)
    file = tmp_path / "snapshotter.json"
    file.write_text(json.dumps(table.configuration))
    feed(server, stream, [change(n) for n in range(3)])
    with Process(file, tmp_path / "snapshotter.log") as process:
        assert log.wanted.wait(TIMEOUT)
        process.kill()
    for spec in table.job.destination_specs:
        assert place_manifest(spec).head_position == "2"
    assert (table.of_bucket(), table.of_folder()) == ({}, {})
    log.guarded = False
    log.answer.set()
    with running(spark, tmp_path / "scratch", table.job) as live:
        first = {"2": {0, 1, 2}}
        assert wait_for(table.of_bucket, first.__eq__) == wait_for(table.of_folder, first.__eq__)
        feed(server, stream, [change(3)])
        write_base(live, TABLE)
        both = {**first, "3": {0, 1, 2, 3}}
        assert wait_for(table.of_bucket, both.__eq__) == wait_for(table.of_folder, both.__eq__)
