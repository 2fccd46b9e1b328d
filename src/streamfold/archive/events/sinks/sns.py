"""Events to an SNS topic."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import SinkType, group_of
from streamfold.archive.events.sinks.aws import AwsOptions, AwsSink
from streamfold.errors import InvalidError


class SnsOptions(AwsOptions, frozen=True, kw_only=True):
    topic_arn: Annotated[str, msgspec.Meta(description="ARN of the topic")]


class SnsSink(AwsSink):
    """Publishes to a topic; one whose name ends in `.fifo` keeps the order and drops repetitions."""

    service = "sns"

    def __init__(self, topic_arn: str, access: AwsAccess) -> None:
        if not topic_arn.startswith("arn:"):
            raise InvalidError(f"topic_arn {topic_arn!r} must be the ARN of a topic: arn:aws:sns:…")
        super().__init__(access, topic_arn)
        self._arn = topic_arn
        self._is_fifo = topic_arn.endswith(".fifo")

    def publish(self, client: Any, event: Event) -> str | None:
        fifo = {"MessageGroupId": group_of(event.table), "MessageDeduplicationId": event.event_id}
        answer = client.publish(
            TopicArn=self._arn,
            Message=encode_event(event).decode(),
            **(fifo if self._is_fifo else {}),
        )
        receipt: str | None = answer.get("MessageId")
        return receipt


SNS = SinkType(
    id="sns",
    summary="a topic of Amazon SNS",
    options=SnsOptions,
    open=lambda options, context: SnsSink(options.topic_arn, options.access(context)),
    target=("topic_arn",),
)
