from __future__ import annotations

import random

import pytest

from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import (
    BlobExistsError,
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    StreamfoldError,
)
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.blob_kit import CALLS, Call, keys_of, swap
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults, SeededFaults

#: As `CALLS`, with a swap of what is there.
WORKING: dict[str, Call] = CALLS | {"put_if_match": swap}
BEFORE, AFTER = Fault(FaultKind.BEFORE), Fault(FaultKind.AFTER)


@pytest.fixture
async def inner() -> BlobStore:
    store = open_blob_store("memory:")
    await store.put("there", b"0123456789")
    return store


@pytest.mark.parametrize("call", CALLS)
async def test_a_fault_before_hits_one_call_and_has_no_effect(inner: BlobStore, call: str) -> None:
    store = FaultyBlobStore(inner, ScriptedFaults({Operation(call): [BEFORE]}))
    key = "new" if call in ("put", "put_if_absent") else "there"
    with pytest.raises(BlobUnavailableError, match=f"injected: {call} of"):
        await WORKING[call](store, key)
    assert [(key, await inner.get(key)) for key in await keys_of(inner)] == [
        ("there", b"0123456789")
    ]
    await WORKING[call](store, key)


async def test_a_fault_after_leaves_the_swap_in_effect(inner: BlobStore) -> None:
    store = FaultyBlobStore(inner, ScriptedFaults({Operation.PUT_IF_MATCH: [AFTER]}))
    with pytest.raises(BlobOutcomeUnknownError, match="injected"):
        await swap(store, "there", b"new")
    assert await inner.get("there") == b"new"


@pytest.mark.parametrize("call", ["put", "put_if_absent", "delete"])
async def test_a_fault_after_leaves_the_write_in_effect(inner: BlobStore, call: str) -> None:
    store = FaultyBlobStore(inner, ScriptedFaults({Operation(call): [AFTER]}))
    key = "there" if call == "delete" else "new"
    with pytest.raises(BlobOutcomeUnknownError, match="injected"):
        await CALLS[call](store, key)
    assert await keys_of(inner) == ([] if call == "delete" else ["new", "there"])


async def test_a_refusal_of_the_inner_store_wins_over_a_fault_after(inner: BlobStore) -> None:
    store = FaultyBlobStore(inner, ScriptedFaults({Operation.PUT_IF_ABSENT: [AFTER]}))
    with pytest.raises(BlobExistsError):
        await store.put_if_absent("there", b"x")


@pytest.mark.parametrize("amount", [0, 3, 4, 7, 10, 99])
async def test_a_cut_stream_breaks_after_that_many_bytes(inner: BlobStore, amount: int) -> None:
    script = {Operation.STREAM: [Fault(FaultKind.CUT, amount)]}
    store = FaultyBlobStore(inner, ScriptedFaults(script))
    received = bytearray()

    async def receive() -> None:
        async for piece in store.stream("there", 4):
            received.extend(piece)

    with pytest.raises(BlobUnavailableError, match="cut off"):
        await receive()
    assert received == b"0123456789"[:amount]


async def test_a_cut_listing_breaks_after_that_many_entries(inner: BlobStore) -> None:
    await inner.put("another", b"x")
    store = FaultyBlobStore(inner, ScriptedFaults({Operation.LIST: [Fault(FaultKind.CUT, 1)]}))
    listing = store.list()
    assert (await anext(listing)).key == "another"
    with pytest.raises(BlobUnavailableError, match="cut off"):
        await anext(listing)


async def test_delays_go_through_the_sleep_that_was_passed_in(inner: BlobStore) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    script = {Operation.GET: [Fault(delay=1.5), Fault(), Fault(FaultKind.BEFORE, delay=2.5)]}
    store = FaultyBlobStore(inner, ScriptedFaults(script), sleep=sleep)
    await store.get("there")
    await store.get("there")
    with pytest.raises(BlobUnavailableError):
        await store.get("there")
    assert slept == [1.5, 2.5]


async def run_seeded(seed: int) -> list[str]:
    chances = dict.fromkeys(Operation, 0.5)
    plan = SeededFaults(random.Random(seed), chances)
    store = FaultyBlobStore(open_blob_store("memory:"), plan)
    outcomes = []
    for number in range(40):
        for call in CALLS:
            try:
                await CALLS[call](store, f"blob-{number % 3}")
                outcomes.append("ok")
            except StreamfoldError as error:
                outcomes.append(f"{call} {error.code}")
    return outcomes


async def test_the_same_seed_gives_the_same_faults() -> None:
    first = await run_seeded(7)
    assert first == await run_seeded(7)
    assert first != await run_seeded(8)
    assert {"ok", "get blob_unavailable", "put blob_outcome_unknown"} < set(first)


def test_faults_that_do_not_fit_the_operation_are_refused() -> None:
    with pytest.raises(InvalidError, match="does not fit get"):
        ScriptedFaults({Operation.GET: [AFTER]})
    with pytest.raises(InvalidError, match="choose from before, after"):
        ScriptedFaults({Operation.PUT: [Fault(FaultKind.CUT, 3)]})
