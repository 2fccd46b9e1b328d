"""How long a stream and its records stay: lifetime, age, and how far it is trimmed."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import msgspec

from streamfold.model.configs import INFINITE, StreamConfig
from streamfold.model.resources import StreamTraits

#: Parts of the grace period: trims of one part take effect together, so that a stream that is trimmed
#: with every append remembers few of them.
_GRACE_PARTS: Final = 16


class Lifetime:
    """Knows when a stream ends.

    Every use moves the deadline in memory. Storage has a lease that outlasts it by a quarter of the ttl
    and is renewed now and then: after a crash a stream may live that much longer, but never shorter.
    """

    __slots__ = ("_ttl", "deadline", "lease_until")

    def __init__(self, traits: StreamTraits | None, lease_until: int) -> None:
        #: ms since the Unix epoch; None = never.
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
        """The lifetime of a stream; one object for all that never end, because it never changes."""
        return _ENDLESS if traits is None and not lease_until else cls(traits, lease_until)

    @classmethod
    def begin(cls, traits: StreamTraits, now: int) -> Lifetime:
        """The lifetime of a stream that is created now."""
        lifetime = cls(traits, 0)
        lifetime.renew(now)
        return lifetime

    def renew(self, now: int) -> bool:
        """Move the deadline because the stream is used; True when storage needs a new lease."""
        if self._ttl is None:
            return False
        self.deadline = now + self._ttl
        if self.deadline <= self.lease_until:
            return False
        self.lease_until = self.deadline + self._ttl // 4
        return True


_ENDLESS: Final = Lifetime(None, 0)


def age_limit(config: StreamConfig) -> int | None:
    """Milliseconds after its arrival for which a record is kept; None = no limit."""
    return None if config.retention == INFINITE else int(config.retention) * 1000


_NONE: Final = array("q")


class Expiry(msgspec.Struct, frozen=True, gc=False):
    """The latest known age boundary of a stream's records.

    It stays valid until the first record above it is too old itself, and tells the next ones from the
    chunks that are known, so most reads look nothing up.
    """

    #: The age limit that this boundary was computed for.
    limit: int
    #: Every record below is too old.
    seq_num: int
    #: No record from `seq_num` on arrived before this; ms since the Unix epoch.
    oldest: int
    #: The first records and the arrivals of stored chunks, in order and without a gap.
    starts: array[int] = _NONE
    arrivals: array[int] = _NONE

    def moved(self, horizon: int) -> Expiry | None:
        """The boundary of records that arrived before `horizon`; None if no known chunk tells."""
        index = bisect_left(self.arrivals, horizon)
        if index == len(self.arrivals):
            return None
        return msgspec.structs.replace(
            self, seq_num=max(self.seq_num, self.starts[index]), oldest=self.arrivals[index]
        )

    def holds_until(self, limit: int | None) -> float:
        """The last time (ms) at which this boundary is valid for `limit`."""
        if limit is None:
            return math.inf
        return self.oldest + limit if self.limit == limit else -1


class _Waiting(msgspec.Struct):
    """A durable trim that readers do not see yet. Times in ms since the Unix epoch."""

    began_at: int
    due_at: int
    point: int


class TrimPoints(msgspec.Struct, gc=False):
    """The trim points of one stream.

    A trim command takes effect for readers only `grace` ms after it became durable: a follower still
    gets every record that was acknowledged before it, or with it. Other trims take effect at once.
    No point ever goes back, whatever the clock does.
    """

    #: Accepted, but perhaps not durable yet.
    accepted: int
    durable: int
    #: The part of `accepted` that takes effect without grace.
    accepted_at_once: int
    _effective: int
    _grace: int
    _now: Callable[[], int]
    #: How far the background has deleted, since the stream was loaded.
    collected: int = 0
    #: In order of time, at most one for each part of the grace period and one more.
    _waiting: tuple[_Waiting, ...] = ()

    @classmethod
    def at(cls, point: int, grace: int, now: Callable[[], int]) -> TrimPoints:
        """Everything below `point` is trimmed."""
        return cls(point, point, point, point, grace, now)

    @property
    def effective(self) -> int:
        """The first record that readers may get; storage keeps everything from it on."""
        if self._waiting:
            now = self._now()
            while self._waiting and self._waiting[0].due_at <= now:
                self._effective = max(self._effective, self._waiting[0].point)
                self._waiting = self._waiting[1:]
        return self._effective

    @property
    def due_at(self) -> int | None:
        """When the next trim takes effect; None when all have."""
        return self._waiting[0].due_at if self.effective < self.durable else None

    def accept(self, point: int, *, at_once: bool) -> bool:
        """Accept a trim; False if it changes nothing."""
        raised = point > self.accepted
        self.accepted = max(self.accepted, point)
        if at_once and point > self.accepted_at_once:
            self.accepted_at_once = point
            return True
        return raised

    def settle(self, point: int, at_once: int) -> None:
        """Record that trims up to `point` are durable; those up to `at_once` take effect now."""
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
