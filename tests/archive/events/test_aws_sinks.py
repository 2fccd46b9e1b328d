"""Behaviour specific to each AWS sink, checked at the receiving end."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from streamfold.archive.destinations.aws_credentials import AwsAccess, Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import (
    EventBridgeSink,
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    KinesisSink,
    SnsSink,
    SqsSink,
)
from streamfold.archive.events.sink import group_of
from streamfold.errors import InvalidError
from streamfold.testing.event_faults import FaultyEventSink, SinkCall
from streamfold.testing.event_sink_kit import SinkProbe, sample_event
from streamfold.testing.faults import SeededFaults
from tests.archive.events.feeds import Table, deliver_all, without_repetitions
from tests.archive.events.receivers import (
    BusProbe,
    Hook,
    KinesisProbe,
    QueueProbe,
    TopicProbe,
    access_to,
)
from tests.s3 import S3Server


@pytest.mark.parametrize("kind", [QueueProbe, TopicProbe])
async def test_fifo_messages_have_the_table_as_group_and_the_event_as_id(
    s3_server: S3Server, access: AwsAccess, kind: type[QueueProbe] | type[TopicProbe]
) -> None:
    probe = kind(s3_server, access, fifo=True)
    await probe.sink.send(sample_event(5))
    [message] = await probe.queue.receive(1)
    assert message["Attributes"]["MessageGroupId"] == "public.users"
    assert message["Attributes"]["MessageDeduplicationId"] == sample_event(5).event_id


@pytest.mark.parametrize("kind", [QueueProbe, TopicProbe])
async def test_a_fifo_receiver_sees_each_event_once_however_often_sending_failed(
    s3_server: S3Server, access: AwsAccess, kind: type[QueueProbe] | type[TopicProbe]
) -> None:
    seed = 7
    probe = kind(s3_server, access, fifo=True)
    table = await Table.create(Destination.open("memory:table"))
    for _ in range(8):
        await table.commit_diff()
    faulty = FaultyEventSink(probe.sink, SeededFaults(random.Random(seed), {SinkCall.SEND: 0.5}))
    dispatcher = await deliver_all(table.destination, sink=faulty)
    assert dispatcher.errors["sink"] > 0
    assert await probe.received(9) == table.committed, f"seed {seed}"


async def test_kinesis_keeps_a_table_in_one_shard_in_order(
    s3_server: S3Server, access: AwsAccess
) -> None:
    probe = KinesisProbe(s3_server, access)
    for number in range(6):
        await probe.sink.send(sample_event(number, table=f"table-{number % 2}"))
    records = probe.records()
    for table in ("table-0", "table-1"):
        found = [record for record in records if record["PartitionKey"] == table]
        positions = [json.loads(record["Data"])["to_position"] for record in found]
        assert positions == [str(number) for number in range(6) if f"table-{number % 2}" == table]


async def test_eventbridge_rules_can_match_on_source_type_and_detail(
    s3_server: S3Server, access: AwsAccess
) -> None:
    probe = BusProbe(s3_server, access)
    await probe.sink.send(sample_event(3))
    [message] = await probe.queue.receive(1)
    body = json.loads(message["Body"])
    assert body["source"] == "streamfold.archive"
    assert body["detail-type"] == "Archive Artifact Committed"
    assert body["detail"]["table"] == "public.users"
    assert body["time"].startswith("2026-06-03T12:00:00")


async def test_a_table_reaches_every_service_whole(s3_server: S3Server, access: AwsAccess) -> None:
    probes: dict[str, SinkProbe] = {
        "queue": QueueProbe(s3_server, access, fifo=False),
        "topic": TopicProbe(s3_server, access, fifo=False),
        "stream": KinesisProbe(s3_server, access),
        "bus": BusProbe(s3_server, access),
    }
    table = await Table.create(Destination.open("memory:table"))
    await table.commit_diff()
    await table.rebase()
    await deliver_all(table.destination, **{name: probe.sink for name, probe in probes.items()})
    for name, probe in probes.items():
        received = await probe.received(4)
        assert without_repetitions(received) == table.committed, name


def sinks_of(access: AwsAccess) -> list[EventSink]:
    return [
        SnsSink("arn:aws:sns:us-east-1:123456789012:none", access),
        SqsSink("http://localhost/123456789012/none", access),
        KinesisSink("none", access),
        KinesisSink("arn:aws:kinesis:us-east-1:123456789012:stream/none", access),
        EventBridgeSink("none", access),
    ]


async def test_receivers_that_do_not_exist_refuse(access: AwsAccess) -> None:
    for sink in sinks_of(access):
        with pytest.raises(EventRefusedError, match="HTTP 4"):
            await sink.send(sample_event())


async def test_a_service_that_is_not_reached_refuses(ambient: S3Server) -> None:
    with socket.socket() as unused:  # nobody else can listen there meanwhile
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for sink in sinks_of(access_to(ambient, endpoint_url=endpoint)):
            with pytest.raises(EventRefusedError, match="EndpointConnectionError"):
                await sink.send(sample_event())


@pytest.fixture
def hanging_up() -> Iterator[str]:
    """A service that reads a request and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_an_answer_that_is_lost_leaves_it_unknown(ambient: S3Server, hanging_up: str) -> None:
    for sink in sinks_of(access_to(ambient, endpoint_url=hanging_up)):
        with pytest.raises(EventUnconfirmedError, match="may have been accepted"):
            await sink.send(sample_event())


@pytest.mark.parametrize("status", [200, 500, 502, 503])
async def test_a_page_of_a_proxy_instead_of_an_answer_leaves_it_unknown(
    ambient: S3Server, hook: Hook, status: int
) -> None:
    hook.answer, hook.body = (lambda _: status), b"<!doctype html><title>Bad Gateway</title>"
    base = hook.url.partition("/hooks")[0]
    for sink in sinks_of(access_to(ambient, endpoint_url=base)):
        with pytest.raises(EventUnconfirmedError, match="may have been accepted"):
            await sink.send(sample_event())


async def test_an_entry_that_a_bus_refuses_with_status_200_is_refused(
    ambient: S3Server, hook: Hook
) -> None:
    hook.answer = lambda _: 200
    hook.headers["content-type"] = "application/x-amz-json-1.1"
    entry = {"ErrorCode": "ThrottlingException", "ErrorMessage": "slow down"}
    hook.body = json.dumps({"FailedEntryCount": 1, "Entries": [entry]}).encode()
    sink = EventBridgeSink("bus", access_to(ambient, endpoint_url=hook.url.partition("/hooks")[0]))
    with pytest.raises(EventRefusedError, match="ThrottlingException"):
        await sink.send(sample_event())


async def test_a_sink_without_credentials_refuses(
    s3_server: S3Server, ambient: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(EventRefusedError, match="NoCredentialsError"):
        await SnsSink("arn:aws:sns:us-east-1:1:none", access_to(s3_server)).send(sample_event())


async def test_a_sink_without_a_region_refuses_and_says_so(ambient: S3Server) -> None:
    nowhere = Profiles.parse({}).access(None, path="sink.credentials")
    with pytest.raises(EventRefusedError, match="give a region"):
        await KinesisSink("none", nowhere).send(sample_event())


async def test_sinks_that_share_a_profile_can_begin_at_once(access: AwsAccess) -> None:
    results = await asyncio.gather(
        *(sink.send(sample_event()) for sink in sinks_of(access)), return_exceptions=True
    )
    assert {type(result) for result in results} == {EventRefusedError}


@pytest.mark.parametrize("name", ["", "topic", "https://topic"])
def test_targets_of_the_wrong_kind_are_refused(access: AwsAccess, name: str) -> None:
    with pytest.raises(InvalidError):
        SnsSink(name, access)
    with pytest.raises(InvalidError):
        SqsSink(name.removeprefix("https://"), access)


def test_empty_targets_are_refused(access: AwsAccess) -> None:
    for kind in (KinesisSink, EventBridgeSink):
        with pytest.raises(InvalidError, match="empty"):
            kind("", access)


@pytest.mark.parametrize("table", ["a" * 129, "with space", "ü", "", "tab\t"])
def test_table_names_that_are_not_valid_message_groups_get_one(table: str) -> None:
    group = group_of(table)
    assert group.isalnum()
    assert len(group) == 64
    assert group_of(table) == group != group_of(table + "x")
