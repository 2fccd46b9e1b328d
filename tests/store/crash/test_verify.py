"""The comparison after a crash notices every kind of error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from streamfold.model.records import Record
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.store.crash.ledger import Ledger, Plan, Stored, Tried
from tests.store.crash.load import STREAMS, Load, prepare
from tests.store.crash.verify import BASIN, DurabilityError, verify

STREAM = STREAMS[0]


@pytest.fixture
async def store() -> AsyncIterator[StreamStore]:
    # The verifier expects a trim to take effect at once, as in the processes that it looks after.
    async with open_store("memory:", StoreSettings(trim_grace=0)) as opened:
        await prepare(opened)
        yield opened


@pytest.fixture
async def ledger(store: StreamStore) -> Ledger:
    """The report of some load; every stream has several batches, none trimmed away."""
    reported = Ledger()
    await Load(store, "load", 1, reported.apply).run(writers=3, batches=40)
    return reported


def latest(ledger: Ledger) -> tuple[Plan, Stored]:
    return max(ledger.streams[STREAM].stored.values(), key=lambda entry: entry[1].end)


async def test_a_batch_that_fits_its_description_is_verified(
    store: StreamStore, ledger: Ledger
) -> None:
    events = await verify(store, ledger)
    assert len(events) == 1
    assert all(stream.stored for stream in ledger.streams.values())
    for event in events:
        ledger.apply(event)
    await verify(store, ledger)


async def test_a_batch_of_unknown_outcome_is_found(store: StreamStore, ledger: Ledger) -> None:
    plan, stored = latest(ledger)
    del ledger.streams[STREAM].stored[plan.batch]
    ledger.apply(Tried(plan))
    assert msgspec.structs.replace(stored, acknowledged=False) in await verify(store, ledger)


async def test_a_lost_batch_is_noticed(store: StreamStore, ledger: Ledger) -> None:
    plan, stored = latest(ledger)
    ledger.apply(Tried(msgspec.structs.replace(plan, batch="load.9.9")))
    moved = msgspec.structs.replace(stored, batch="load.9.9")
    ledger.apply(moved)
    with pytest.raises(DurabilityError, match="lost batch"):
        await verify(store, ledger)


async def test_a_lower_tail_is_noticed(store: StreamStore, ledger: Ledger) -> None:
    ledger.streams[STREAM].tail += 1
    with pytest.raises(DurabilityError, match="was acknowledged"):
        await verify(store, ledger)


def _moves(plan: Plan, stored: Stored) -> tuple[Plan, Stored]:
    return plan, msgspec.structs.replace(stored, start=stored.start + 1, end=stored.end + 1)


def _changes_time(plan: Plan, stored: Stored) -> tuple[Plan, Stored]:
    return plan, msgspec.structs.replace(stored, last_timestamp=stored.last_timestamp + 1)


def _changes_content(plan: Plan, stored: Stored) -> tuple[Plan, Stored]:
    return msgspec.structs.replace(plan, size=plan.size + 1), stored


def _cuts(plan: Plan, stored: Stored) -> tuple[Plan, Stored]:
    return msgspec.structs.replace(plan, count=plan.count + 1), stored


@pytest.mark.parametrize("change", [_moves, _changes_time, _changes_content, _cuts])
async def test_a_batch_that_differs_from_its_description_is_noticed(
    store: StreamStore,
    ledger: Ledger,
    change: Callable[[Plan, Stored], tuple[Plan, Stored]],
) -> None:
    plan, stored = latest(ledger)
    ledger.streams[STREAM].stored[plan.batch] = change(plan, stored)
    with pytest.raises(DurabilityError, match=r"acknowledged as|another record|ends within"):
        await verify(store, ledger)


async def test_a_refused_batch_that_is_there_is_noticed(store: StreamStore, ledger: Ledger) -> None:
    plan, _ = latest(ledger)
    del ledger.streams[STREAM].stored[plan.batch]
    ledger.streams[STREAM].refused.add(plan.batch)
    with pytest.raises(DurabilityError, match="was refused"):
        await verify(store, ledger)


async def test_a_batch_that_comes_twice_is_noticed(store: StreamStore, ledger: Ledger) -> None:
    plan, _ = latest(ledger)
    await store.append(BASIN, STREAM, plan.records())
    with pytest.raises(DurabilityError, match=r"twice|another record|trimmed up to"):
        await verify(store, ledger)


async def test_records_that_no_writer_appended_are_noticed(
    store: StreamStore, ledger: Ledger
) -> None:
    strange = Plan("strange.0.0", STREAM, 1, 10)
    await store.append(BASIN, STREAM, strange.records())
    with pytest.raises(DurabilityError, match="no writer appended"):
        await verify(store, ledger)
    await store.append(BASIN, STREAM, [Record(b"without a batch")])
    with pytest.raises(DurabilityError):
        await verify(store, ledger)


async def test_a_trim_or_token_that_is_not_in_force_is_noticed(
    store: StreamStore, ledger: Ledger
) -> None:
    stream = ledger.streams[STREAM]
    stream.fence = (stream.tail, "never set")
    with pytest.raises(DurabilityError, match="token"):
        await verify(store, ledger)
    stream.trim_point += 1
    with pytest.raises(DurabilityError, match="trimmed up to"):
        await verify(store, ledger)
