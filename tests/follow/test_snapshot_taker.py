from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamfold.blob import BlobStore
from streamfold.errors import (
    ConflictError,
    FencingTokenMismatchError,
    InvalidError,
    OutcomeUnknownError,
)
from streamfold.follow import (
    JsonCodec,
    MemoryStream,
    Outcome,
    Placement,
    Policy,
    Snapshots,
    auto,
    external,
    in_stream,
)
from streamfold.follow.clients.memory import wall_clock
from streamfold.follow.encoding.stream_writer import Sizes
from streamfold.follow.snapshots.taker import RetentionRules
from streamfold.model.records import Record
from tests.follow.ledger import SMALL, KilledError, Ledger, Watched

KINDS = ["external", "record", "framed"]


def settings(kind: str, blobs: BlobStore) -> dict[str, Any]:
    return {
        "snapshots": external(blobs) if kind == "external" else in_stream(),
        "sizes": SMALL if kind == "framed" else None,
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_new_is_not_snapshotted_again(
    ledger: Ledger, blobs: BlobStore, kind: str
) -> None:
    await ledger.add(30)
    async with ledger.taker(**settings(kind, blobs)) as first:
        assert (await first.take()).outcome is Outcome.TAKEN
        assert (await first.take()).outcome is Outcome.NOTHING_NEW
    async with ledger.taker(**settings(kind, blobs)) as second:
        assert (await second.take()).outcome is Outcome.NOTHING_NEW
        await ledger.add(1)
        assert (await second.take()).outcome is Outcome.TAKEN
    assert await ledger.restored(settings(kind, blobs)["snapshots"]) == ledger.expected


@pytest.mark.parametrize("kind", ["record", "framed"])
async def test_an_append_between_choosing_the_cursor_and_writing_makes_it_try_again(
    ledger: Ledger, blobs: BlobStore, kind: str
) -> None:
    await ledger.add(20)
    watched = Watched(ledger.stream)

    async def interfere(number: int) -> None:
        if number < 3:
            await ledger.add(1)

    watched.before = interfere
    async with ledger.taker(stream=watched, **settings(kind, blobs)) as taker:
        taken = await taker.take()
    assert (taken.outcome, taken.cursor) == (Outcome.TAKEN, 23)
    assert await ledger.restored() == ledger.expected


@pytest.mark.parametrize("sizes", [None, SMALL], ids=["fits one record", "outgrew one record"])
async def test_a_stream_that_never_rests_does_not_outrun_the_snapshot(
    ledger: Ledger, sizes: Sizes | None
) -> None:
    """Others append before each of its appends, so that no attempt ever finds the tail in peace."""
    await ledger.add(20)
    watched = Watched(ledger.stream)
    watched.before = lambda number: ledger.add(1)
    async with ledger.taker(in_stream(), watched, sizes=sizes) as taker:
        taken = await taker.take()
        assert (taken.outcome, taken.placement) == (Outcome.TAKEN, Placement.FRAMED)
        head = (await ledger.stream.peek(0, 1))[0]
        assert head.seq_num == taken.cursor > 20
        await taker.state.catch_up()
        assert taker.state.value["seen"] == ledger.expected
    assert await ledger.restored() == ledger.expected


async def test_a_large_state_claims_its_cursor_before_it_is_encoded(ledger: Ledger) -> None:
    """An append during the encoding must not cost the snapshot its cursor."""
    await ledger.add(30)

    class Slow(JsonCodec[Any]):
        """While a state is encoded, another appends to the stream."""

        def encode(self, state: Any) -> Any:
            encoded = super().encode(state)
            others.append(asyncio.ensure_future(ledger.add(1)))
            return encoded

    others: list[asyncio.Future[None]] = []
    watched = Watched(ledger.stream)
    async with ledger.taker(in_stream(codec=Slow()), watched, sizes=SMALL) as taker:
        first = await taker.take()
        appends = watched.appends
        await asyncio.gather(*others)
        second = await taker.take()
    await asyncio.gather(*others)
    assert (first.placement, second.placement) == (Placement.FRAMED, Placement.FRAMED)
    frames = [
        r for r in await ledger.stream.peek(0, 1000) if b"streamfold-index" in dict(r.headers)
    ]
    assert watched.appends - appends == len(frames) + 1, "one claim, the frames, one trim"
    assert await ledger.restored() == ledger.expected


async def test_a_lost_answer_to_an_opening_that_lands_anywhere_does_no_harm(ledger: Ledger) -> None:
    """It is in the stream twice then, and the state is that before the first."""
    await ledger.add(20)
    watched = Watched(ledger.stream)
    lost: list[int] = []

    async def answer(number: int) -> None:
        newest = (await ledger.stream.peek(len(ledger.expected), 1000))[-1]
        if dict(newest.headers).get(b"streamfold-covers-before") == b"here" and not lost:
            lost.append(newest.seq_num)
            await ledger.add(1)
            raise OutcomeUnknownError("the answer is lost")

    watched.before = lambda number: ledger.add(1)
    watched.after = answer
    async with ledger.taker(in_stream(), watched) as taker:
        taken = await taker.take()
    assert [taken.cursor] == lost
    assert await ledger.restored() == ledger.expected


async def test_snapshots_in_the_stream_without_trimming_keep_the_history(ledger: Ledger) -> None:
    untrimmed = in_stream(trim=False)
    async with ledger.taker(untrimmed) as taker:
        for _ in range(3):
            await ledger.add(1500)
            assert (await taker.take()).outcome is Outcome.TAKEN
        await ledger.add(5)
    assert (await ledger.stream.peek(0, 1))[0].seq_num == 0
    async with ledger.follow(untrimmed) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert state.plan.snapshot.cursor == 4502, "three times 1,500, and two snapshots"
        assert state.plan.records == 6, "the snapshot, and five records"


async def test_framed_snapshots_without_trimming_are_found_from_the_tail(ledger: Ledger) -> None:
    untrimmed = in_stream(trim=False)
    async with ledger.taker(untrimmed, sizes=Sizes(record=64, frame=2000)) as taker:
        await ledger.add(2500)
        assert (await taker.take()).placement is Placement.FRAMED
        await ledger.add(1200)
    async with ledger.follow(untrimmed) as state:
        assert state.value["seen"] == ledger.expected
        assert state.plan.snapshot is not None
        assert state.plan.read_from == state.plan.snapshot.cursor == 2500


@pytest.mark.parametrize("placement", [Placement.RECORD, Placement.FRAMED])
@pytest.mark.parametrize("records", [30, 3000])
async def test_a_trim_that_has_not_taken_effect_does_not_make_a_restore_replay_everything(
    records: int, placement: Placement
) -> None:
    ledger = Ledger(MemoryStream(lazy_trims=True))
    await ledger.add(records)
    sizes = Sizes(record=64, frame=10 * records) if placement is Placement.FRAMED else Sizes()
    async with ledger.taker(in_stream(), sizes=sizes) as taker:
        assert (await taker.take()).placement is placement
    await ledger.add(2)
    async with ledger.follow() as state:
        assert state.plan.first == 0
        assert state.plan.read_from == (records if placement is Placement.FRAMED else records + 1)
        assert state.value["seen"] == ledger.expected


@pytest.mark.parametrize("kind", KINDS)
async def test_a_snapshot_of_another_fold_is_refused(
    ledger: Ledger, blobs: BlobStore, kind: str
) -> None:
    await ledger.add(30)
    options = settings(kind, blobs)
    async with ledger.taker(**options, fold_name="all-bodies") as taker:
        await taker.take()
    for name in ("all-bodies", None):
        async with ledger.follow(options["snapshots"], fold_name=name) as state:
            assert state.value["seen"] == ledger.expected
    with pytest.raises(ConflictError, match="made with the fold 'all-bodies', not with 'sum'"):
        await ledger.follow(options["snapshots"], fold_name="sum").__aenter__()


def test_a_fold_name_that_no_header_can_hold_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidError, match="1 to 100 printable ASCII"):
        ledger.follow(in_stream(), fold_name="é" * 3)


async def test_an_append_while_it_is_saved_outside_does_no_harm(
    ledger: Ledger, blobs: BlobStore
) -> None:
    await ledger.add(20)
    async with ledger.taker(external(blobs)) as taker:
        await taker.state.catch_up()
        await ledger.add(5)
        assert (await taker.take()).cursor == 25
    assert await ledger.restored(external(blobs)) == ledger.expected


@pytest.mark.parametrize("after", range(5))
async def test_a_framed_snapshot_whose_writer_died_is_ignored_and_later_trimmed_away(
    ledger: Ledger, after: int
) -> None:
    await ledger.add(20)
    watched = Watched(ledger.stream)

    async def die(number: int) -> None:
        if number == after:
            raise KilledError

    watched.after = die
    async with ledger.taker(in_stream(), watched, sizes=SMALL, new_id=lambda: "dead") as doomed:
        with pytest.raises(KilledError):
            await doomed.take()
    await ledger.add(3)
    assert await ledger.restored() == ledger.expected
    later = 60_000  # milliseconds: the dead writer is not waited for any more
    async with ledger.taker(in_stream(), sizes=SMALL, now=lambda: wall_clock() + later) as survivor:
        assert (await survivor.take()).outcome is Outcome.TAKEN
    left = await ledger.stream.peek(0, 1000)
    assert all(b"dead" not in dict(record.headers).values() for record in left)
    assert await ledger.restored() == ledger.expected


@pytest.mark.parametrize("kind", KINDS)
async def test_of_two_snapshot_takers_one_wins_and_the_other_continues(
    ledger: Ledger, blobs: BlobStore, kind: str
) -> None:
    await ledger.add(20)
    options = settings(kind, blobs)
    async with ledger.taker(**options) as one, ledger.taker(**options) as other:
        results = [taken.outcome for taken in await asyncio.gather(one.take(), other.take())]
        assert Outcome.TAKEN in results
        assert set(results) <= {Outcome.TAKEN, Outcome.ANOTHERS, Outcome.NOTHING_NEW}
        assert results.count(Outcome.TAKEN) == 1
        await ledger.add(5)
        results = [taken.outcome for taken in await asyncio.gather(other.take(), one.take())]
        assert results.count(Outcome.TAKEN) == 1
    assert await ledger.restored(options["snapshots"]) == ledger.expected


async def test_another_that_is_writing_frames_is_left_its_turn(ledger: Ledger) -> None:
    await ledger.add(20)
    watched = Watched(ledger.stream)
    async with ledger.taker(in_stream(), sizes=SMALL) as other:

        async def look(number: int) -> None:
            if number == 1:
                assert (await other.take()).outcome is Outcome.ANOTHERS

        watched.after = look
        async with ledger.taker(in_stream(), watched, sizes=SMALL) as one:
            assert (await one.take()).outcome is Outcome.TAKEN
    assert watched.appends > 3


async def test_a_state_that_outgrows_one_record_moves_to_frames(ledger: Ledger) -> None:
    async with ledger.taker(in_stream()) as taker:
        for expected in (Placement.RECORD, Placement.RECORD, Placement.FRAMED, Placement.FRAMED):
            body = str(len(ledger.expected)) * 450_000
            await ledger.stream.append([Record(body[:450_000].encode())])
            ledger.expected.append(body[:450_000])
            assert (await taker.take()).placement is expected
            assert await ledger.restored() == ledger.expected


async def test_auto_moves_outside_when_the_state_outgrows_one_record(
    ledger: Ledger, blobs: BlobStore
) -> None:
    async with ledger.taker(auto(blobs), sizes=SMALL) as taker:
        await ledger.add(3)
        assert (await taker.take()).placement is Placement.RECORD
        await ledger.add(30)
        assert (await taker.take()).placement is Placement.EXTERNAL
    assert await ledger.restored(auto(blobs)) == ledger.expected


async def test_a_snapshotter_that_fences_refuses_the_one_before_it(ledger: Ledger) -> None:
    await ledger.add(5)
    first = RetentionRules(fencing_token="first", fence=True)
    second = RetentionRules(fencing_token="second", fence=True)
    async with ledger.taker(in_stream(), keeping=first) as old:
        assert (await old.take()).outcome is Outcome.TAKEN
        await ledger.add(1)
        async with ledger.taker(in_stream(), keeping=second) as new:
            with pytest.raises(FencingTokenMismatchError, match="second"):
                await old.take()
            assert (await new.take()).outcome is Outcome.TAKEN
    assert await ledger.restored() == ledger.expected


def test_fencing_needs_a_token_and_keeping_none_is_refused() -> None:
    with pytest.raises(InvalidError, match="fencing_token is needed"):
        RetentionRules(fence=True)
    with pytest.raises(InvalidError, match="at least 1"):
        RetentionRules(keep=0)


async def test_old_snapshots_are_pruned_as_new_ones_are_saved(
    ledger: Ledger, blobs: BlobStore
) -> None:
    async with ledger.taker(external(blobs), keeping=RetentionRules(keep=2)) as taker:
        for _ in range(4):
            await ledger.add(10)
            await taker.take()
    keys = [meta.key async for meta in blobs.list()]
    assert keys == ["00000000000000000030.json", "00000000000000000040.json"]
    assert await ledger.restored(external(blobs)) == ledger.expected


class Clock:
    """Milliseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now


async def taken_by_running(ledger: Ledger, policy: Policy, feed: Any, **options: Any) -> int:
    """Run a taker while `feed` appends, until it has taken a snapshot; its cursor."""
    watched = Watched(ledger.stream)
    written = asyncio.Event()

    async def notice(number: int) -> None:
        written.set()

    watched.after = notice
    async with ledger.taker(in_stream(), watched, policy=policy, **options) as taker:
        running = asyncio.create_task(taker.run())
        await feed()
        async with asyncio.timeout(60):
            await written.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    head = (await ledger.stream.peek(0, 1))[0]
    return head.seq_num - 1


async def test_running_takes_snapshots_by_records(ledger: Ledger) -> None:
    async def feed() -> None:
        for _ in range(10):
            await ledger.add(10)

    policy = Policy(records=100, bytes=None, replay=None)
    assert await taken_by_running(ledger, policy, feed) == 100
    assert await ledger.restored() == ledger.expected


async def test_running_takes_snapshots_by_age_though_nothing_comes() -> None:
    clock = Clock()
    ledger = Ledger(MemoryStream(now=clock))
    await ledger.add(3)

    async def feed() -> None:
        clock.now += 60_000

    policy = Policy(records=None, bytes=None, replay=None, age=0.05)
    assert await taken_by_running(ledger, policy, feed, now=clock) == 3


async def test_running_continues_after_a_snapshot_by_another_taker(
    ledger: Ledger, blobs: BlobStore
) -> None:
    policy = Policy(records=10, bytes=None, replay=None)
    snapshots = external(blobs)
    async with (
        ledger.taker(snapshots, policy=policy) as one,
        ledger.taker(snapshots, policy=policy) as other,
    ):
        tasks = [asyncio.create_task(one.run()), asyncio.create_task(other.run())]
        for _ in range(10):
            await ledger.add(5)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            # Fewer than 10 records after the newest snapshot call for no other one.
            while await newest_cursor(snapshots) <= 40:  # noqa: ASYNC110 - blobs announce nothing
                await asyncio.sleep(0.001)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await ledger.restored(snapshots) == ledger.expected


async def newest_cursor(snapshots: Snapshots[Any]) -> int:
    newest = await snapshots.store.newest() if snapshots.store else None
    return newest.cursor if newest else -1
