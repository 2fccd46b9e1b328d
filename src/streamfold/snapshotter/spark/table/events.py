"""The events of one table: a dispatcher if sinks are configured, otherwise nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import EventDispatcher, open_sink
from streamfold.snapshotter.spark.table_job import TableJob

logger = logging.getLogger(__name__)

#: Seconds for the events of the last commits at a stop: an orchestrator often grants 30 s in all.
LAST_EVENTS_SECONDS = 10.0


class TableEvents:
    """Sends events for what the primary destination commits; used on one loop."""

    def __init__(self, job: TableJob, last_events: float = LAST_EVENTS_SECONDS) -> None:
        """`last_events`: the most seconds that a stop waits for sinks."""
        self._job = job
        self._last_events = last_events
        self._dispatcher: EventDispatcher | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, destination: Destination) -> None:
        """Send events from now on."""
        if self._dispatcher is not None or not self._job.events:
            return
        profiles = Profiles(self._job.credentials)
        sinks = {
            name: open_sink(dict(raw), profiles, path=f"events.{name}")
            for name, raw in self._job.events.items()
        }
        self._dispatcher = EventDispatcher(destination, sinks, order=self._job.layout.order)
        self._task = asyncio.create_task(self._dispatcher.run(), name="events")

    def wake(self) -> None:
        """Wake the dispatcher after a commit."""
        if self._dispatcher is not None:
            self._dispatcher.wake()

    async def stop(self, *, deliver: bool) -> None:
        """Stop sending, if `deliver` after giving sinks some seconds for what is committed.

        The next run sends the rest.
        """
        if self._dispatcher is None or self._task is None:
            return
        if deliver:
            await self._deliver(self._dispatcher)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._dispatcher.close()

    async def _deliver(self, dispatcher: EventDispatcher) -> None:
        try:
            async with asyncio.timeout(self._last_events):
                await dispatcher.settle()
        except TimeoutError:
            behind = (
                f"sink {name}: {status.last_error or 'no answer yet'}"
                for name, status in dispatcher.status.items()
                if status.lag or status.failures_in_row
            )
            logger.warning(
                "table %s: some events were not delivered within %.0f s of the stop, the next run "
                "sends them: %s",
                self._job.table, self._last_events, ", ".join(behind) or "sinks answer slowly",
            )  # fmt: skip

    @property
    def errors(self) -> Mapping[str, int]:
        if self._dispatcher is None:
            return dict.fromkeys(self._job.events, 0)
        return self._dispatcher.errors
