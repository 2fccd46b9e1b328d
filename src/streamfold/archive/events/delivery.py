"""Delivers a table's events to each sink in order, without holding up commits."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events.cursor import CursorFile, events_of, find_due, position_of
from streamfold.archive.events.sink import EventSink
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.backoff import UNATTENDED, Backoff
from streamfold.errors import StreamfoldError

logger = logging.getLogger(__name__)

#: Events between two writes of the cursor while a backlog is sent. Each write costs a request, and
#: a crash repeats at most this many events.
CURSOR_EVERY = 16
#: Seconds between two reads of the manifest without `wake`. Only these reads find commits of other
#: processes.
POLL_INTERVAL = 30.0


@dataclass(slots=True)
class SinkStatus:
    """One sink's status as shown in metrics."""

    #: Events that were committed but not yet delivered when the manifest was last read.
    lag: int = 0
    delivered: int = 0
    #: Failed attempts to send, or to access storage.
    errors: int = 0
    #: Of these, the attempts since the last success.
    failures_in_row: int = 0
    last_error: str | None = None
    #: `to_position` of the last event delivered by this process.
    position: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """Sets when to read the manifest and retry. `poll` is in seconds. None waits only for `wake`."""

    backoff: Backoff
    poll: float | None
    rng: random.Random
    sleep: Callable[[float], Awaitable[None]]


class Delivery:
    """Sends all events in the manifest beyond the cursor, retrying failures indefinitely.

    An event is sent only after the previous one has arrived, so no failure changes the order.
    """

    def __init__(
        self,
        name: str,
        sink: EventSink,
        destination: Destination,
        cursor: CursorFile,
        pace: DeliveryTiming,
        order: PositionOrder | None,
    ) -> None:
        self.status = SinkStatus()
        self._name = name
        self._sink = sink
        self._destination = destination
        self._cursor = cursor
        self._pace = pace
        self._order = order
        self._wakes = 0
        self._answered = 0
        self._woken = asyncio.Event()
        self._caught_up = asyncio.Condition()

    def wake(self) -> int:
        """Request a read of the manifest, and return the request's number."""
        self._wakes += 1
        self._woken.set()
        return self._wakes

    async def wait_until_answered(self, request: int) -> None:
        """Wait until everything committed before the request has been delivered."""
        async with self._caught_up:
            await self._caught_up.wait_for(lambda: self._answered >= request)

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            requests = self._wakes
            self._woken.clear()
            try:
                await self._catch_up()
            except StreamfoldError as error:
                await self._pause_after(error.message)
                continue
            except Exception as error:
                logger.debug("sink %s: unexpected error", self._name, exc_info=True)
                # Not its text, which may quote the event.
                await self._pause_after(f"a defect of the sink ({type(error).__name__})")
                continue
            self.status.failures_in_row = 0
            async with self._caught_up:
                self._answered = requests
                self._caught_up.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.poll):
                    await self._woken.wait()

    async def _catch_up(self) -> None:
        await self._cursor.settle()
        stored = await self._destination.read(self._order)
        if stored is None:  # nothing was ever committed
            self.status.lag = 0
            return
        manifest = stored.manifest
        due = find_due(manifest, self._cursor.position)
        self.status.lag = len(due)
        events = events_of(manifest, due, self._destination.manifest_uri)
        for number, (item, event) in enumerate(zip(due, events, strict=True), 1):
            try:
                await self._sink.send(event)
            except Exception:
                await self._cursor.save()
                raise
            self._cursor.advance(event.event_id, position_of(manifest, item.artifact))
            self._note_delivery(event.to_position)
            if number % CURSOR_EVERY == 0:
                await self._cursor.save()
        await self._cursor.save()

    def _note_delivery(self, position: str) -> None:
        status = self.status
        status.lag -= 1
        status.delivered += 1
        status.failures_in_row = 0
        status.position = position

    async def _pause_after(self, failure: str) -> None:
        status = self.status
        status.errors += 1
        status.failures_in_row += 1
        status.last_error = failure
        pause = self._pace.backoff.pause(status.failures_in_row, self._pace.rng)
        logger.warning(
            "sink %s: attempt %d failed, retrying in %.1f s: %s",
            self._name,
            status.failures_in_row,
            pause,
            failure,
        )
        await self._pace.sleep(pause)


def _now() -> datetime:
    return datetime.now(UTC)


class EventDispatcher:
    """Announces every artifact to every sink at least once, in the table's order.

    A sink's name is also the name of its cursor in storage, so it must not change. Each sink has
    its own task, so a slow or failed one does not stop the others. Nothing is queued in memory: the
    manifest shows what is still to be sent. Run one dispatcher per table. A second one would only
    send everything twice.
    """

    def __init__(
        self,
        destination: Destination,
        sinks: Mapping[str, EventSink],
        *,
        order: PositionOrder | None = None,
        backoff: Backoff = UNATTENDED,
        poll_interval: float | None = POLL_INTERVAL,
        now: Callable[[], datetime] = _now,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        # Jitter needs no secrecy.
        pace = DeliveryTiming(backoff, poll_interval, rng or random.Random(), sleep)  # noqa: S311
        self._sinks = dict(sinks)
        self._deliveries = {
            name: Delivery(
                name, sink, destination, CursorFile(destination.blobs, name, now), pace, order
            )
            for name, sink in sinks.items()
        }

    async def run(self) -> None:
        """Deliver until cancelled, including everything committed before this began.

        Failures of sinks and storage, and exceptions of any other type, are counted, logged and
        retried indefinitely. A defect in one sink does not stop the others.
        """
        async with asyncio.TaskGroup() as group:
            for name, delivery in self._deliveries.items():
                group.create_task(delivery.run(), name=f"events-{name}")
            if not self._deliveries:  # without sinks, too, this runs until cancelled
                await asyncio.Event().wait()

    def wake(self) -> None:
        """Announce a commit. Returns at once.

        Call this in the event loop's thread. Other threads use `loop.call_soon_threadsafe`.
        """
        for delivery in self._deliveries.values():
            delivery.wake()

    async def settle(self) -> None:
        """Wait until every sink has everything committed so far. `run` must be active."""
        requests = [(delivery, delivery.wake()) for delivery in self._deliveries.values()]
        for delivery, request in requests:
            await delivery.wait_until_answered(request)

    @property
    def lag(self) -> Mapping[str, int]:
        """Events that each sink has not received yet, as of the last read of the manifest."""
        return {name: delivery.status.lag for name, delivery in self._deliveries.items()}

    @property
    def errors(self) -> Mapping[str, int]:
        """Failed attempts by sink since this process started."""
        return {name: delivery.status.errors for name, delivery in self._deliveries.items()}

    @property
    def status(self) -> Mapping[str, SinkStatus]:
        """Copies of everything that metrics show, by sink."""
        return {name: replace(delivery.status) for name, delivery in self._deliveries.items()}

    async def close(self) -> None:
        """Close the sinks. Call this after `run` has ended."""
        for sink in self._sinks.values():
            await sink.close()
