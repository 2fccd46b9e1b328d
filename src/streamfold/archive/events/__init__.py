"""Events of archives: every committed artifact is announced at least once, in order."""

from streamfold.archive.events.backoff import Backoff
from streamfold.archive.events.cursor import CursorConflictError, CursorInvalidError
from streamfold.archive.events.delivery import SinkStatus
from streamfold.archive.events.event import Event, decode_event, encode_event
from streamfold.archive.events.eventbridge import EventBridgeSink
from streamfold.archive.events.faults import (
    EventFault,
    EventFaultPlan,
    FaultyEventSink,
    ScriptedEventFaults,
    SeededEventFaults,
)
from streamfold.archive.events.kinesis import KinesisSink
from streamfold.archive.events.memory import MemorySink
from streamfold.archive.events.opening import open_sink
from streamfold.archive.events.pump import EventPump
from streamfold.archive.events.secrets import SecretReference
from streamfold.archive.events.sink import EventRefusedError, EventSink, EventUnconfirmedError
from streamfold.archive.events.sns import SnsSink
from streamfold.archive.events.sqs import SqsSink
from streamfold.archive.events.webhook import WebhookSink

__all__ = [
    "EventPump",
    "SinkStatus",
    "Backoff",
    "Event",
    "encode_event",
    "decode_event",
    "EventSink",
    "open_sink",
    "SnsSink",
    "SqsSink",
    "KinesisSink",
    "EventBridgeSink",
    "WebhookSink",
    "SecretReference",
    "MemorySink",
    "FaultyEventSink",
    "EventFault",
    "EventFaultPlan",
    "ScriptedEventFaults",
    "SeededEventFaults",
    "EventRefusedError",
    "EventUnconfirmedError",
    "CursorConflictError",
    "CursorInvalidError",
]
