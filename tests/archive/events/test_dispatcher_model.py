"""Random histories of a table, its pruning, and dispatchers that are stopped anywhere."""

from __future__ import annotations

import asyncio
import random

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import Event, EventSink, MemorySink
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.event_faults import FaultyEventSink, SinkCall
from streamfold.testing.faults import SeededFaults
from tests.archive.events.feeds import Table, new_dispatcher, running, without_repetitions
from tests.proving import seeds

#: Commits, prunings and dispatchers in one history.
STEPS = 30


class Consumer:
    """Follows a table by its events alone: diffs that fit are applied, gaps are loaded."""

    def __init__(self) -> None:
        self.position: str | None = None
        self.loads = 0

    def take(self, event: Event) -> None:
        if event.kind == "diff":
            assert event.from_position == self.position, f"nothing leads to {event}"
        elif self.position is None or event.gap:
            self.loads += 1
        else:
            assert event.to_position == self.position, f"an unmarked gap before {event}"
        self.position = event.to_position


class StopPoint:
    """Counts steps of a dispatcher, and lets it go no further than the last one."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.reached = asyncio.Event()

    async def pass_by(self, _: float = 0.0) -> None:
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            await asyncio.Event().wait()


class StoppableSink(EventSink):
    """`inner`, with a step before and one after each event."""

    def __init__(self, inner: EventSink, stop: StopPoint) -> None:
        self._inner = inner
        self._stop = stop

    async def send(self, event: Event) -> None:
        await self._stop.pass_by()
        await self._inner.send(event)
        await self._stop.pass_by()


class History:
    """A table, a sink that fails now and then, and dispatchers that come and go."""

    def __init__(self, table: Table, seed: int) -> None:
        self.table = table
        self.sink = MemorySink()
        self._seed = seed
        self._rng = random.Random(seed)
        self._faulty = FaultyEventSink(self.sink, SeededFaults(self._rng, {SinkCall.SEND: 0.2}))
        self.was_pruned = False

    async def step(self) -> None:
        actions = [self.table.commit_diff, self.table.rebase, self.table.commit_gap]
        actions += [self._prune, self._stop_dispatcher, self.deliver]
        [action] = self._rng.choices(actions, [6, 3, 1, 1, 4, 3])
        await action()

    async def deliver(self) -> None:
        """Run a dispatcher until everything has arrived."""
        await self._dispatcher_until(StopPoint(10**9))

    async def _stop_dispatcher(self) -> None:
        await self._dispatcher_until(StopPoint(self._rng.randrange(30)))

    async def _dispatcher_until(self, stop: StopPoint) -> None:
        chances = {Operation.PUT_IF_MATCH: 0.2, Operation.PUT_IF_ABSENT: 0.2}
        chances[Operation.GET_WITH_ETAG] = 0.1
        # A delay for each call, so that each is a step.
        faults = SeededFaults(self._rng, chances, longest_delay=1.0)
        blobs = FaultyBlobStore(self.table.destination.blobs, faults, sleep=stop.pass_by)
        destination = Destination(blobs, self.table.destination.uri)
        sink = StoppableSink(self._faulty, stop)
        async with running(
            new_dispatcher(destination, {"sink": sink}, seed=self._seed)
        ) as dispatcher:
            ends = [
                asyncio.create_task(work) for work in (dispatcher.settle(), stop.reached.wait())
            ]
            await asyncio.wait(ends, timeout=300, return_when=asyncio.FIRST_COMPLETED)
            assert any(end.done() for end in ends), f"seed {self._seed} hangs"
            for end in ends:
                end.cancel()

    async def _prune(self) -> None:
        await self.table.prune(self._rng.choice([1, 2]))
        self.was_pruned = True


@pytest.mark.parametrize("seed", seeds(3, proving=100))
async def test_no_history_loses_an_event_or_hides_a_gap(seed: int) -> None:
    history = History(await Table.create(Destination.open("memory:table")), seed)
    for _ in range(STEPS):
        await history.step()
    await history.deliver()
    received, table = without_repetitions(history.sink.events), history.table
    consumer = Consumer()
    for event in received:
        consumer.take(event)
    assert consumer.position == str(table.position), f"seed {seed}"
    assert history.was_pruned or received == table.committed, f"seed {seed}"
    unknown = [event for event in received if event not in table.committed and not event.gap]
    assert unknown == [], f"seed {seed}"
