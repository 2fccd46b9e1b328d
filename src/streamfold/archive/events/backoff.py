"""Pauses between attempts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from streamfold.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first` to `longest`, in seconds, each up to half shorter at random.

    Randomness keeps many tables that lost one service from returning to it all at once.
    """

    first: float = 0.5
    longest: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise InvalidError(
                f"pauses from {self.first} to {self.longest} seconds: give 0 < first <= longest"
            )

    def pause(self, failures: int, rng: random.Random) -> float:
        """Return how long to wait after so many failures in a row."""
        # 2**64 of anything is beyond `longest`; a larger exponent would only overflow.
        whole = min(self.longest, self.first * 2.0 ** min(failures - 1, 64))
        return whole * rng.uniform(0.5, 1.0)
