"""Events of archives: every committed artifact is announced at least once, in order."""

from streamfold.archive.events.cursor import CursorConflictError, CursorInvalidError
from streamfold.archive.events.delivery import EventDispatcher, SinkStatus
from streamfold.archive.events.event import Event, decode_event, encode_event
from streamfold.archive.events.sink import (
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    SecretReference,
    SinkContext,
    SinkType,
    WorkerThread,
)
from streamfold.archive.events.sinks.eventbridge import EventBridgeSink
from streamfold.archive.events.sinks.kinesis import KinesisSink
from streamfold.archive.events.sinks.memory import MemorySink
from streamfold.archive.events.sinks.registry import SINKS, open_sink
from streamfold.archive.events.sinks.sns import SnsSink
from streamfold.archive.events.sinks.sqs import SqsSink
from streamfold.archive.events.sinks.webhook import WebhookSink
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
    "CursorConflictError",
    "CursorInvalidError",
]
