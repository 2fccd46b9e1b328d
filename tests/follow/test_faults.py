"""Restores stay correct when each call fails once, in every way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError, RetryLaterError
from streamfold.follow import (
    Backoff,
    MemoryStream,
    Outcome,
    Progress,
    external,
    follow,
    in_stream,
)
from streamfold.follow.snapshots.taker import RetentionRules
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import NO_FAULT, Fault, FaultKind, ScriptedFaults, SeededFaults
from streamfold.testing.stream_faults import FaultyStream, StreamCall
from tests.follow.ledger import SMALL, KilledError, Ledger, Watched, fold, initial
from tests.proving import seeds

KINDS = ["external", "record", "framed"]
STREAM_FAULTS = [
    (StreamCall.CHECK_TAIL, Fault(FaultKind.BEFORE)),
    (StreamCall.PEEK, Fault(FaultKind.BEFORE)),
    (StreamCall.READ, Fault(FaultKind.BEFORE)),
    (StreamCall.READ, Fault(FaultKind.CUT, 0)),
    (StreamCall.READ, Fault(FaultKind.CUT, 7)),
    (StreamCall.APPEND, Fault(FaultKind.BEFORE)),
    (StreamCall.APPEND, Fault(FaultKind.AFTER)),
    (StreamCall.APPEND, Fault(FaultKind.LOST)),
]
BLOB_FAULTS = [
    (Operation.LIST, Fault(FaultKind.BEFORE)),
    (Operation.LIST, Fault(FaultKind.CUT, 0)),
    (Operation.STREAM, Fault(FaultKind.BEFORE)),
    (Operation.STREAM, Fault(FaultKind.CUT, 600)),
    (Operation.PUT_IF_ABSENT, Fault(FaultKind.BEFORE)),
    (Operation.PUT_IF_ABSENT, Fault(FaultKind.AFTER)),
]
#: More calls of one sort than the scenario makes.
STEPS = 12


async def scenario(ledger: Ledger, stream: Any, kind: str, blobs: BlobStore) -> None:
    """Two snapshots with deltas around them, and a reader that follows, all over a bad line."""
    snapshots = external(blobs) if kind == "external" else in_stream()
    sizes = SMALL if kind == "framed" else None
    keeping = RetentionRules(trim=True)
    await ledger.add(30)
    async with ledger.follow(snapshots, stream) as state:
        async with ledger.taker(snapshots, stream, keeping=keeping, sizes=sizes) as taker:
            assert (await taker.take()).outcome is Outcome.TAKEN
            await ledger.add(5)
            assert (await taker.take()).outcome is Outcome.TAKEN
            assert taker.state.value["seen"] == ledger.expected
        await ledger.add(3)
        await state.catch_up()
        assert state.value["seen"] == ledger.expected
    assert await ledger.restored(snapshots, stream) == ledger.expected
    assert await ledger.restored(snapshots) == ledger.expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "fault"), STREAM_FAULTS, ids=lambda value: getattr(value, "kind", value)
)
async def test_each_call_to_the_stream_may_fail(kind: str, call: StreamCall, fault: Fault) -> None:
    for step in range(STEPS):
        ledger = Ledger()
        script = {call: [*[NO_FAULT] * step, fault]}
        stream = FaultyStream(ledger.stream, ScriptedFaults(script))
        await scenario(ledger, stream, kind, open_blob_store("memory:"))


@pytest.mark.parametrize(("operation", "fault"), BLOB_FAULTS)
async def test_each_call_to_the_blob_store_may_fail(operation: Operation, fault: Fault) -> None:
    for step in range(STEPS):
        ledger = Ledger()
        script = {operation: [*[Fault()] * step, fault]}
        blobs = FaultyBlobStore(open_blob_store("memory:"), ScriptedFaults(script))
        await scenario(ledger, ledger.stream, "external", blobs)


@pytest.mark.parametrize("seed", seeds(4, proving=200))
@pytest.mark.parametrize("kind", KINDS)
async def test_many_calls_may_fail(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger(MemoryStream(lazy_trims=bool(seed % 2)))
    chances = {operation: 0.2 for operation, _ in BLOB_FAULTS}
    blobs = FaultyBlobStore(open_blob_store("memory:"), SeededFaults(rng, chances))
    stream = FaultyStream(ledger.stream, SeededFaults(rng, 0.2, most_before_cut=20))
    await scenario(ledger, stream, kind, blobs)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_snapshotter_killed_at_any_append_leaves_nothing_wrong(
    kind: str, before: bool
) -> None:
    for step in range(STEPS):
        ledger = Ledger()
        blobs = open_blob_store("memory:")
        watched = Watched(ledger.stream)

        async def die(number: int, step: int = step) -> None:
            if number >= step:
                raise KilledError

        watched.before, watched.after = (die, None) if before else (None, die)
        try:
            await scenario(ledger, watched, kind, blobs)
        except KilledError:
            await ledger.add(2)
            snapshots = external(blobs) if kind == "external" else in_stream()
            assert await ledger.restored(snapshots) == ledger.expected


async def test_leaving_ends_the_session_and_cancelling_is_clean() -> None:
    ledger = Ledger()
    await ledger.add(3)
    entered = asyncio.Event()

    async def watch() -> None:
        async with ledger.follow() as state:
            entered.set()
            async for _ in state:
                raise AssertionError("nothing was appended")

    watching = asyncio.create_task(watch())
    await entered.wait()
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


async def test_a_cancelled_wait_loses_no_change() -> None:
    ledger = Ledger()
    async with ledger.follow() as state:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(state), 0.01)
        await ledger.add(2)
        assert [(await anext(state)).body for _ in range(2)] == [b"0", b"1"]


async def test_using_it_outside_its_block_is_refused() -> None:
    follower = Ledger().follow()
    with pytest.raises(InvalidError, match="not restored yet"):
        _ = follower.plan
    async with follower:
        pass
    with pytest.raises(InvalidError, match="block is over"):
        await anext(follower)


@pytest.mark.parametrize(
    ("call", "kind"),
    [(StreamCall.READ, FaultKind.AFTER), (StreamCall.APPEND, FaultKind.CUT)],
)
def test_faults_that_cannot_happen_are_refused(call: StreamCall, kind: FaultKind) -> None:
    with pytest.raises(InvalidError, match="does not fit"):
        ScriptedFaults({call: [Fault(kind)]})


async def test_leaving_while_another_task_follows_ends_that_task() -> None:
    ledger = Ledger()
    async with ledger.follow() as state:
        waiting = asyncio.create_task(anext(state))
        await asyncio.sleep(0)
    with pytest.raises(InvalidError, match="no longer followed"):
        await waiting


async def test_a_stream_that_was_never_there_is_given_up_on() -> None:
    dead = FaultyStream(
        MemoryStream(),
        SeededFaults(random.Random(1), 1.0, most_before_cut=20),
    )
    never = follow(dead, fold=fold, initial=initial, backoff=Backoff(first=1e-6, longest=1e-6))
    with pytest.raises(RetryLaterError, match="injected"):
        await never.__aenter__()


async def test_progress_is_reported() -> None:
    ledger, blobs, reported = Ledger(), open_blob_store("memory:"), list[Progress]()
    await ledger.add(1000)
    async with ledger.taker(external(blobs)) as taker:
        await taker.take()
    await ledger.add(10)
    async with follow(
        ledger.stream,
        fold=fold,
        initial=initial,
        snapshots=external(blobs),
        progress=reported.append,
    ):
        assert [progress.phase for progress in reported] == ["load", "replay", "done"]
        assert reported[1] == Progress("replay", 10, 10)
