"""Archive events: every committed artifact is announced at least once, in order."""

from streamfold.archive.events.aws_sinks import EventBridgeSink, KinesisSink, SnsSink, SqsSink
from streamfold.archive.events.delivery import EventDispatcher, SinkStatus
from streamfold.archive.events.event import Event, decode_event, encode_event
from streamfold.archive.events.sink import (
    SINKS,
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    MemorySink,
    SecretReference,
    SinkContext,
    SinkType,
    WorkerThread,
    open_sink,
)
from streamfold.archive.events.webhook_sink import WebhookSink
from streamfold.backoff import Backoff

__all__ = [
    "EventDispatcher",
    "SinkStatus",
    "Backoff",
    "Event",
    "encode_event",
    "decode_event",
    "EventSink",
    "SinkType",
    "SinkContext",
    "SINKS",
    "open_sink",
    "SnsSink",
    "SqsSink",
    "KinesisSink",
    "EventBridgeSink",
    "WebhookSink",
    "SecretReference",
    "MemorySink",
    "WorkerThread",
    "EventRefusedError",
    "EventUnconfirmedError",
]
