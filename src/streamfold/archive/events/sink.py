"""The interface to event services: guarantees of every sink, and the available sink types.

A custom sink subclasses `EventSink`, declares itself with a `SinkType` and passes
`streamfold.testing.EventSinkConformance`; see docs/contributing/extending.md.

    RetryLaterError
    └── EventRefusedError                 certainly not sent: it will be retried
    OutcomeUnknownError
    └── EventUnconfirmedError             may have been sent: it will be sent again
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import msgspec

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events.event import Event
from streamfold.errors import InvalidError, OutcomeUnknownError, RetryLaterError
from streamfold.extensions import Extension, Options, Registry

#: Prefix of base64 secrets in the Standard Webhooks convention.
PREFIX = "whsec_"
#: Minimum bytes of a key: the HMAC of a shorter one can be guessed.
SHORTEST_KEY = 16
O = TypeVar("O", bound=Options)  # noqa: E741 - the options
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SecretReference:
    """Location of a signing secret. The secret is read on every use, so it may change at any time."""

    variable: str | None = None
    file: Path | None = None

    def __post_init__(self) -> None:
        if (self.variable is None) == (self.file is None):
            raise InvalidError("a secret is in a variable or in a file: name exactly one")

    def read_key(self) -> bytes:
        """Return the key: `whsec_…` is decoded as base64, other text is used as is."""
        text = self._read().strip()
        try:
            if text.startswith(PREFIX):
                key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
            else:
                key = text.encode()
        except (binascii.Error, ValueError):
            key = b""
        if len(key) < SHORTEST_KEY:
            raise InvalidError(
                f"the secret in {self._name()} is not a usable key: it must have at least "
                f"{SHORTEST_KEY} bytes, as text or as {PREFIX} and base64"
            )
        return key

    def _read(self) -> str:
        if self.variable is not None:
            return os.environ.get(self.variable, "")
        try:
            return Path(str(self.file)).read_text()
        except (OSError, UnicodeDecodeError) as error:
            failure = type(error).__name__
        raise InvalidError(f"the secret in {self._name()} cannot be read ({failure})")

    def _name(self) -> str:
        return f"variable {self.variable!r}" if self.variable else f"file {str(self.file)!r}"


class EventRefusedError(RetryLaterError):
    """The event was not accepted: the receiver rejected it or was not reached."""

    code = "event_refused"


class EventUnconfirmedError(OutcomeUnknownError):
    """The response was lost: the event may have arrived."""

    code = "event_unconfirmed"


class EventSink(ABC):
    """Sends events to a table's followers.

    `send` is called once at a time, in the table's order. A sink does not retry: it reports
    the result of one attempt, within its own timeout, and the dispatcher decides.
    """

    @abstractmethod
    async def send(self, event: Event) -> None:
        """Send the event. When this returns, the receiver has stored it durably.

        Raises `EventRefusedError` if the receiver certainly does not have it,
        `EventUnconfirmedError` if that is unknown. Messages never contain a secret. A cancelled
        call may have sent the event. The next call sends nothing until that attempt has ended on
        this side.
        """

    async def close(self) -> None:
        """Release the sink's resources. It sends nothing afterwards. Closing twice is fine."""
        return


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Everything that a sink may use besides its options."""

    #: The configured AWS credentials.
    profiles: Profiles
    #: Where the options came from, for error messages.
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkType(Extension, Generic[O]):
    """Declares a type of sink: `type = "<id>"` in an entry of `events` selects it."""

    options: type[O]
    #: Returns the sink without contacting anything. Raises InvalidError for unusable options.
    open: Callable[[O, SinkContext], EventSink]
    #: Options that identify the receiver. A sink starts over if their values change, because its
    #: cursor in storage is named after them.
    target: tuple[str, ...]


def group_of(table: str, longest: int = 128) -> str:
    """Return the table's message group: its name if the service accepts it, else its hash."""
    if re.fullmatch(rf"[!-~]{{1,{longest}}}", table):
        return table
    return hashlib.sha256(table.encode()).hexdigest()


class WorkerThread:
    """Runs calls one after another. A cancelled call ends before the next begins.

    Does not use the default thread pool, where a few hanging sinks would stop the others. `name` is
    the sink's name, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"events-{name}")
        self._closed = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the call and return its result. Raises EventRefusedError after `close`."""
        if self._closed:
            raise EventRefusedError(f"{self._name}: the sink is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def close(self) -> None:
        """Wait for the running call. No call starts afterwards."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


class MemorySink(EventSink):
    """Retains every sent event in order, including repeated ones."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._closed = False
        self._arrived = asyncio.Condition()

    async def send(self, event: Event) -> None:
        if self._closed:
            raise EventRefusedError("the sink is closed: open another one")
        async with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    async def wait_for(self, count: int) -> list[Event]:
        """Return the events once there are at least `count` of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.events) >= count)
        return list(self.events)

    async def close(self) -> None:
        self._closed = True


_EVENTS = "streamfold.archive.events"

#: Every sink type that `open_sink` knows.
SINKS: Registry[SinkType[Any]] = Registry(
    "streamfold.sinks",
    "event sink",
    SinkType,
    {
        "sns": f"{_EVENTS}.aws_sinks:SNS",
        "sqs": f"{_EVENTS}.aws_sinks:SQS",
        "kinesis": f"{_EVENTS}.aws_sinks:KINESIS",
        "eventbridge": f"{_EVENTS}.aws_sinks:EVENTBRIDGE",
        "webhook": f"{_EVENTS}.webhook_sink:WEBHOOK",
    },
)


class _Typed(msgspec.Struct):
    type: str


def open_sink(raw: object, profiles: Profiles, *, path: str) -> EventSink:
    """Return the sink described by plain values: its `type` and its options.

    Contacts nothing yet. Errors name `path`, where the values came from.
    """
    try:
        fields = msgspec.convert(raw, dict[str, Any])
        kind = SINKS.get(msgspec.convert(fields, _Typed).type)
        del fields["type"]
        return kind.open(msgspec.convert(fields, kind.options), SinkContext(profiles, path))
    except msgspec.ValidationError as error:
        # The text names fields and types, never values.
        raise InvalidError(f"{path}: {error}") from None
    except InvalidError as error:
        if error.message.startswith(path):
            raise
        raise InvalidError(f"{path}: {error.message}") from None
