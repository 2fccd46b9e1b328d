"""Growing archives, seeded dispatchers, and deduplicating consumers of events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import Backoff, Event, EventDispatcher, EventSink
from streamfold.archive.events.event import describe
from streamfold.archive.maintenance.garbage_collection import Collector, Retention
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.write.writer import GAP, ArchiveWriter
from streamfold.backoff import UNATTENDED
from tests.archive.tables import START, changes, new_ids, open_writer, rows


class Table:
    """A table that is published by a real writer, one position per commit."""

    def __init__(self, writer: ArchiveWriter, destination: Destination) -> None:
        self.writer = writer
        self.destination = destination
        #: Every event that a sink has to get, in order, as long as nothing is pruned.
        self.committed: list[Event] = []

    @classmethod
    async def create(cls, destination: Destination) -> Table:
        """Return a table with its first base, at position 0."""
        table = cls(await open_writer(destination), destination)
        table._note(await table.writer.write_base(rows({}), "0", reason="first"), 1)
        return table

    @property
    def position(self) -> int:
        return int(str(self.writer.head))

    async def commit_diff(self) -> None:
        start, end = str(self.position), str(self.position + 1)
        insert = changes(("INSERT", self.position, "x"))
        self._note(await self.writer.write_diff(insert, start, end), 1)

    async def rebase(self) -> None:
        """Commit a base with the diff that leads to it."""
        insert = changes(("INSERT", self.position, "x"))
        end = str(self.position + 1)
        self._note(await self.writer.rebase(rows({}), insert, end, reason="forced"), 2)

    async def commit_gap(self) -> None:
        """Commit a base to which no diff leads."""
        await self.writer.write_base(rows({}), str(self.position + 10), reason=GAP)
        manifest = self._manifest()
        self.committed.append(self.event(manifest, -1, gap=True))

    async def prune(self, keep_epochs: int = 1) -> None:
        """Take old epochs out of the manifest."""
        collector = Collector(
            [self.destination], now=lambda: START, new_id=new_ids(f"prune{self.position}x")
        )
        await collector.collect(Retention(keep_epochs=keep_epochs, grace=timedelta(days=1)))
        await self.writer.refresh()

    def event(self, manifest: Manifest, index: int, *, gap: bool = False) -> Event:
        uri = self.destination.manifest_uri
        return describe(manifest, manifest.artifacts[index], uri, gap=gap)

    def gap_notice(self) -> Event:
        """Return what announces the newest base to a sink that has fallen behind the pruning."""
        manifest = self._manifest()
        return self.event(manifest, manifest.artifacts.index(manifest.base), gap=True)

    def _note(self, manifest: Manifest, count: int) -> None:
        self.committed += [self.event(manifest, index) for index in range(-count, 0)]

    def _manifest(self) -> Manifest:
        assert self.writer.manifest is not None
        return self.writer.manifest


class Pauses:
    """A clock for pauses: it takes no time, and remembers how long each should have been."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        #: Set when something has failed.
        self.begun = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.lengths.append(seconds)
        self.begun.set()
        await asyncio.sleep(0)


def new_dispatcher(
    destination: Destination,
    sinks: Mapping[str, EventSink],
    *,
    seed: int = 1,
    pauses: Pauses | None = None,
    backoff: Backoff = UNATTENDED,
    poll_interval: float | None = None,
) -> EventDispatcher:
    """Return a dispatcher that looks only when it is woken, and whose pauses take no time."""
    return EventDispatcher(
        destination,
        sinks,
        backoff=backoff,
        poll_interval=poll_interval,
        now=lambda: START,
        rng=random.Random(seed),
        sleep=(pauses or Pauses()).sleep,
    )


@asynccontextmanager
async def running(dispatcher: EventDispatcher) -> AsyncIterator[EventDispatcher]:
    """Run the dispatcher until the block ends; then it is cancelled, as if the process were stopped."""
    task = asyncio.create_task(dispatcher.run())
    try:
        yield dispatcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled(), "the dispatcher ended by itself"


async def deliver_all(destination: Destination, **sinks: EventSink) -> EventDispatcher:
    """Run a new dispatcher until every sink has everything."""
    async with asyncio.timeout(300), running(new_dispatcher(destination, sinks)) as dispatcher:
        await dispatcher.settle()
    return dispatcher


def without_repetitions(events: Iterable[Event]) -> list[Event]:
    """Return what a consumer acts on: the first of each id."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.event_id, event)
    return list(first.values())
