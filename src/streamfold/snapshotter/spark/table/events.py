"""Sends the events of one table, concurrently with its commits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import EventDispatcher, open_sink
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.jobs import TableJob


class TableEvents:
    """A dispatcher if sinks are configured, otherwise nothing."""

    def __init__(self, job: TableJob, loop: DriverLoop) -> None:
        self._job = job
        self._loop = loop
        self._pump: EventDispatcher | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, destination: Destination) -> None:
        """Send events for what the primary destination commits, from now on."""
        if self._pump is None and self._job.events:
            profiles = Profiles(self._job.credentials)
            sinks = {
                name: open_sink(dict(raw), profiles, path=f"events.{name}")
                for name, raw in self._job.events.items()
            }
            self._pump = EventDispatcher(destination, sinks, order=SEQ_NUM)
        if self._pump is not None and self._task is None:
            self._task = self._loop.start(self._pump.run(), "events")

    def wake(self) -> None:
        """Wake the dispatcher after a commit."""
        if self._pump is not None:
            self._loop.soon(self._pump.wake)

    def stop(self) -> None:
        """Stop sending; the next run sends the rest."""
        if self._pump is not None and self._task is not None:
            self._loop.end(self._task)
            self._task = None
            self._loop.call(self._pump.close())

    @property
    def errors(self) -> Mapping[str, int]:
        return self._pump.errors if self._pump is not None else dict.fromkeys(self._job.events, 0)
