"""Sinks by configuration."""

from __future__ import annotations

import re

import pytest

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events import (
    EventBridgeSink,
    EventSink,
    KinesisSink,
    SnsSink,
    SqsSink,
    WebhookSink,
    open_sink,
)
from streamfold.errors import InvalidError
from streamfold.testing.event_sink_kit import sample_event
from tests.archive.events.receivers import Hook, Queue
from tests.s3 import S3Server

TOPIC = "arn:aws:sns:us-east-1:123456789012:orders"
QUEUE = "https://sqs.us-east-1.amazonaws.com/123456789012/orders"


def opened(raw: object) -> EventSink:
    return open_sink(raw, Profiles.parse({"known": {}}), path="tables[0].events.orders")


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ({"type": "sns", "topic_arn": TOPIC}, SnsSink),
        ({"type": "sns", "topic_arn": TOPIC, "credentials": "known"}, SnsSink),
        ({"type": "sqs", "queue_url": QUEUE, "region": "eu-west-1"}, SqsSink),
        ({"type": "kinesis", "stream": "orders"}, KinesisSink),
        ({"type": "eventbridge", "bus": "orders"}, EventBridgeSink),
        ({"type": "webhook", "url": "https://example.com/hook"}, WebhookSink),
    ],
)
def test_each_type_has_a_sink(raw: object, kind: type[EventSink]) -> None:
    assert type(opened(raw)) is kind


@pytest.mark.parametrize(
    ("raw", "reported"),
    [
        (
            {"type": "carrier-pigeon"},
            "tables[0].events.orders: event sink 'carrier-pigeon' must be one of",
        ),
        ({"topic_arn": TOPIC}, "missing required field `type`"),
        ({"type": "sns"}, "missing required field `topic_arn`"),
        ({"type": "sns", "topic_arn": "orders"}, "tables[0].events.orders: topic_arn 'orders'"),
        ({"type": "sns", "topic_arn": TOPIC, "queue_url": QUEUE}, "unknown field `queue_url`"),
        ({"type": "sqs", "queue_url": ""}, "tables[0].events.orders: queue_url ''"),
        ({"type": "kinesis", "stream": ""}, "tables[0].events.orders: stream is empty"),
        ({"type": "kinesis", "stream": 3}, "Expected `str`, got `int`"),
        ({"type": "webhook", "url": "gopher://x"}, "tables[0].events.orders: the URL"),
        ({"type": "webhook", "url": "http://x", "credentials": "known"}, "field `credentials`"),
        ("sns", "Expected `object`, got `str`"),
        (
            {"type": "sns", "topic_arn": TOPIC, "credentials": "other"},
            "tables[0].events.orders.credentials names credentials 'other'",
        ),
        (
            {"type": "webhook", "url": "http://x", "secret_env": "A", "secret_file": "b"},
            "tables[0].events.orders: a secret is in a variable or in a file",
        ),
    ],
)
def test_a_problem_is_reported_with_its_path(raw: object, reported: str) -> None:
    with pytest.raises(InvalidError, match=re.escape(reported)):
        opened(raw)


async def test_a_configured_queue_is_sent_to_under_its_profile(ambient: S3Server) -> None:
    queue = Queue(ambient, fifo=True)
    profiles = Profiles.parse(
        {
            "role": {
                "type": "assume_role",
                "role_arn": "arn:aws:iam::123456789012:role/events",
                "endpoint_url": ambient.endpoint,
            }
        }
    )
    raw = {"type": "sqs", "queue_url": queue.url, "credentials": "role", "region": "us-east-1"}
    sink = open_sink(raw, profiles, path="events.orders")
    await sink.send(sample_event())
    assert len(await queue.receive(1)) == 1
    await sink.close()


async def test_a_configured_webhook_is_signed(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", "x" * 24)
    sink = opened({"type": "webhook", "url": hook.url, "secret_env": "HOOK_SECRET"})
    await sink.send(sample_event())
    assert "webhook-signature" in hook.requests[0][1]
    await sink.close()
