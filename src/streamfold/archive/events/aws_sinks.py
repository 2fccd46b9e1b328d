"""Sends events to SNS, SQS, Kinesis and EventBridge, one request per event, and classifies failures."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event, encode_event
from streamfold.archive.events.sink import (
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    SinkContext,
    SinkType,
    WorkerThread,
    group_of,
)
from streamfold.archive.manifest.positions import parse_time
from streamfold.errors import InvalidError, RetryLaterError, StreamfoldError
from streamfold.extensions import Options

#: botocore's errors for requests that were never sent, or never reached a server.
NOT_SENT = frozenset(
    {
        "ConnectTimeoutError",
        "EndpointConnectionError",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProxyConnectionError",
        "SSLError",
    }
)


class AwsOptions(Options, frozen=True, kw_only=True):
    """Options that all AWS sinks have."""

    credentials: Annotated[
        str | None, msgspec.Meta(description="profile to use; what the AWS SDK finds if not given")
    ] = None
    region: Annotated[
        str | None, msgspec.Meta(description="region, if not that of the profile")
    ] = None

    def access(self, context: SinkContext) -> AwsAccess:
        """Return access under the profile that the options name."""
        path = f"{context.path}.credentials"
        return context.profiles.access(self.credentials, path=path, region=self.region)


class AwsSink(EventSink):
    """Sends events through boto3 in its own thread. `target` names the receiver in messages."""

    service: ClassVar[str]

    def __init__(self, access: AwsAccess, target: str) -> None:
        self._access = access
        self._target = target
        self._lane = WorkerThread(f"{self.service} {target}")
        self._client: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r})"

    async def send(self, event: Event) -> None:
        await self._lane.run(self._send, event)

    async def close(self) -> None:
        await self._lane.close()

    @abstractmethod
    def publish(self, client: Any, event: Event) -> str | None:
        """Send one request and return the service's receipt, or None if it sent none.

        Called in the sink's own thread, one call at a time.
        """

    def _send(self, event: Event) -> None:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        failure: StreamfoldError
        try:
            if self._client is None:
                self._client = self._access.client(self.service)
            if self.publish(self._client, event):
                return
            # The 200 came not from the service but from a portal or proxy.
            failure = self._lost("no receipt")
        except ClientError as error:
            failure = self._judge(error.response)
        # ResponseParserError is not a BotoCoreError: an intermediate proxy may answer with its own
        # page.
        except (BotoCoreError, ResponseParserError) as error:
            failure = self._lost(type(error).__name__)
        except EventRefusedError:
            raise
        except (InvalidError, RetryLaterError) as error:  # from the credentials: nothing was sent
            failure = self.refused(error.message)
        # Not chained: messages of services and clients may quote signed headers and tokens.
        raise failure

    def _judge(self, response: Any) -> EventRefusedError | EventUnconfirmedError:
        code = str(response.get("Error", {}).get("Code", "unknown"))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if 400 <= status < 500:
            return self.refused(f"HTTP {status} {code}")
        return EventUnconfirmedError(
            f"{self.service} {self._target} failed with HTTP {status} {code}: the event may have "
            "been accepted"
        )

    def _lost(self, name: str) -> EventRefusedError | EventUnconfirmedError:
        if name in NOT_SENT:
            return self.refused(name)
        return EventUnconfirmedError(
            f"{self.service} {self._target} did not answer ({name}): the event may have been accepted"
        )

    def refused(self, reason: str) -> EventRefusedError:
        """Return the error for an event that was certainly not accepted."""
        return EventRefusedError(
            f"{self.service} {self._target} did not accept the event: {reason}; check that it "
            "exists, and that the sink's credentials may send to it"
        )


class SnsOptions(AwsOptions, frozen=True, kw_only=True):
    topic_arn: Annotated[str, msgspec.Meta(description="ARN of the topic")]


class SnsSink(AwsSink):
    """Publishes to a topic. One whose name ends in `.fifo` preserves order and drops repetitions."""

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


class SqsOptions(AwsOptions, frozen=True, kw_only=True):
    queue_url: Annotated[str, msgspec.Meta(description="URL of the queue")]


class SqsSink(AwsSink):
    """Sends to a queue. One whose name ends in `.fifo` preserves order and drops repetitions."""

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


#: Maximum characters of a Kinesis partition key.
KEY_LIMIT = 256


class KinesisOptions(AwsOptions, frozen=True, kw_only=True):
    stream: Annotated[str, msgspec.Meta(description="name or ARN of the stream")]


class KinesisSink(AwsSink):
    """Puts records with the table as partition key, so that one shard has them all, in order."""

    service = "kinesis"

    def __init__(self, stream: str, access: AwsAccess) -> None:
        if not stream:
            raise InvalidError("stream is empty: give the name or the ARN of a Kinesis stream")
        super().__init__(access, stream)
        self._stream = {"StreamARN" if stream.startswith("arn:") else "StreamName": stream}
        # Makes Kinesis number a record after this one, even within the same instant.
        self._after: dict[str, str] = {}

    def publish(self, client: Any, event: Event) -> str | None:
        # Cleared first: after a failure, the stream may be a different one and reject it.
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


#: The values that rules match on.
SOURCE = "streamfold.archive"
DETAIL_TYPE = "Archive Artifact Committed"


class EventBridgeOptions(AwsOptions, frozen=True, kw_only=True):
    bus: Annotated[str, msgspec.Meta(description="name or ARN of the bus")]


class EventBridgeSink(AwsSink):
    """Puts events on a bus, which does not guarantee their order, so targets compare positions."""

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
        # A rejected entry comes with status 200.
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
