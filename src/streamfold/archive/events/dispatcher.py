"""Sends the events of one table to all its sinks, without holding up commits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events.cursor import CursorFile
from streamfold.archive.events.delivery import Delivery, DeliveryTiming, SinkStatus
from streamfold.archive.events.sink import EventSink
from streamfold.archive.manifest.positions import PositionOrder
from streamfold.backoff import Backoff

#: Seconds between two reads of the manifest without `wake`: only they find commits of other
#: processes.
POLL_INTERVAL = 30.0


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
        backoff: Backoff | None = None,
        poll_interval: float | None = POLL_INTERVAL,
        now: Callable[[], datetime] = _now,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        # Jitter needs no secrecy.
        pace = DeliveryTiming(backoff or Backoff(), poll_interval, rng or random.Random(), sleep)  # noqa: S311
        self._sinks = dict(sinks)
        self._deliveries = {
            name: Delivery(
                name, sink, destination, CursorFile(destination.blobs, name, now), pace, order
            )
            for name, sink in sinks.items()
        }

    async def run(self) -> None:
        """Deliver until cancelled; what was committed before this began is delivered, too.

        Failures of sinks and of storage are counted, logged and retried without end. Only a
        defect of a sink, an exception that is not a `StreamfoldError`, ends it.
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
