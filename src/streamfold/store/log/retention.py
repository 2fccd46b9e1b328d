"""How long a stream and its records are kept: lifetime, age limit and trim points."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import msgspec

from streamfold.model.configs import INFINITE, StreamConfig
from streamfold.model.resources import StreamTraits

#: Parts of the grace period. Trims of one part take effect together, so that a stream trimmed with
#: every append tracks only a few.
_GRACE_PARTS: Final = 16


class Lifetime:
    """Tracks when a stream expires.

    Every use moves the deadline in memory. Storage has a lease that outlasts the deadline by a
    quarter of the ttl and is renewed occasionally: after a crash a stream may live that much
    longer, but never shorter.
    """

    __slots__ = ("_ttl", "deadline", "lease_until")

    def __init__(self, traits: StreamTraits | None, lease_until: int) -> None:
        #: ms since the Unix epoch; None = never expires.
        self.deadline: int | None = None
        self.lease_until = lease_until
        self._ttl: int | None = None
        if traits is not None:
            self.deadline = traits.expires_at
            if traits.ttl is not None:
                self._ttl = traits.ttl * 1000
                self.deadline = lease_until

    @classmethod
    def of(cls, traits: StreamTraits | None, lease_until: int) -> Lifetime:
        """Return a stream's lifetime. All streams that never expire share one object."""
        return _ENDLESS if traits is None and not lease_until else cls(traits, lease_until)

    @classmethod
    def begin(cls, traits: StreamTraits, now: int) -> Lifetime:
        """Return the lifetime of a stream created at `now`."""
        lifetime = cls(traits, 0)
        lifetime.renew(now)
        return lifetime

    def renew(self, now: int) -> bool:
        """Move the deadline because the stream is used.

        Returns whether storage needs a new lease.
        """
        if self._ttl is None:
            return False
        self.deadline = now + self._ttl
        if self.deadline <= self.lease_until:
            return False
        self.lease_until = self.deadline + self._ttl // 4
        return True


_ENDLESS: Final = Lifetime(None, 0)


def age_limit(config: StreamConfig) -> int | None:
    """Return the milliseconds for which a record is kept after its arrival, or None for no limit."""
    return None if config.retention == INFINITE else int(config.retention) * 1000


_NONE: Final = array("q")


class Expiry(msgspec.Struct, frozen=True, gc=False):
    """The latest known age boundary of a stream's records.

    It stays valid until the first record above it expires too, and derives later boundaries from
    the known chunks, so most reads look nothing up.
    """

    #: The age limit that this boundary was computed for.
    limit: int
    #: Every record below this has expired.
    seq_num: int
    #: No record from `seq_num` on arrived before this time, in ms since the Unix epoch.
    oldest: int
    #: First seq_nums and arrival times of stored chunks, in order and without gaps.
    starts: array[int] = _NONE
    arrivals: array[int] = _NONE

    def moved(self, horizon: int) -> Expiry | None:
        """Return the boundary for records that arrived before `horizon`, or None if unknown."""
        index = bisect_left(self.arrivals, horizon)
        if index == len(self.arrivals):
            return None
        return msgspec.structs.replace(
            self, seq_num=max(self.seq_num, self.starts[index]), oldest=self.arrivals[index]
        )

    def holds_until(self, limit: int | None) -> float:
        """Return the last time (ms) at which this boundary is valid for `limit`."""
        if limit is None:
            return math.inf
        return self.oldest + limit if self.limit == limit else -1


class _Waiting(msgspec.Struct):
    """A durable trim not yet visible to readers. Times are in ms since the Unix epoch."""

    began_at: int
    due_at: int
    point: int


class TrimPoints(msgspec.Struct, gc=False):
    """The trim points of one stream.

    A trim command takes effect for readers only `grace` ms after it is durable, so that a follower
    still receives every record acknowledged before or with it. Other trims take effect at once. No
    trim point ever moves back, whatever the clock does.
    """

    #: Accepted, but possibly not durable yet.
    accepted: int
    durable: int
    #: The part of `accepted` that takes effect without the grace period.
    accepted_at_once: int
    _effective: int
    _grace: int
    _now: Callable[[], int]
    #: How far upkeep has deleted since the stream was loaded.
    collected: int = 0
    #: In time order, at most one per part of the grace period plus one.
    _waiting: tuple[_Waiting, ...] = ()

    @classmethod
    def at(cls, point: int, grace: int, now: Callable[[], int]) -> TrimPoints:
        """Return trim points at which everything below `point` is trimmed."""
        return cls(point, point, point, point, grace, now)

    @property
    def effective(self) -> int:
        """The first record that readers may get. Storage keeps everything from it on."""
        if self._waiting:
            now = self._now()
            while self._waiting and self._waiting[0].due_at <= now:
                self._effective = max(self._effective, self._waiting[0].point)
                self._waiting = self._waiting[1:]
        return self._effective

    @property
    def due_at(self) -> int | None:
        """When the next trim takes effect; None if all have taken effect."""
        return self._waiting[0].due_at if self.effective < self.durable else None

    def accept(self, point: int, *, at_once: bool) -> bool:
        """Accept a trim. Returns False if it changes nothing."""
        raised = point > self.accepted
        self.accepted = max(self.accepted, point)
        if at_once and point > self.accepted_at_once:
            self.accepted_at_once = point
            return True
        return raised

    def settle(self, point: int, at_once: int) -> None:
        """Record that trims up to `point` are durable. Those up to `at_once` take effect now."""
        self._effective = max(self._effective, at_once)
        if point > self.durable:
            self.durable = point
            self._wait(point)

    def _wait(self, point: int) -> None:
        if not self._grace:
            self._effective = max(self._effective, point)
        if point <= self._effective:
            return
        now = self._now()
        if self._waiting and now - self._waiting[-1].began_at < self._grace // _GRACE_PARTS:
            self._waiting[-1].point = point
            self._waiting[-1].due_at = now + self._grace
        else:
            self._waiting += (_Waiting(now, now + self._grace, point),)
