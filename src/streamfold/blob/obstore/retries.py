"""Time limits and retries of requests to remote storage, and what is known of their outcome."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TypeVar

from streamfold.backoff import pause_after
from streamfold.blob.obstore.errors_from_obstore import (
    OBSTORE_ERRORS,
    FailedRequest,
    FailureKind,
    classify_error,
    write_error,
)
from streamfold.errors import InvalidError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one call: at most about `attempts * request_timeout` plus the pauses.

    All times are in seconds.
    """

    #: A host that accepts no connection within this time counts as down.
    connect_timeout: float = 5.0
    #: One request with its body: a 128 MiB blob in one request needs 18 Mbit/s.
    request_timeout: float = 60.0
    #: How often one request is sent at most, including the first time.
    attempts: int = 4
    #: Pause after the first failure; doubles up to `longest_pause`, each up to half shorter.
    first_pause: float = 0.1
    longest_pause: float = 2.0

    @classmethod
    def take_from(cls, options: Mapping[str, str]) -> tuple[RequestLimits, dict[str, str]]:
        """Return the limits among `options`, and the other options."""
        names = {field.name for field in fields(cls)}
        given = {name: _parse(name, text) for name, text in options.items() if name in names}
        attempts = int(given.pop("attempts", cls().attempts))
        rest = {name: text for name, text in options.items() if name not in names}
        return cls(attempts=attempts, **given), rest

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each retry."""
        for failures in range(1, self.attempts):
            yield pause_after(failures, self.first_pause, self.longest_pause)

    @property
    def total(self) -> timedelta:
        """After this time no further retry starts."""
        return timedelta(seconds=self.attempts * self.request_timeout)


def _parse(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or (name == "attempts" and not number.is_integer()):
        kind = "a whole number above 0" if name == "attempts" else "a number of seconds above 0"
        raise InvalidError(f"option {name} is {text!r}: it must be {kind}")
    return number


T = TypeVar("T")

Sleep = Callable[[float], Awaitable[None]]


class WriteRetries:
    """Retries one write; `name` is the store's name in messages."""

    def __init__(self, name: str, limits: RequestLimits, sleep: Sleep) -> None:
        self._name = name
        self._limits = limits
        self._sleep = sleep

    async def repeat(self, key: str, attempt: Callable[[bool], Awaitable[T | FailedRequest]]) -> T:
        """Retry `attempt` until it succeeds, and return its result.

        `attempt` sends one request; its argument says whether an earlier one may have worked.
        """
        outcome_unknown = False
        pauses = self._limits.pauses()
        while isinstance(result := await attempt(outcome_unknown), FailedRequest):
            outcome_unknown = outcome_unknown or result.kind is FailureKind.OUTCOME_UNKNOWN
            pause = next(pauses, None)
            if pause is None or not result.is_retryable:
                raise write_error(self._name, key, result, outcome_unknown=outcome_unknown)
            await self._sleep(pause)
        return result


async def send(request: Awaitable[T]) -> T | FailedRequest:
    """Return the result of the request, or how it failed."""
    try:
        return await request
    except OBSTORE_ERRORS as error:
        return classify_error(error)
