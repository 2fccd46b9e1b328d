"""How long a stream lives: without end, until a time, or as long as it is used."""

from __future__ import annotations

from streamfold.model.traits import StreamTraits


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
