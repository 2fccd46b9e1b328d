"""Events to an EventBridge bus."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import SinkType
from streamfold.archive.events.sinks.aws import AwsOptions, AwsSink
from streamfold.archive.manifest.positions import parse_time
from streamfold.errors import InvalidError

#: What rules match on.
SOURCE = "streamfold.archive"
DETAIL_TYPE = "Archive Artifact Committed"


class EventBridgeOptions(AwsOptions, frozen=True, kw_only=True):
    bus: Annotated[str, msgspec.Meta(description="name or ARN of the bus")]


class EventBridgeSink(AwsSink):
    """Puts events on a bus, which does not guarantee their order: targets compare positions."""

    service = "events"

    def __init__(self, bus: str, access: AwsAccess) -> None:
        if not bus:
            raise InvalidError("bus is empty: give the name or the ARN of an event bus")
        super().__init__(access, bus)
        self._bus = bus

    def publish(self, client: Any, event: Event) -> str | None:
        entry = {
            "EventBusName": self._bus,
            "Source": SOURCE,
            "DetailType": DETAIL_TYPE,
            "Time": parse_time(event.created_at),
            "Detail": encode_event(event).decode(),
        }
        answer = client.put_events(Entries=[entry])
        [result] = answer.get("Entries") or [{}]
        # A refused entry comes with status 200.
        if code := result.get("ErrorCode"):
            raise self.refused(str(code))
        receipt: str | None = result.get("EventId")
        return receipt


EVENTBRIDGE = SinkType(
    id="eventbridge",
    summary="a bus of Amazon EventBridge",
    options=EventBridgeOptions,
    open=lambda options, context: EventBridgeSink(options.bus, options.access(context)),
    target=("bus",),
)
