"""Appends keep the order of the calls, whatever each waits for, until they are withdrawn."""

from __future__ import annotations

import asyncio

import pytest

from streamfold.errors import (
    InvalidError,
    OutcomeUnknownError,
    SeqNumMismatchError,
    StoreClosingError,
    StreamNotFoundError,
)
from streamfold.model.configs import BasinConfig, StreamConfigLayer
from streamfold.model.records import Record
from streamfold.store.append_queues import Submission
from streamfold.store.log.admission import AppendRequest
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, STREAM, Bench, bodies, later
from tests.store.log.test_append import read_bodies


def under_way() -> asyncio.Future[AppendRequest]:
    """A request that is still being made."""
    return asyncio.get_running_loop().create_future()


def append(
    store: StreamStore, request: str | asyncio.Future[AppendRequest], match: int | None = None
) -> Submission:
    made = (
        AppendRequest.of(bodies(request), match_seq_num=match)
        if isinstance(request, str)
        else request
    )
    return store.stream(BASIN, STREAM).submit(made)


def nothing_waits(store: StreamStore) -> bool:
    return not store._queues._queues


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_later_appends_stay_behind_one_that_is_still_being_made(store: StreamStore) -> None:
    slow = under_way()
    first, second = append(store, slow), append(store, "b")
    third = append(store, later(AppendRequest.of(bodies("c"))))
    await turns()
    assert [one.accepted_at for one in (first, second, third)] == [None] * 3
    slow.set_result(AppendRequest.of(bodies("a")))
    assert [(await one.ack).start.seq_num for one in (first, second, third)] == [0, 1, 2]
    assert await read_bodies(store) == [b"a", b"b", b"c"]
    assert nothing_waits(store)
    assert append(store, "d").accepted_at is not None


async def test_other_streams_do_not_wait_for_one_that_is_still_being_made(
    store: StreamStore,
) -> None:
    await store.create_stream(BASIN, "other")
    slow = append(store, under_way())
    await store.append(BASIN, "other", bodies("x"))
    slow.ack.cancel()


async def test_appends_go_on_behind_one_that_cannot_be_made(store: StreamStore) -> None:
    broken = under_way()
    first, second = append(store, broken), append(store, "b")
    broken.set_exception(InvalidError("not a batch"))
    with pytest.raises(InvalidError):
        await first.ack
    assert not await first.decided()
    assert (await second.ack).start.seq_num == 0


async def test_an_append_that_is_withdrawn_while_it_is_being_made_is_not_stored(
    store: StreamStore,
) -> None:
    slow = under_way()
    first, second = append(store, slow), append(store, "b")
    await turns()
    first.ack.cancel()
    assert (await second.ack).start.seq_num == 0
    assert slow.cancelled()
    assert await read_bodies(store) == [b"b"]
    assert nothing_waits(store)


async def test_an_append_that_is_withdrawn_behind_another_leaves_nothing(
    store: StreamStore,
) -> None:
    slow, behind = under_way(), under_way()
    first, second, third = append(store, slow), append(store, behind), append(store, "c")
    second.withdraw(StoreClosingError())
    await turns()
    assert second.request is None
    assert behind.cancelled()
    assert len(store._queues._queues[store.stream(BASIN, STREAM).ref]) == 1
    with pytest.raises(StoreClosingError):
        await second.ack
    slow.set_result(AppendRequest.of(bodies("a")))
    assert [(await one.ack).start.seq_num for one in (first, third)] == [0, 1]
    first.withdraw(StoreClosingError())  # too late
    assert (await first.ack).start.seq_num == 0


async def test_a_caller_that_goes_while_it_waits_for_the_decision_withdraws_its_append(
    store: StreamStore,
) -> None:
    slow = under_way()
    submission = append(store, slow)
    waiting = asyncio.create_task(submission.decided())
    await turns()
    waiting.cancel()
    assert (await append(store, "b").ack).start.seq_num == 0
    assert submission.ack.cancelled()


async def test_a_refusal_that_waits_for_a_commit_holds_up_nobody_behind_it(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    first = append(store, "a")
    refused = append(store, "b", match=0)
    behind = append(store, "c", match=1)
    assert not await refused.decided()
    assert await behind.decided()
    await turns()
    assert not refused.ack.done()
    bench.engine.resume()
    with pytest.raises(SeqNumMismatchError):
        await refused.ack
    assert [(await one.ack).start.seq_num for one in (first, behind)] == [0, 1]


async def test_an_append_that_is_withdrawn_while_it_waits_for_room_makes_room(
    bench: Bench,
) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.create_stream(BASIN, "other")
        bench.engine.hold()
        large = "x" * 600_000
        first, second = append(store, large), append(store, large)
        await turns()
        assert store.queue.waiting == 1
        small = store.stream(BASIN, "other").append(bodies("small"))
        await turns()
        assert not small.accepted_at  # first come, first served
        second.ack.cancel()
        assert await small.decided()
        bench.engine.resume()
        await asyncio.gather(first.ack, small.ack)
        await turns()
        assert (store.queue.used, store.queue.waiting) == (0, 0)
        assert nothing_waits(store)


async def test_an_append_that_was_not_accepted_when_storage_failed_is_appended_later(
    store: StreamStore, bench: Bench
) -> None:
    await store.create_stream(BASIN, "other")
    slow = under_way()
    waiting = append(store, slow)
    bench.engine.fail_next(CommitFault.BEFORE)
    with pytest.raises(OutcomeUnknownError):
        await store.append(BASIN, "other", bodies("x"))
    slow.set_result(AppendRequest.of(bodies("a")))
    assert (await waiting.ack).start.seq_num == 0


async def test_appends_to_a_store_that_closes_are_refused_as_not_done(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        slow = under_way()
        before = append(store, slow)
        behind = append(store, "behind")
    slow.set_result(AppendRequest.of(bodies("late")))
    for submission in (before, behind, append(store, "after")):
        with pytest.raises(StoreClosingError):
            await submission.ack


async def test_an_append_that_creates_its_stream_may_be_withdrawn_while_it_is_being_made(
    bench: Bench,
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        submission = append(store, under_way())
        await turns()
        submission.ack.cancel()
        await turns()
        assert nothing_waits(store)
        with pytest.raises(StreamNotFoundError):
            await store.check_tail(BASIN, STREAM)
        await store.append(BASIN, STREAM, [Record(b"a")])


@pytest.mark.parametrize("withdrawn_first", [True, False])
async def test_an_append_that_is_withdrawn_as_it_has_just_been_made_creates_no_stream(
    bench: Bench, withdrawn_first: bool
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        made = AppendRequest.of(bodies("a"), create_with=StreamConfigLayer())
        slow = under_way()
        submission = append(store, slow)
        await turns()
        if withdrawn_first:
            submission.withdraw(StoreClosingError())
            slow.set_result(made)
        else:
            slow.set_result(made)
            submission.ack.cancel()
        await turns()
        assert nothing_waits(store)
        with pytest.raises(StreamNotFoundError):
            await store.check_tail(BASIN, STREAM)


async def test_a_bug_that_makes_no_content_is_raised_and_holds_up_nobody(
    store: StreamStore,
) -> None:
    slow = under_way()
    broken, behind = append(store, slow), append(store, "b")
    slow.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await broken.ack
    assert (await behind.ack).start.seq_num == 0


async def test_an_append_that_creates_its_stream_is_accepted_before_that_is_durable(
    bench: Bench,
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        bench.engine.hold()
        creating = AppendRequest.of(bodies("a"), create_with=StreamConfigLayer())
        submission = store.stream(BASIN, STREAM).submit(creating)
        assert await submission.decided()
        behind = asyncio.create_task(append(store, "b").decided())
        await turns()
        behind.cancel()  # withdraws the second, and not the first
        await turns()
        bench.engine.resume()
        assert (await submission.ack).start.seq_num == 0
        assert (await append(store, "c").ack).start.seq_num == 1
