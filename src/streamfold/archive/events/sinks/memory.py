"""A sink that keeps what it gets, for tests and for followers in the same process."""

from __future__ import annotations

import asyncio

from streamfold.archive.events.event import Event
from streamfold.archive.events.sink import EventRefusedError, EventSink


class MemorySink(EventSink):
    """Holds every event that was sent, repetitions included, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._closed = False
        self._arrived = asyncio.Condition()

    async def send(self, event: Event) -> None:
        if self._closed:
            raise EventRefusedError("the sink is closed: open another one")
        async with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    async def wait_for(self, count: int) -> list[Event]:
        """Return the events once there are `count` of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.events) >= count)
        return list(self.events)

    async def close(self) -> None:
        self._closed = True
