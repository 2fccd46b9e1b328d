"""What the sinks on AWS have in common: one request per event, and what its failure means."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

import msgspec

from streamfold.archive.destinations.aws_credentials import AwsAccess
from streamfold.archive.events.event import Event
from streamfold.archive.events.sink import (
    EventRefusedError,
    EventSink,
    EventUnconfirmedError,
    SinkContext,
    WorkerThread,
)
from streamfold.errors import InvalidError, RetryLaterError, StreamfoldError
from streamfold.extensions import Options

#: botocore's errors of requests that were never sent, or never reached a server.
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
    """What all sinks on AWS take."""

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
    """Sends events by boto3, in a thread of its own; `target` names the receiver in messages."""

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
        """Send one request and return the service's receipt; None if it sent none.

        Called in the sink's own thread, one at a time.
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
            # The 200 did not come from the service but from a portal or proxy.
            failure = self._lost("no receipt")
        except ClientError as error:
            failure = self._judge(error.response)
        # The last is not a BotoCoreError: a proxy in between may answer with its own page.
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
            "been taken"
        )

    def _lost(self, name: str) -> EventRefusedError | EventUnconfirmedError:
        if name in NOT_SENT:
            return self.refused(name)
        return EventUnconfirmedError(
            f"{self.service} {self._target} did not answer ({name}): the event may have been taken"
        )

    def refused(self, reason: str) -> EventRefusedError:
        """Return the error for an event that was certainly not accepted."""
        return EventRefusedError(
            f"{self.service} {self._target} did not take the event: {reason}; check that it "
            "exists, and that the sink's credentials may send to it"
        )
