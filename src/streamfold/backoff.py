"""Pauses between retries."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Final

from streamfold.errors import InvalidError, StreamfoldError

logger = logging.getLogger(__name__)
_RNG = random.Random()  # noqa: S311 - only for pauses


def pause_after(
    failures: int,
    first: float,
    longest: float,
    rng: random.Random = _RNG,
    spread: tuple[float, float] = (0.5, 1.0),
) -> float:
    """Return how long to wait after this many failures in a row, in the unit of `first`.

    The pause doubles from `first` to `longest`, times a random factor from `spread`, so that
    callers that lost one service do not all return to it at once.
    """
    # 2**64 times any pause is beyond `longest`. A larger exponent would only overflow.
    return min(longest, first * 2.0 ** min(failures - 1, 64)) * rng.uniform(*spread)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first` to `longest` seconds, each randomly up to half shorter."""

    first: float = 0.1
    longest: float = 10.0
    #: Consecutive failures after which `wait` gives up, or None for never.
    attempts: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise InvalidError(
                f"pauses from {self.first} to {self.longest} seconds: give 0 < first <= longest"
            )

    def pause(self, failures: int, rng: random.Random = _RNG) -> float:
        """Return how many seconds to wait after this many failures in a row."""
        return pause_after(failures, self.first, self.longest, rng)

    async def wait(self, failures: int, error: StreamfoldError) -> None:
        """Wait after this many failures in a row. Raises `error` once the attempts are used up."""
        if self.attempts is not None and failures >= self.attempts:
            raise error
        logger.warning("trying again after failure %d: %s", failures, error)
        await asyncio.sleep(self.pause(failures))


#: For processes that run unattended and retry indefinitely.
UNATTENDED: Final = Backoff(first=0.5, longest=60.0)
