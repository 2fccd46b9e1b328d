"""Snapshot takers with failing folds, or overtaken by others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from streamfold.errors import RetryLaterError
from streamfold.follow import MemoryStream, Outcome, Placement, Policy, in_stream
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.clients.memory import wall_clock
from streamfold.follow.encoding.record_forms import Opening, SnapshotFrame
from streamfold.follow.snapshots import taker as taker_module
from streamfold.follow.snapshots.taker import SnapshotTaker
from streamfold.model.records import Record
from tests.follow.ledger import Ledger, Watched


@pytest.mark.parametrize("batches", [False, True], ids=["fold", "fold_batch"])
async def test_a_record_that_the_fold_fails_on_is_never_left_out_of_a_snapshot(
    batches: bool,
) -> None:
    def refuse(state: list[bytes], record: StreamRecord) -> list[bytes]:
        if record.body == b"bad":
            raise ValueError("a bad record")
        return [*state, record.body]

    def refuse_batch(state: list[bytes], records: Sequence[StreamRecord]) -> list[bytes]:
        for record in records:
            state = refuse(state, record)
        return state

    stream = MemoryStream()
    async with SnapshotTaker(
        stream,
        fold=refuse,
        initial=list[bytes],
        snapshots=in_stream(),
        fold_batch=refuse_batch if batches else None,
    ) as taker:
        await stream.append([Record(body) for body in (b"1", b"2", b"bad", b"3")])
        for _ in range(2):
            with pytest.raises(ValueError, match="a bad record"):
                await taker.take()
            assert taker.state.cursor == (0 if batches else 2)
            assert taker.state.value == ([] if batches else [b"1", b"2"])
    assert len(await stream.peek(0, 10)) == 4


async def test_a_taker_that_is_overtaken_while_it_opens_a_snapshot_saves_nothing_twice(
    ledger: Ledger,
) -> None:
    """The restored state already has what came after the opening: it is not the state up to there."""
    await ledger.add(5)
    watched = Watched(ledger.stream)
    async with ledger.taker(in_stream(), watched) as taker:
        await ledger.add(3)

        async def snapshot(number: int) -> None:
            watched.before = None
            async with ledger.taker(in_stream()) as other:
                await other.take()

        async def grow(number: int) -> None:
            watched.after = None
            await ledger.add(2)

        watched.before, watched.after = snapshot, grow
        assert await taker._write_anywhere() is None
        assert taker.state.value["seen"] == ledger.expected
        await ledger.add(1)
        taken = await taker._write_anywhere()
        assert taken is not None
        assert taken.placement is Placement.FRAMED
    assert await ledger.restored() == ledger.expected


async def test_records_at_hand_are_not_applied_to_the_state_that_replaces_theirs(
    ledger: Ledger,
) -> None:
    class Cut(Watched):
        """The first read yields two records; others trim the stream before the next one does."""

        whole = True

        async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
            async with aclosing(self.inner.read(seq_num)) as session:
                async for batch in session:
                    yield batch if self.whole else batch[:2]
                    if not self.whole:
                        self.whole = True
                        async with ledger.taker(in_stream(), now=later) as other:
                            await other.take()
                        raise RetryLaterError("cut")

    def later() -> int:
        return wall_clock() + 60_000  # the snapshot of the first one counts as given up

    await ledger.add(5)
    cut = Cut(ledger.stream)
    async with ledger.taker(in_stream(), cut) as taker:
        await taker.state.pause()
        await ledger.add(5)
        cut.whole = False
        assert await taker._write_anywhere() is None
        assert taker.state.value["seen"] == ledger.expected


async def test_a_taker_that_leaves_another_its_turn_does_not_ask_at_every_record(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taker_module, "_OTHERS_PAUSE", 600.0)
    seen: list[Outcome] = []
    policy = Policy(records=1, bytes=None, replay=None)
    async with ledger.taker(
        in_stream(), policy=policy, on_taken=lambda taken: seen.append(taken.outcome)
    ) as taker:
        running = asyncio.create_task(taker.run())
        opening = SnapshotFrame("another", 0, Opening(0, "json")).record(b"")
        await ledger.stream.append([opening])
        for _ in range(50):
            await ledger.add(1)
            async with asyncio.timeout(60):
                while taker.state.cursor < (await ledger.stream.check_tail()).seq_num:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen == [Outcome.ANOTHERS]
