"""Whatever the interleaving, restore + follow equals folding from the start."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamfold.blob import open_blob_store
from streamfold.errors import RetryLaterError
from streamfold.follow import MemoryStream, Snapshots, auto, external, in_stream, prune
from streamfold.follow.encoding.stream_writer import Sizes
from streamfold.follow.snapshots.taker import Outcome, RetentionRules, SnapshotTaker
from tests.follow.ledger import SMALL, KilledError, Ledger, State, Watched
from tests.proving import PROVING

T = TypeVar("T")
KINDS = st.sampled_from(["external", "external+trim", "record", "framed", "auto"])
#: Milliseconds: longer than a dead writer of frames is waited for.
LATER = 60_000


class Interleavings(RuleBasedStateMachine):
    """Two takers that may die at any append, writers and trims in between, a reader that stays
    and readers that are new; the model is the list of all deltas.
    """

    @initialize(lazy=st.booleans())
    def begin(self, lazy: bool) -> None:
        self.runner = asyncio.Runner()
        self.now = 1_700_000_000_000
        self.blobs = open_blob_store("memory:")
        self.outside = False
        self.ledger = self.run(self._ledger(lazy))
        self.takers: list[tuple[SnapshotTaker[State], Watched] | None] = [None, None]
        self.reader = self.ledger.follow(self.everywhere())
        self.run(self.reader.__aenter__())

    async def _ledger(self, lazy: bool) -> Ledger:
        return Ledger(MemoryStream(lazy_trims=lazy, now=lambda: self.now))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    def everywhere(self) -> Snapshots[State]:
        return auto(self.blobs)

    @rule(count=st.integers(1, 12))
    def append(self, count: int) -> None:
        self.run(self.ledger.add(count))
        self.now += 1

    @rule(
        which=st.integers(0, 1),
        kind=KINDS,
        dies_at=st.none() | st.integers(0, 6),
        acknowledged=st.booleans(),
        interleaved=st.lists(st.integers(0, 3), max_size=8),
    )
    def snapshot(
        self,
        which: int,
        kind: str,
        dies_at: int | None,
        acknowledged: bool,
        interleaved: list[int],
    ) -> None:
        """Take a snapshot while others append before each step of it; perhaps die at one."""
        if self.takers[which] is None:
            self.takers[which] = self.run(self._start(kind))
        taker, watched = self.takers[which]  # type: ignore[misc]
        first = watched.appends

        async def before(number: int) -> None:
            step = number - first
            if step < len(interleaved) and interleaved[step]:
                await self.ledger.add(interleaved[step])
            if step == dies_at and not acknowledged:
                raise KilledError

        async def after(number: int) -> None:
            if number - first == dies_at and acknowledged:
                raise KilledError

        watched.before, watched.after = before, after
        try:
            taken = self.run(taker.take())
            assert taken.outcome in Outcome
        except KilledError:
            self.run(taker.__aexit__(None, None, None))
            self.takers[which] = None
        except RetryLaterError:
            pass  # outrun: the taker says so, and may try again
        self.now += 1

    async def _start(self, kind: str) -> tuple[SnapshotTaker[State], Watched]:
        watched = Watched(self.ledger.stream)
        by_kind = {"auto": auto(self.blobs), "record": in_stream(), "framed": in_stream()}
        taker = self.ledger.taker(
            # One that writes in the stream alone still restores from wherever the newest is.
            Snapshots(
                auto(self.blobs).codec,
                self.everywhere().store,
                by_kind.get(kind, external(self.blobs)).writing,
            )
            if kind not in ("record", "framed")
            else _in_stream_knowing(self.everywhere()),
            watched,
            keeping=RetentionRules(trim=kind == "external+trim"),
            sizes=Sizes() if kind == "record" else SMALL,
            now=lambda: self.now,
        )
        await taker.__aenter__()
        return taker, watched

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        running = self.takers[which]
        if running is not None:
            self.run(running[0].__aexit__(None, None, None))
            self.takers[which] = None

    @rule()
    def trims_take_effect(self) -> None:
        assert isinstance(self.ledger.stream, MemoryStream)
        self.ledger.stream.apply_trims()

    @rule()
    def time_passes(self) -> None:
        self.now += LATER

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        store = self.everywhere().store
        assert store is not None
        self.run(prune(store, keep=keep, now=self.now))

    @rule()
    def reader_catches_up(self) -> None:
        self.run(self.reader.catch_up())
        assert self.reader.value["seen"] == self.ledger.expected

    @rule()
    def reader_follows_one_change(self) -> None:
        before = len(self.reader.value["seen"])
        if before < len(self.ledger.expected):
            self.run(self.reader.__anext__())
            seen = self.reader.value["seen"]
            assert before < len(seen) or self.reader.plan is not None
            assert seen == self.ledger.expected[: len(seen)]

    @rule()
    def reader_restarts(self) -> None:
        self.run(self.reader.__aexit__(None, None, None))
        self.reader = self.ledger.follow(self.everywhere())
        self.run(self.reader.__aenter__())

    @invariant()
    def a_new_reader_has_everything(self) -> None:
        if hasattr(self, "ledger"):
            found = self.run(self.ledger.restored(self.everywhere()))
            assert found == self.ledger.expected

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.reader.__aexit__(None, None, None))
            for which in (0, 1):
                self.restart(which)
            self.runner.close()


def _in_stream_knowing(everywhere: Snapshots[State]) -> Snapshots[State]:
    """Write into the stream, and restore from anywhere."""
    return Snapshots(everywhere.codec, everywhere.store, in_stream().writing)


#: `make prove` runs many more examples, at random; CI runs the same few every time.
Interleavings.TestCase.settings = settings(
    max_examples=2000 if PROVING else 60,
    stateful_step_count=30,
    deadline=None,
    derandomize=not PROVING,
    suppress_health_check=list(HealthCheck),
)
TestInterleavings = Interleavings.TestCase
