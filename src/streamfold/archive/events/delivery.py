"""Delivery of a table's events to all its sinks, to each in order, without holding up commits."""

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

#: Events between two writes of the cursor while a backlog is sent: each costs a request, and a
#: crash repeats at most this many.
CURSOR_EVERY = 16
#: Seconds between two reads of the manifest without `wake`: only they find commits of other
#: processes.
POLL_INTERVAL = 30.0


@dataclass(slots=True)
class SinkStatus:
    """What metrics show of one sink."""

    #: Events that are committed and not yet delivered, when the manifest was last read.
    lag: int = 0
    delivered: int = 0
    #: Failed attempts, of sending or of storage.
    errors: int = 0
    #: Of these, those since the last success.
    failures_in_row: int = 0
    last_error: str | None = None
    #: `to_position` of the last event delivered by this process.
    position: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryTiming:
    """When to read the manifest and retry; `poll` is in seconds, None to wait for `wake` alone."""

    backoff: Backoff
    poll: float | None
    rng: random.Random
    sleep: Callable[[float], Awaitable[None]]


class Delivery:
    """Sends what the manifest has and the cursor does not cover; failures are retried without end.

    An event is sent only when the one before it has arrived, so no failure changes the order.
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
        """Ask for a read of the manifest; return the number of the request."""
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
                # Not its text, which may quote what was sent.
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
    """Every artifact is announced to every sink at least once, in the order of the table.

    A sink's name is also the name of its cursor in storage and must stay the same. Each has a
    task of its own, so one that is slow or down stops no other. Nothing is queued in memory: the
    manifest is what is still to be sent. Run one dispatcher per table: a second
    one would only send everything twice.
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
        """Deliver until cancelled; what was committed before this began is delivered, too.

        Failures of sinks and of storage are counted, logged and retried without end, and so are
        exceptions of any other type: a defect of one sink does not stop the others.
        """
        async with asyncio.TaskGroup() as group:
            for name, delivery in self._deliveries.items():
                group.create_task(delivery.run(), name=f"events-{name}")
            if not self._deliveries:  # without sinks it runs until cancelled, too
                await asyncio.Event().wait()

    def wake(self) -> None:
        """Announce a commit; returns at once.

        Call it in the thread of the loop; other threads use `loop.call_soon_threadsafe`.
        """
        for delivery in self._deliveries.values():
            delivery.wake()

    async def settle(self) -> None:
        """Wait until every sink has all that is committed by now; `run` must be under way."""
        requests = [(delivery, delivery.wake()) for delivery in self._deliveries.values()]
        for delivery, request in requests:
            await delivery.wait_until_answered(request)

    @property
    def lag(self) -> Mapping[str, int]:
        """Events that each sink has not received yet, according to the last read of the manifest."""
        return {name: delivery.status.lag for name, delivery in self._deliveries.items()}

    @property
    def errors(self) -> Mapping[str, int]:
        """Failed attempts, by sink, since this process began."""
        return {name: delivery.status.errors for name, delivery in self._deliveries.items()}

    @property
    def status(self) -> Mapping[str, SinkStatus]:
        """Everything that metrics show, by sink; copies."""
        return {name: replace(delivery.status) for name, delivery in self._deliveries.items()}

    async def close(self) -> None:
        """Close the sinks; `run` has ended."""
        for sink in self._sinks.values():
            await sink.close()
