"""A sink that fails as planned, for tests of code that sends events."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from streamfold.archive.events.event import Event
from streamfold.archive.events.sink import EventRefusedError, EventSink, EventUnconfirmedError


class EventFault(enum.StrEnum):
    """How a call of `send` fails."""

    #: `EventRefusedError`; the event was not sent.
    BEFORE = "before"
    #: `EventUnconfirmedError`; the event was not sent.
    LOST = "lost"
    #: `EventUnconfirmedError`; the event was sent.
    AFTER = "after"


class EventFaultPlan(Protocol):
    """Decides about each call, in the order in which calls begin."""

    def next_fault(self, event: Event) -> EventFault | None:
        """Return what happens to this call; None to leave it alone."""
        ...


class ScriptedEventFaults:
    """The n-th call gets the n-th fault; later calls succeed."""

    def __init__(self, script: Iterable[EventFault | None] = ()) -> None:
        self._left = deque(script)

    def next_fault(self, event: Event) -> EventFault | None:
        return self._left.popleft() if self._left else None


class SeededEventFaults:
    """Each call fails with the given chance; the same `rng` gives the same faults."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self._rng = rng
        self._chance = chance

    def next_fault(self, event: Event) -> EventFault | None:
        if self._rng.random() >= self._chance:
            return None
        return self._rng.choice(list(EventFault))


class FaultyEventSink(EventSink):
    """`inner`, failing as `plan` says; errors of its own always name themselves as injected."""

    def __init__(self, inner: EventSink, plan: EventFaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    async def send(self, event: Event) -> None:
        fault = self._plan.next_fault(event)
        if fault is EventFault.BEFORE:
            raise EventRefusedError(f"injected: event {event.event_id} was refused")
        if fault is not EventFault.LOST:
            await self._inner.send(event)
        if fault is not None:
            raise EventUnconfirmedError(f"injected: the answer to {event.event_id} was lost")

    async def close(self) -> None:
        await self._inner.close()
