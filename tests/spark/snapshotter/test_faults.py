"""With faults around a table, its archive stays intact and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import pytest
from pyspark.sql import SparkSession

from streamfold.archive import Thresholds
from streamfold.archive.destinations.aws_credentials import AwsAccess, Profiles
from streamfold.snapshotter.config.tables import read_configuration
from streamfold.snapshotter.spark import DeadLetterStream, table_jobs
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.status.table_status import State
from streamfold.snapshotter.transactions import TransactionLimits
from streamfold.spark.stream.options import parse_source
from tests.ports import free_port
from tests.s3 import S3Server, run_s3_server
from tests.spark.server import BASIN, TOKEN, Server
from tests.spark.snapshotter.feeding import Feed, envelope, feed
from tests.spark.snapshotter.hook import Hook
from tests.spark.snapshotter.live import running
from tests.spark.snapshotter.stepping import Table, TasksInThisProcess
from tests.spark.snapshotter.tables import (
    check_every_boundary,
    manifest_of,
    place_manifest,
    state_of,
    table_job,
)
from tests.spark.snapshotter.waiting import TIMEOUT, wait_for


def change(key: int, **more: Any) -> bytes:
    return envelope("c", after={"id": key, "name": f"n{key}"}, **more)


def test_artifacts_end_with_transactions_events_wait_for_their_sink_and_letters_get_a_stream(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    moved, odd, dead = fresh(), fresh(), fresh()
    port = free_port()  # nothing listens there yet
    limits = TransactionLimits(max_records=4, quiet=timedelta(seconds=1))
    sink = {"type": "webhook", "url": f"http://127.0.0.1:{port}/events"}
    moves = table_job(
        server, moved, tmp_path / "moves", table="moves", transactions=limits, events={"hook": sink}
    )
    endpoint = parse_source({**server.options, "stream": dead}).endpoint
    letters = DeadLetterStream(endpoint, dead, "odd", odd)
    strange = table_job(server, odd, tmp_path / "odd", table="odd", dead_letters=letters)
    bodies: list[bytes] = []

    def send(*more: bytes) -> None:
        bodies.extend(more)
        feed(server, moved, more)

    send(change(0), change(1), change(2, txn={"id": "a"}), change(3, txn={"id": "a"}))
    feed(server, odd, [change(1), b"not json", change(2), b'{"op": "x"}'])
    with running(spark, tmp_path / "scratch", moves, strange) as live:
        waiting = live.wait_for_head("moves", 1)
        assert (waiting.waiting_from, waiting.position, waiting.buffer_depth) == (2, 3, 2)
        send(change(4, txn={"id": "a", "last": True}), change(5))
        assert live.wait_for_head("moves", 5).waiting_from is None
        send(change(6, txn="b"), change(7, txn="b"))  # nothing marks its end, and nothing follows
        assert live.wait_for_head("moves", 7).counts.transactions_cut == 0
        live.wait_for_head("odd", 3)
        away = wait_for(
            lambda: live.status("moves"), lambda found: found.counts.event_errors["hook"] > 0
        )
        assert away.state is State.RUNNING
        with Hook(port) as hook:
            send(*(change(n, txn={"id": "c"}) for n in range(8, 12)))  # an end that never comes
            assert live.wait_for_head("moves", 11).counts.transactions_cut == 1
            send(envelope("e", txn="c"), change(13, txn={"id": "d"}))
            announced = [(a.kind, a.to_position) for a in manifest_of(tmp_path / "moves").artifacts]
            wait_for(lambda: hook.reported, lambda reported: reported == announced)
    # The last flush leaves the open transaction where it is: in the stream.
    positions = [a.to_position for a in manifest_of(tmp_path / "moves").artifacts]
    assert set(positions) == {"1", "5", "7", "11"}
    assert check_every_boundary(tmp_path / "moves", bodies) == 4
    assert live.writer.is_whole
    kept = [(record.body, dict(record.headers)) for record in server.records(dead)]
    letters_by_number = {headers[b"seq_num"]: body for body, headers in kept}  # at least once
    assert letters_by_number == {b"1": b"not json", b"3": b'{"op": "x"}'}
    assert all(headers[b"table"] == b"odd" and headers[b"reason"] for _, headers in kept)
    assert set(state_of(tmp_path / "odd")) == {1, 2}


@pytest.mark.parametrize("declared", [True, False])
def test_a_snapshot_that_is_requested_in_the_first_transaction_waits_for_its_end(
    spark: SparkSession, server: Server, fresh: Callable[[], str], tmp_path: Path, declared: bool
) -> None:
    stream, folder = fresh(), tmp_path / "archive"
    columns = {} if declared else {"schema": None}
    job = table_job(server, stream, folder, **columns)
    feed(server, stream, [change(0, txn={"id": "a"}), change(1, txn={"id": "a"})])
    with running(spark, tmp_path / "scratch", job) as live:
        wait_for(lambda: live.status(job.table).waiting_from, lambda since: since == 0)
        status, answer = live.ask("POST", "/snapshot?wait=2s")
        assert (status, answer["waiting"]) == (504, [job.table])
        assert live.status(job.table).state is State.RUNNING
        feed(server, stream, [change(2, txn={"id": "a", "last": True})])
        wait_for(lambda: live.status(job.table).last_base, bool)
        assert live.ask("POST", "/snapshot?wait=200s")[0] == 200
        assert live.status(job.table).counts.failures == 0
    assert set(state_of(folder)) == {0, 1, 2}


def test_a_quiet_table_gets_its_base_by_the_clock_alone(
    server: Server, fresh: Callable[[], str], tmp_path: Path
) -> None:
    stream, folder, bodies = fresh(), tmp_path / "archive", list(Feed(3).changes(40))
    thresholds = Thresholds(max_interval=timedelta(hours=1))
    job = table_job(server, stream, folder, thresholds=thresholds)
    ahead = timedelta(0)
    feed(server, stream, bodies[:20])
    with DriverLoop() as loop:
        table = Table(job, loop, now=lambda: datetime.now(UTC) + ahead)
        table.take_in()
        feed(server, stream, bodies[20:])
        running_table = loop.submit(table.writer.run(TasksInThisProcess()))
        wait_for(lambda: table.status().manifest_head, lambda head: head == "39")
        assert manifest_of(folder).epoch == 1
        ahead = timedelta(hours=2)
        wait_for(lambda: manifest_of(folder).epoch, lambda epoch: epoch == 2)
        ahead = timedelta(hours=4)  # nothing has changed since: no base is due
        loop.soon(table.writer.stop)
        running_table.result()
    found = manifest_of(folder)
    assert (found.epoch, found.base.rebase_reason) == (2, "max_interval")
    assert (found.head_position, found.chain) == ("39", ())
    assert check_every_boundary(folder, bodies) == 2


ASSUME, USE = ["sts:AssumeRole"], ["s3:*", "sqs:*"]


@contextmanager
def guarded_aws() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A server that checks permissions: who is in the environment may do nothing but take a role.

    Gives settings of a destination and of a sink as that role, and the environment.
    """
    with run_s3_server() as aws:
        known = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        where = {"endpoint_url": aws.endpoint, "region_name": aws.region}
        iam, sqs = (boto3.client(service, **where, **known) for service in ("iam", "sqs"))
        iam.create_user(UserName="writer")
        iam.put_user_policy(UserName="writer", PolicyName="p", PolicyDocument=_allow(ASSUME))
        key = iam.create_access_key(UserName="writer")["AccessKey"]
        role = iam.create_role(RoleName="archive", AssumeRolePolicyDocument=_allow(ASSUME))
        iam.put_role_policy(RoleName="archive", PolicyName="p", PolicyDocument=_allow(USE))
        queue = sqs.create_queue(QueueName="commits")["QueueUrl"]
        environment = {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }
        _check_permissions(aws, "0")
        try:
            yield _as_role(aws, role["Role"]["Arn"], queue), environment
        finally:
            _check_permissions(aws, "inf")


def _allow(actions: list[str]) -> str:
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _as_role(aws: S3Server, role: str, queue: str) -> dict[str, Any]:
    where = {"region": aws.region, "endpoint_url": aws.endpoint}
    return {
        "destinations": [{"type": "s3", "bucket": aws.bucket, "credentials": "archive"}],
        "events": [{"type": "sqs", "queue_url": queue, "credentials": "archive"}],
        "credentials": {"archive": {"type": "assume_role", "role_arn": role, **where}},
    }


def _check_permissions(aws: S3Server, after: str) -> None:
    # As text: the server makes nothing of what looks like a form.
    request = Request(f"{aws.endpoint}/moto-api/reset-auth", after.encode())
    request.add_header("Content-Type", "text/plain")
    with urlopen(request, timeout=TIMEOUT) as answer:
        assert answer.status == 200


def test_a_role_is_assumed_by_tasks_and_by_sinks_and_not_for_every_part(
    spark: SparkSession,
    server: Server,
    fresh: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from moto.sts.models import STSBackend

    asked: list[str] = []
    answer = STSBackend.assume_role

    def note(self: STSBackend, **wanted: Any) -> Any:
        asked.append(wanted["role_arn"])
        return answer(self, **wanted)

    monkeypatch.setattr(STSBackend, "assume_role", note)
    stream, bodies = fresh(), list(Feed(13).changes(400))
    feed(server, stream, bodies[:200])
    with guarded_aws() as (aws_settings, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
            # Tasks run in processes that were given their variables when Spark started.
            monkeypatch.setitem(spark.sparkContext.environment, name, value)
        source = {"server": server.url, "basin": BASIN, "stream": stream, "table": "items"}
        schema = "id BIGINT NOT NULL, name STRING, price DOUBLE"
        raw = {"source": source, "schema": schema, "buckets": 16, "diff": {"interval": "500ms"}}
        configuration = read_configuration({**raw, **aws_settings})
        [job] = table_jobs(configuration, {"S2_ACCESS_TOKEN": TOKEN})
        role = Profiles(job.credentials).access("archive", path="credentials")
        with running(spark, tmp_path, job) as live:
            live.wait_for_head("items", 199)
            feed(server, stream, bodies[200:])
            live.wait_for_head("items", 399)
            reported = wait_for(
                partial(_received, role, aws_settings), lambda reported: len(reported) >= 2
            )
        found = place_manifest(job.destination_specs[0])
    announced = [(artifact.kind, artifact.to_position) for artifact in found.artifacts]
    assert set(reported) == set(announced[:2])
    parts = sum(len(artifact.formats["jsonl"].parts) for artifact in found.artifacts)
    assert found.head_position == "399"
    assert set(asked) == {aws_settings["credentials"]["archive"]["role_arn"]}
    assert len(asked) < parts


def _received(role: AwsAccess, aws_settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Events in the queue, which stay there."""
    [sink] = aws_settings["events"]
    found = role.client("sqs").receive_message(
        QueueUrl=sink["queue_url"], MaxNumberOfMessages=10, VisibilityTimeout=0
    )
    events = [json.loads(message["Body"]) for message in found.get("Messages", [])]
    return [(event["kind"], event["to_position"]) for event in events]
