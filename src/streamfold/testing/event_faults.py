"""A fault-injecting event sink, for testing code that sends events."""

from __future__ import annotations

from streamfold.archive.events.event import Event
from streamfold.archive.events.sink import EventRefusedError, EventSink, EventUnconfirmedError
from streamfold.testing.faults import FaultKind, FaultPlan, FaultyCall, check_fault


class SinkCall(FaultyCall):
    """The call of an event sink.

    A fault raises `EventRefusedError`, or `EventUnconfirmedError` if its outcome is unknown.
    """

    SEND = "send"

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        return FaultKind.BEFORE, FaultKind.LOST, FaultKind.AFTER


class FaultyEventSink(EventSink):
    """Wraps `inner` and injects the faults of `plan`. Its own errors say "injected"."""

    def __init__(self, inner: EventSink, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    async def send(self, event: Event) -> None:
        fault = check_fault(SinkCall.SEND, self._plan.next_fault(SinkCall.SEND, event.event_id))
        if fault.kind is FaultKind.BEFORE:
            raise EventRefusedError(f"injected: event {event.event_id} was refused")
        if fault.kind is not FaultKind.LOST:
            await self._inner.send(event)
        if fault.kind is not None:
            raise EventUnconfirmedError(f"injected: the answer to {event.event_id} was lost")

    async def close(self) -> None:
        await self._inner.close()
