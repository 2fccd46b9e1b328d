"""The events of one table, sent beside its commits."""

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
    """A pump where sinks are configured, nothing where none are."""

    def __init__(self, job: TableJob, loop: DriverLoop) -> None:
        self._job = job
        self._loop = loop
        self._pump: EventDispatcher | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, destination: Destination) -> None:
        """Send what is committed in the deciding destination, from now on."""
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
        """Say that something was committed."""
        if self._pump is not None:
            self._loop.soon(self._pump.wake)

    def stop(self) -> None:
        """End the sending; what is not sent yet is sent by the next run."""
        if self._pump is not None and self._task is not None:
            self._loop.end(self._task)
            self._task = None
            self._loop.call(self._pump.close())

    @property
    def errors(self) -> Mapping[str, int]:
        return self._pump.errors if self._pump is not None else dict.fromkeys(self._job.events, 0)
