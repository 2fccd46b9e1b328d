"""Retention by age: which records of a stream are too old for readers at this moment."""

from __future__ import annotations

import math

import msgspec

from streamfold.model.configs import INFINITE, StreamConfig


def age_limit(config: StreamConfig) -> int | None:
    """Milliseconds after its arrival for which a record is kept; None = no limit."""
    return None if config.retention == INFINITE else int(config.retention) * 1000


class Expiry(msgspec.Struct, frozen=True):
    """The latest known age boundary of a stream's records.

    It stays valid until the first record above it is too old itself, so most reads look nothing up.
    """

    #: The age limit that this boundary was computed for.
    limit: int
    #: Every record below is too old.
    seq_num: int
    #: No record from `seq_num` on arrived before this; ms since the Unix epoch.
    oldest: int

    def holds_until(self, limit: int | None) -> float:
        """The last time (ms) at which this boundary is valid for `limit`."""
        if limit is None:
            return math.inf
        return self.oldest + limit if self.limit == limit else -1
