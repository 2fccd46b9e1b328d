"""Events to an SQS queue."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import SinkType, group_of
from streamfold.archive.events.sinks.aws import AwsOptions, AwsSink
from streamfold.errors import InvalidError


class SqsOptions(AwsOptions, frozen=True, kw_only=True):
    queue_url: Annotated[str, msgspec.Meta(description="URL of the queue")]


class SqsSink(AwsSink):
    """Sends to a queue; one whose name ends in `.fifo` keeps the order and drops repetitions."""

    service = "sqs"

    def __init__(self, queue_url: str, access: AwsAccess) -> None:
        if not queue_url.startswith(("https://", "http://")):
            raise InvalidError(f"queue_url {queue_url!r} must be the URL of a queue: https://sqs.…")
        super().__init__(access, queue_url)
        self._url = queue_url
        self._is_fifo = queue_url.endswith(".fifo")

    def publish(self, client: Any, event: Event) -> str | None:
        fifo = {"MessageGroupId": group_of(event.table), "MessageDeduplicationId": event.event_id}
        answer = client.send_message(
            QueueUrl=self._url,
            MessageBody=encode_event(event).decode(),
            **(fifo if self._is_fifo else {}),
        )
        receipt: str | None = answer.get("MessageId")
        return receipt


SQS = SinkType(
    id="sqs",
    summary="a queue of Amazon SQS",
    options=SqsOptions,
    open=lambda options, context: SqsSink(options.queue_url, options.access(context)),
    target=("queue_url",),
)
