"""Terms of a stream: they move with the records they came with, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from streamfold.errors import (
    AlreadyExistsError,
    InvalidError,
    OutcomeUnknownError,
    ProducerGapError,
    ProducersExhaustedError,
    ProducerStaleError,
    StoreRecoveringError,
    StreamClosedError,
    StreamfoldError,
    StreamSeqError,
    TooLargeError,
)
from streamfold.model.records import Record
from streamfold.model.resources import OCTETS, Claim, Producer
from streamfold.records.batch import RecordBatch
from streamfold.store import mount
from streamfold.store.append_queues import AppendOutcome
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.terms import PRODUCER_IDLE, PRODUCERS_MAX, Terms
from streamfold.store.rows import StateRow
from streamfold.store.store import StreamStore
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, Bench, Clock
from tests.store.durable_streams import append, append_to, batches, create, read


async def test_everything_that_an_append_changes_survives_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        await append(store, "s", b"0", producer=("p", 7, 0), seq="m")
        await append(store, "s", b"1", producer=("p", 7, 1), close=True)
    async with bench.store() as store:
        status = await store.stream(BASIN, "s").status()
        assert (status.tail, status.closed) == (2, True)
        again = await append(store, "s", b"other", producer=("p", 7, 1), close=True)
        assert (again.repeated, again.closed) == (True, True)
        for producer in (("p", 7, 2), ("q", 0, 0), None):
            with pytest.raises(StreamClosedError):
                await append(store, "s", b"2", producer=producer)
        assert await read(store, "s") == [b"0", b"1"]


async def test_producers_of_idle_streams_leave_memory_and_are_recognised_again(
    store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount, "_PRODUCERS_MAX", 50)
    mounted = store._supervisor.current
    assert mounted is not None
    for stream in range(20):
        await create(store, f"s{stream}")
        for producer in range(10):
            await append(store, f"s{stream}", b"x", producer=(f"p{producer}", 0, 0))
    logs = mounted.mount._logs.values()
    assert sum(log.terms.producer_count for log in logs) <= 60  # and those of the last append
    for stream in range(20):
        again = await append(store, f"s{stream}", b"x", producer=("p9", 0, 0))
        assert again.repeated


async def test_sequences_and_producers_survive_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        await append(store, "s", b"0", producer=("p", 7, 0), seq="m")
    async with bench.store() as store:
        with pytest.raises(StreamSeqError):
            await append(store, "s", b"x", seq="m")
        with pytest.raises(ProducerStaleError):
            await append(store, "s", b"x", producer=("p", 6, 0))
        with pytest.raises(ProducerGapError):
            await append(store, "s", b"x", producer=("p", 7, 2))
        assert (await append(store, "s", b"x", producer=("p", 7, 0))).repeated
        await append(store, "s", b"1", producer=("p", 7, 1), seq="n")
        assert await read(store, "s") == [b"0", b"1"]


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
@pytest.mark.parametrize("bodies", [(b"new",), ()], ids=["with records", "only closing"])
async def test_a_failed_commit_moves_all_of_it_or_nothing(
    bench: Bench, fault: CommitFault, bodies: tuple[bytes, ...]
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        await append(store, "s", b"0", producer=("p", 1, 0), seq="a")
        bench.engine.fail_next(fault)
        with pytest.raises(OutcomeUnknownError):
            await append(store, "s", *bodies, producer=("p", 1, 1), seq="b", close=True)
        status = await store.stream(BASIN, "s").status()
        written = fault is CommitFault.AFTER
        assert status.closed is written
        assert await read(store, "s") == [b"0", *(bodies if written else ())]
        # The client that does not know repeats itself: it is appended once, whatever happened.
        again = await append(store, "s", *bodies, producer=("p", 1, 1), seq="b", close=True)
        assert again.repeated is written
        assert await read(store, "s") == [b"0", *bodies]


async def test_a_refusal_is_not_sent_before_the_state_behind_it_is_durable(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        bench.engine.hold()
        closing = asyncio.create_task(append(store, "s", close=True))
        await asyncio.sleep(0)
        refused = asyncio.create_task(append(store, "s", b"late"))
        repeated = asyncio.create_task(append(store, "s", close=True))
        done, _ = await asyncio.wait({refused, repeated, closing}, timeout=0.2)
        assert not done
        assert not (await store.stream(BASIN, "s").status()).closed
        bench.engine.resume()
        assert (await closing).closed
        with pytest.raises(StreamClosedError):
            await refused
        assert (await repeated).repeated


async def test_a_refusal_is_unknown_when_what_it_rests_on_was_lost(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        bench.engine.hold()
        bench.engine.fail_next(CommitFault.BEFORE)
        closing = asyncio.create_task(append(store, "s", close=True))
        await asyncio.sleep(0)
        refused = asyncio.create_task(append(store, "s", b"late"))
        await asyncio.sleep(0.01)
        bench.engine.resume()
        for task in (closing, refused):
            with pytest.raises((OutcomeUnknownError, StoreRecoveringError)):
                await task
        await append(store, "s", b"open")
        assert await read(store, "s") == [b"open"]


async def test_content_that_cannot_be_made_moves_nothing(store: StreamStore) -> None:
    await create(store, "s")

    def broken() -> Sequence[RecordBatch]:
        raise InvalidError("not what the stream takes")

    async def broken_later() -> Sequence[RecordBatch]:
        return broken()

    claim = Claim(OCTETS, Producer("p", 0, 0), "a", close=True)
    for content in (broken, asyncio.ensure_future(broken_later())):
        request = AppendRequest(content=content, claim=claim)
        with pytest.raises(InvalidError):
            await store.stream(BASIN, "s").submit(request).ack
    status = await store.stream(BASIN, "s").status()
    assert (status.tail, status.closed) == (0, False)
    assert not (await append(store, "s", b"0", producer=("p", 0, 0), seq="a")).repeated


async def test_an_append_of_many_batches_is_one(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        thrice = batches(*[b"x"] * 1000) * 3
        claim = Claim(OCTETS, Producer("p", 0, 0))
        before = len(bench.engine.commits)
        done = await append_to(store, "s", claim, thrice)
        assert done.tail == 3000
        with_records = [
            ops for ops in bench.engine.commits[before:] if any(op[0][:1] == b"\x04" for op in ops)
        ]
        assert len(with_records) == 1


async def test_too_large_an_append_moves_nothing(store: StreamStore) -> None:
    await create(store, "s")
    too_many = batches(b"x" * 1_000_000) * 40
    claim = Claim(OCTETS, Producer("p", 0, 0))
    with pytest.raises(TooLargeError):
        await append_to(store, "s", claim, too_many)
    assert not (await append(store, "s", b"0", producer=("p", 0, 0))).repeated


async def test_pipelined_appends_of_a_producer_are_in_order_or_refused(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        bench.engine.hold()
        order = [0, 2, 1, 2, 4, 3, 4]
        tasks = [
            asyncio.create_task(append(store, "s", b"%d" % seq, producer=("p", 0, seq)))
            for seq in order
        ]
        await asyncio.sleep(0.01)
        bench.engine.resume()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [
            seq for seq, out in zip(order, outcomes, strict=True) if isinstance(out, Exception)
        ]
        assert refused == [2, 4]
        assert all(isinstance(out, ProducerGapError) for out in (outcomes[1], outcomes[4]))
        assert await read(store, "s") == [b"0", b"1", b"2", b"3", b"4"]


async def test_racing_repetitions_are_appended_once(store: StreamStore) -> None:
    await create(store, "s")
    done = await asyncio.gather(
        *(append(store, "s", b"0", producer=("p", 0, 0)) for _ in range(50))
    )
    assert sum(not each.repeated for each in done) == 1
    assert await read(store, "s") == [b"0"]


async def test_producers_are_bounded_and_idle_ones_make_room(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        for at in range(0, PRODUCERS_MAX, 512):
            await asyncio.gather(
                *(append(store, "s", b"x", producer=(f"p{n}", 0, 0)) for n in range(at, at + 512))
            )
        with pytest.raises(ProducersExhaustedError):
            await append(store, "s", b"x", producer=("one-more", 0, 0))
        assert (await append(store, "s", b"x", producer=("p7", 0, 0))).repeated
    async with bench.store() as store:  # the bound holds after a restart as well
        with pytest.raises(ProducersExhaustedError):
            await append(store, "s", b"x", producer=("one-more", 0, 0))
        clock.pass_seconds(PRODUCER_IDLE / 2000)
        await append(store, "s", b"x", producer=("p7", 0, 1))
        clock.pass_seconds(PRODUCER_IDLE / 2000 + 1)
        await append(store, "s", b"x", producer=("one-more", 0, 0))
        assert (await append(store, "s", b"x", producer=("p7", 0, 1))).repeated
    async with bench.store() as store:
        with pytest.raises(ProducerGapError):  # forgotten for good
            await append(store, "s", b"x", producer=("p8", 0, 1))


def test_stream_sequences_are_compared_by_bytes() -> None:
    terms = Terms.of("s", None, StateRow(stream_seq="2"), {})
    for given, follows in (("10", False), ("2", False), ("20", True), ("B", True), ("é", True)):
        claim = Claim(stream_seq=given)
        if follows:
            assert not terms.repeats(claim, 0)
        else:
            with pytest.raises(StreamSeqError):
                terms.repeats(claim, 0)


async def test_records_of_s2_do_not_touch_producers(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        await append(store, "s", b"0", producer=("p", 0, 0))
        await store.append(BASIN, "s", [Record(b"between")])
        await append(store, "s", b"1", producer=("p", 0, 1))
        assert await read(store, "s") == [b"0", b"between", b"1"]


def any_claim(chance: Random, *, close: bool) -> Claim:
    """One that is accepted, repeated or refused."""
    producer = chance.choice(
        (None, Producer(chance.choice("pq"), chance.choice((0, 0, 1)), chance.randint(0, 4)))
    )
    content_type = chance.choice((OCTETS, OCTETS, OCTETS, "text/plain"))
    return Claim(content_type, producer, chance.choice((None, None, "a", "b")), close)


@pytest.mark.parametrize("seed", range(4))
async def test_an_append_that_waits_for_its_content_has_the_outcome_of_one_that_does_not(
    store: StreamStore, seed: int
) -> None:
    outcomes: list[list[AppendOutcome | str]] = []
    for stream in ("ready", "later"):
        await create(store, stream)
        chance = Random(seed)
        outcome: list[AppendOutcome | str] = []
        for number in range(40):
            claim, body = any_claim(chance, close=number == 35), b"%d" % number

            def content(body: bytes = body) -> Sequence[RecordBatch]:
                return batches(body)

            async def content_later(body: bytes = body) -> Sequence[RecordBatch]:
                return batches(body)

            request = AppendRequest(
                content=content if stream == "ready" else asyncio.ensure_future(content_later()),
                claim=claim,
            )
            try:
                outcome.append(await store.stream(BASIN, stream).submit(request).appended())
            except StreamfoldError as error:
                outcome.append(f"{error.code}: {error.message}")
        outcomes.append(outcome)
    assert [str(one).replace("ready", "later") for one in outcomes[0]] == list(
        map(str, outcomes[1])
    )
    assert await read(store, "ready") == await read(store, "later")


@pytest.mark.parametrize("closed", [False, True], ids=["refused", "repeated"])
async def test_a_creation_waits_for_a_close_that_its_answer_depends_on(
    store: StreamStore, bench: Bench, closed: bool
) -> None:
    await create(store, "chat")
    bench.engine.hold()
    closing = asyncio.create_task(append(store, "chat", close=True))
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    creation = asyncio.create_task(create(store, "chat", closed=closed))
    done, _ = await asyncio.wait({creation}, timeout=0.1)
    bench.engine.resume()
    assert not done
    await closing
    if closed:
        status, created = await creation
        assert (status.closed, created) == (True, False)
    else:
        with pytest.raises(AlreadyExistsError):
            await creation
