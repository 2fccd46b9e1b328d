"""How long a request to remote storage may take, and how often it is repeated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta

from streamfold.errors import InvalidError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one call: at most about `attempts * request_timeout` plus the pauses.

    All times are in seconds.
    """

    #: A host that takes no connection in this time is taken to be down.
    connect_timeout: float = 5.0
    #: One request with its body: a 128 MiB blob in one request needs 18 Mbit/s.
    request_timeout: float = 60.0
    #: How often one request is sent at most, the first time included.
    attempts: int = 4
    #: Pause after the first failure; doubles up to `longest_pause`.
    first_pause: float = 0.1
    longest_pause: float = 2.0

    @classmethod
    def take_from(cls, options: Mapping[str, str]) -> tuple[RequestLimits, dict[str, str]]:
        """Return the limits given among `options`, and the options that are none."""
        names = {field.name for field in fields(cls)}
        given = {name: _parse(name, text) for name, text in options.items() if name in names}
        attempts = int(given.pop("attempts", cls().attempts))
        rest = {name: text for name, text in options.items() if name not in names}
        return cls(attempts=attempts, **given), rest

    def pauses(self) -> Iterator[float]:
        """Yield the pause before each repetition."""
        for repetition in range(self.attempts - 1):
            yield min(self.first_pause * 2**repetition, self.longest_pause)

    @property
    def total(self) -> timedelta:
        """After this time no further repetition starts."""
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
