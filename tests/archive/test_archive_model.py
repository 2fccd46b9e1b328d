"""State machine: an archive always rebuilds to the table's state at each of its positions.

Changes, flushes, re-bases, restarts, two writers, collection, and faults before and after every
call of storage, in any order; after every step both destinations are read by a reader of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfold.archive.destinations.destination import PROBE
from streamfold.archive.errors import ManifestNotFoundError, WriterFencedOutError
from streamfold.archive.maintenance.garbage_collection import Collector, Retention
from streamfold.archive.write.writer import ArchiveWriter
from streamfold.blob import open_blob_store
from streamfold.errors import OutcomeUnknownError, RetryLaterError
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import Fault, FaultyCall, SeededFaults
from tests.archive.plain_reader import read_states
from tests.archive.tables import Clock, State, at, net_changes, new_ids, open_writer, rows

#: What may come out of a call while storage fails; anything else is a defect.
EXPECTED = (RetryLaterError, OutcomeUnknownError, WriterFencedOutError)
#: Chances that one call of storage fails.
CHANCES = (0.0, 0.03, 0.1, 0.2)


class Faults:
    """Faults by the seed, until storage is said to be well again; none for the self-test, which
    makes so many calls that hardly a writer would open.
    """

    def __init__(self, seed: int, chance: float) -> None:
        self._plan = SeededFaults(random.Random(seed), dict.fromkeys(Operation, chance))
        self.healthy = False

    def next_fault(self, operation: FaultyCall, key: str) -> Fault:
        fault = self._plan.next_fault(operation, key)
        return Fault() if self.healthy or key.startswith(PROBE) else fault


class World:
    """The truth about a table, two writers that publish it, and two destinations."""

    def __init__(self, seed: int, chance: float) -> None:
        self.states: list[dict[int, str]] = [{}]  # at positions -1, 0, 1, ...
        self.stores = [open_blob_store("memory:"), open_blob_store("memory:")]
        self.faults = [Faults(seed, chance), Faults(seed + 1, chance)]
        faulty = [FaultyBlobStore(*pair) for pair in zip(self.stores, self.faults, strict=True)]
        self.destinations = [at(faulty[0], "memory:one/"), at(faulty[1], "memory:two/")]
        self.writers: list[ArchiveWriter | None] = [None, None]
        self.new_id: Callable[[], str] = new_ids("all")
        self.clock = Clock()
        self.acknowledged = -1

    @property
    def head(self) -> int:
        return len(self.states) - 2

    def change(self, key: int, name: str | None) -> None:
        """Upsert a row, delete it (no name), or clear the table (key 0)."""
        state = dict(self.states[-1])
        if key == 0:
            state.clear()
        elif name is None:
            state.pop(key, None)
        else:
            state[key] = name
        self.states.append(state)

    async def act(self, number: int, action: str) -> None:
        """Let one writer do something, as a process would: after some errors it starts again."""
        try:
            writer = self.writers[number] or await self._open(number)
            self.writers[number] = writer
            await self._publish(writer, action)
        except WriterFencedOutError:
            self.writers[number] = None
        except EXPECTED:
            pass  # storage failed: the next action of this writer must cope

    async def _open(self, number: int) -> ArchiveWriter:
        return await open_writer(
            *self.destinations, writer_id=f"writer-{number}", ids=self.new_id(), clock=self.clock
        )

    async def _publish(self, writer: ArchiveWriter, action: str) -> None:
        await writer.refresh()
        end, state = self.head, self.states[-1]
        if writer.manifest is None or writer.head is None:
            manifest = await writer.write_base(in_buckets(state), str(end), reason="first")
        elif action == "rebase":
            based = self.states[int(writer.manifest.base.to_position) + 1]
            untouched = [b for b in BUCKETS if bucket_of(based, b) == bucket_of(state, b)]
            changed = {b: part for b, part in in_buckets(state).items() if b not in untouched}
            closing = net_changes(self.states[int(writer.head) + 1], state)
            manifest = await writer.rebase(
                changed, closing, str(end), reason="forced", reuse=untouched
            )
        elif int(writer.head) < end:
            closing = net_changes(self.states[int(writer.head) + 1], state)
            manifest = await writer.write_diff(closing, writer.head, str(end))
        else:
            return
        self.acknowledged = max(self.acknowledged, int(manifest.head_position))

    async def collect(self) -> None:
        """Collect what is out of reach, with a grace period as real ones have."""
        collector = Collector(self.destinations, now=self.clock.now, new_id=self.new_id)
        try:
            await collector.collect(Retention(keep_epochs=1, grace=timedelta(days=1)))
        except (*EXPECTED, ManifestNotFoundError):
            pass  # nothing was collected: the next run must cope

    async def check(self) -> None:
        """Every boundary of every destination is right, and nothing acknowledged is lost."""
        heads = []
        for store in self.stores:
            states = await read_states(store)
            for position, state in states:
                assert state == self.states[int(position) + 1], f"at {position}"
            heads.append(int(states[-1][0]) if states else -1)
        assert heads[0] >= self.acknowledged
        assert heads[0] >= heads[1]


BUCKETS = (0, 1)


def bucket_of(state: State, bucket: int) -> State:
    return {key: name for key, name in state.items() if key % len(BUCKETS) == bucket}


def in_buckets(state: State) -> dict[int, list[pa.RecordBatch]]:
    return {bucket: rows(bucket_of(state, bucket)) for bucket in BUCKETS}


Step = tuple[str, int, str | None]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.integers(0, 4), st.none() | st.sampled_from("abc")),
        st.tuples(st.sampled_from(["flush", "rebase"]), st.integers(0, 1), st.none()),
        st.tuples(st.sampled_from(["restart"]), st.integers(0, 1), st.none()),
        st.tuples(st.sampled_from(["race", "collect"]), st.just(0), st.none()),
    ),
    min_size=5,
    max_size=40,
)


async def follow(steps: list[Step], seed: int, chance: float) -> None:
    world = World(seed, chance)
    for action, number, name in steps:
        if action == "change":
            world.change(number, name)
        elif action == "restart":
            world.writers[number] = None
        elif action == "collect":
            await world.collect()
        elif action == "race":
            await asyncio.gather(world.act(0, "flush"), world.act(1, "rebase"))
        else:
            await world.act(number, action)
        await world.check()
    await finish(world)


async def finish(world: World) -> None:
    """With storage well again, one more writer brings everything up to date."""
    for faults in world.faults:
        faults.healthy = True
    world.change(1, "last")
    world.writers[0] = None
    await world.act(0, "flush")
    await world.check()
    expected = (str(world.head), world.states[-1])
    assert [(await read_states(store))[-1] for store in world.stores] == [expected] * 2


@given(STEPS, st.integers(0, 2**32), st.sampled_from(CHANCES))
@settings(max_examples=80, deadline=None, derandomize=True, print_blob=True)
def test_any_interleaving_rebuilds_to_the_model_at_every_boundary(
    steps: list[Step], seed: int, chance: float
) -> None:
    asyncio.run(follow(steps, seed, chance))
