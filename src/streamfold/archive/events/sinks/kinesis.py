"""Events to a Kinesis stream."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import SinkType, group_of
from streamfold.archive.events.sinks.aws import AwsOptions, AwsSink
from streamfold.errors import InvalidError

#: Characters that Kinesis takes as a partition key.
KEY_LIMIT = 256


class KinesisOptions(AwsOptions, frozen=True, kw_only=True):
    stream: Annotated[str, msgspec.Meta(description="name or ARN of the stream")]


class KinesisSink(AwsSink):
    """Puts records with the table as partition key: one shard has them all, in order."""

    service = "kinesis"

    def __init__(self, stream: str, access: AwsAccess) -> None:
        if not stream:
            raise InvalidError("stream is empty: give the name or the ARN of a Kinesis stream")
        super().__init__(access, stream)
        self._stream = {"StreamARN" if stream.startswith("arn:") else "StreamName": stream}
        # Makes Kinesis number a record after this one, even within the same instant.
        self._after: dict[str, str] = {}

    def publish(self, client: Any, event: Event) -> str | None:
        # Cleared first: after a failure the stream may be another one, and would refuse it.
        after, self._after = self._after, {}
        answer = client.put_record(
            **self._stream,
            Data=encode_event(event),
            PartitionKey=group_of(event.table, KEY_LIMIT),
            **after,
        )
        number: str | None = answer.get("SequenceNumber")
        if number:
            self._after = {"SequenceNumberForOrdering": number}
        return number


KINESIS = SinkType(
    id="kinesis",
    summary="a stream of Amazon Kinesis",
    options=KinesisOptions,
    open=lambda options, context: KinesisSink(options.stream, options.access(context)),
    target=("stream",),
)
