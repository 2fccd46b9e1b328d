"""Every sink against the same expectations, each with a real receiver."""

from __future__ import annotations

import pytest

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.testing.event_faults import FaultyEventSink
from streamfold.testing.event_sink_kit import EventSinkConformance, SinkProbe
from streamfold.testing.faults import ScriptedFaults
from tests.archive.events.receivers import (
    BusProbe,
    Hook,
    KinesisProbe,
    MemoryProbe,
    QueueProbe,
    TopicProbe,
    WebhookProbe,
)
from tests.s3 import S3Server


class TestMemory(EventSinkConformance):
    @pytest.fixture
    def probe(self) -> SinkProbe:
        return MemoryProbe()


class TestFaultyWithoutFaults(EventSinkConformance):
    @pytest.fixture
    def probe(self) -> SinkProbe:
        probe = MemoryProbe()
        probe.sink = FaultyEventSink(probe.memory, ScriptedFaults())
        return probe


class TestWebhook(EventSinkConformance):
    @pytest.fixture
    def probe(self, hook: Hook) -> SinkProbe:
        return WebhookProbe(hook)


class TestQueue(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return QueueProbe(s3_server, access, fifo=False)


class TestFifoQueue(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return QueueProbe(s3_server, access, fifo=True)


class TestTopic(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return TopicProbe(s3_server, access, fifo=False)


class TestFifoTopic(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return TopicProbe(s3_server, access, fifo=True)


class TestKinesis(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return KinesisProbe(s3_server, access)


class TestEventBridge(EventSinkConformance):
    @pytest.fixture
    def probe(self, s3_server: S3Server, access: AwsAccess) -> SinkProbe:
        return BusProbe(s3_server, access)
