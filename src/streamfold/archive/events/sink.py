"""The seam to the services that carry events: what every sink guarantees.

A sink of your own subclasses `EventSink`, declares itself by a `SinkType` and runs
`streamfold.testing.EventSinkConformance`; see docs/contributing/extending.md.

    RetryLaterError
    └── EventRefusedError                 certainly not sent: it will be retried
    OutcomeUnknownError
    └── EventUnconfirmedError             may have been sent: it will be sent again
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events.event import Event
from streamfold.errors import OutcomeUnknownError, RetryLaterError
from streamfold.extensions import Extension, Options


class EventRefusedError(RetryLaterError):
    """The event was not accepted; the receiver said so, or was not reached."""

    code = "event_refused"


class EventUnconfirmedError(OutcomeUnknownError):
    """The answer was lost: the event may have arrived."""

    code = "event_unconfirmed"


class EventSink(ABC):
    """Carries events to the followers of the table.

    One call of `send` at a time, in the order of the table. A sink does not retry: it
    reports how the one attempt ended, within its own timeout, and the dispatcher decides.
    """

    @abstractmethod
    async def send(self, event: Event) -> None:
        """Hand the event over; when this returns, the receiver has it durably.

        Raises `EventRefusedError` if it certainly does not have it, `EventUnconfirmedError` if
        that is unknown. Messages never hold a secret. A call that is cancelled may have sent the
        event; the next call sends nothing before that attempt has ended on this side.
        """

    async def close(self) -> None:
        """Release what the sink holds; it sends nothing afterwards. Closing twice is fine."""
        return


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a sink may use besides its options."""

    #: The configured AWS credentials.
    profiles: Profiles
    #: Where the options were found, for messages.
    path: str


O = TypeVar("O", bound=Options)  # noqa: E741 - the options


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkType(Extension, Generic[O]):
    """Declares a type of sink: `type = "<id>"` in an entry of `events` selects it."""

    options: type[O]
    #: Returns the sink, without contacting anything; InvalidError if the options cannot work.
    open: Callable[[O, SinkContext], EventSink]
    #: Options that say which receiver it is. A sink with other values starts anew: its cursor in
    #: storage is named after them.
    target: tuple[str, ...]


def group_of(table: str, longest: int = 128) -> str:
    """Return the table as a message group: itself if a service takes that text, else its hash."""
    if re.fullmatch(rf"[!-~]{{1,{longest}}}", table):
        return table
    return hashlib.sha256(table.encode()).hexdigest()
