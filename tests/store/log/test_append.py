from __future__ import annotations

import asyncio
from random import Random

import pytest

from streamfold.errors import (
    FencingTokenMismatchError,
    InvalidError,
    SeqNumMismatchError,
    StreamDeletingError,
    StreamfoldError,
)
from streamfold.model.configs import StreamConfigLayer, StreamReconfiguration, TimestampMode
from streamfold.model.records import Header, Record, fence_record, trim_record
from streamfold.model.resources import OCTETS, Claim
from streamfold.records.batch import RecordBatch
from streamfold.store import keys
from streamfold.store.engine.engine import WriteBatch
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.shares import AppendAck
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore
from tests.store.conftest import (
    BASIN,
    EPOCH,
    STREAM,
    Bench,
    Clock,
    at,
    bodies,
    later,
    submit,
    until,
)
from tests.store.durable_streams import append_to, create

EVERYTHING = ReadRequest(from_seq_num(0))


async def read_bodies(store: StreamStore, stream: str = STREAM) -> list[bytes]:
    return [record.body for record in (await store.read(BASIN, stream, EVERYTHING)).records()]


async def test_an_ack_names_start_end_and_tail(store: StreamStore, clock: Clock) -> None:
    first = await store.append(BASIN, STREAM, bodies("a", "b"))
    assert (first.start, first.end, first.tail) == (
        at(0, EPOCH),
        at(2, EPOCH),
        at(2, EPOCH),
    )
    clock.pass_seconds(1)
    second = await store.append(BASIN, STREAM, bodies("c"))
    assert (second.start.seq_num, second.end) == (2, at(3, EPOCH + 1000))


async def test_what_was_appended_is_read_back_with_headers_and_timestamps(
    store: StreamStore,
) -> None:
    record = Record(b"\x00\xff", (Header(b"k", b"v"), Header(b"empty", b"")), timestamp=EPOCH - 5)
    await store.append(BASIN, STREAM, [record, Record()])
    first, second = (await store.read(BASIN, STREAM, EVERYTHING)).records()
    assert (first.body, first.headers, first.timestamp) == (b"\x00\xff", record.headers, EPOCH - 5)
    assert (second.body, second.headers, second.timestamp) == (b"", (), EPOCH)


async def test_match_seq_num_lets_one_of_two_writers_win(store: StreamStore) -> None:
    outcomes = await asyncio.gather(
        *(store.append(BASIN, STREAM, bodies(text), match_seq_num=0) for text in "ab"),
        return_exceptions=True,
    )
    lost = [outcome for outcome in outcomes if isinstance(outcome, SeqNumMismatchError)]
    assert [error.next_seq_num for error in lost] == [1]
    assert len(await read_bodies(store)) == 1


async def test_a_fencing_token_shuts_out_writers_that_show_another(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, bodies("a"), fencing_token="")
    await store.append(BASIN, STREAM, [fence_record("one")], fencing_token="")
    with pytest.raises(FencingTokenMismatchError) as caught:
        await store.append(BASIN, STREAM, bodies("x"), fencing_token="")
    assert caught.value.current == "one"
    await store.append(BASIN, STREAM, bodies("b"), fencing_token="one")
    await store.append(BASIN, STREAM, bodies("c"))  # fencing binds those who take part in it
    await store.append(BASIN, STREAM, [fence_record("two"), Record(b"d")], fencing_token="one")
    with pytest.raises(FencingTokenMismatchError):
        await store.append(BASIN, STREAM, bodies("x"), fencing_token="one")
    await store.append(BASIN, STREAM, [fence_record("")], fencing_token="two")
    await store.append(BASIN, STREAM, bodies("e"), fencing_token="")


async def test_the_fencing_token_is_checked_before_match_seq_num(store: StreamStore) -> None:
    with pytest.raises(FencingTokenMismatchError):
        await store.append(BASIN, STREAM, bodies("x"), fencing_token="no", match_seq_num=99)


async def test_fence_and_trim_survive_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("a", "b", "c"))
        await store.append(BASIN, STREAM, [fence_record("mine"), trim_record(2)])
    async with bench.store() as store:
        with pytest.raises(FencingTokenMismatchError):
            await store.append(BASIN, STREAM, bodies("x"), fencing_token="other")
        batch = await store.read(BASIN, STREAM, EVERYTHING)
        assert [record.seq_num for record in batch.records()] == [2, 3, 4]


async def test_a_trim_is_seen_at_once_never_goes_back_and_never_reaches_beyond_itself(
    store: StreamStore,
) -> None:
    await store.append(BASIN, STREAM, bodies("a", "b", "c"))
    await store.append(BASIN, STREAM, [trim_record(2)])
    assert (await store.read(BASIN, STREAM, EVERYTHING)).first_seq_num == 2
    await store.append(BASIN, STREAM, [trim_record(1)])
    assert (await store.read(BASIN, STREAM, EVERYTHING)).first_seq_num == 2
    await store.append(BASIN, STREAM, [Record(b"d"), trim_record(1000), Record(b"e")])
    batch = await store.read(BASIN, STREAM, EVERYTHING)
    assert [(record.seq_num, record.body) for record in batch.records()] == [(7, b"e")]


async def test_a_stream_trimmed_to_nothing_continues_counting_after_upkeep_and_restart(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("a", "b"))
        await store.append(BASIN, STREAM, [trim_record(3)])
        await store.upkeep()
        chunks = [row async for page in bench.engine.scan(b"\x04", b"\x06") for row in page]
        assert chunks == []
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 3
    clock.pass_seconds(-10)
    async with bench.store() as store:
        assert await store.check_tail(BASIN, STREAM) == at(3, EPOCH)
        ack = await store.append(BASIN, STREAM, bodies("c"))
        assert ack.start == at(3, EPOCH)


async def test_timestamps_never_decrease_even_over_a_restart(bench: Bench, clock: Clock) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("a"))
    clock.pass_seconds(-100)
    async with bench.store() as store:
        await store.append(BASIN, STREAM, bodies("b"))
        batch = await store.read(BASIN, STREAM, EVERYTHING)
        assert [record.timestamp for record in batch.records()] == [EPOCH, EPOCH]


async def test_timestamping_follows_the_configuration_and_its_changes(store: StreamStore) -> None:
    ahead = Record(b"x", timestamp=EPOCH + 1000)
    assert (await store.append(BASIN, STREAM, [ahead])).start.timestamp == EPOCH
    change = StreamReconfiguration(timestamp_uncapped=True)
    await store.reconfigure_stream(BASIN, STREAM, change)
    assert (await store.append(BASIN, STREAM, [ahead])).start.timestamp == EPOCH + 1000

    layer = StreamConfigLayer(timestamp_mode=TimestampMode.CLIENT_REQUIRE)
    await store.create_stream(BASIN, "strict", layer)
    with pytest.raises(InvalidError, match="record 1"):
        await store.append(BASIN, "strict", [Record(timestamp=1), Record()])
    assert (await store.check_tail(BASIN, "strict")).seq_num == 0

    layer = StreamConfigLayer(timestamp_mode=TimestampMode.ARRIVAL)
    await store.create_stream(BASIN, "arrival", layer)
    ack = await store.append(BASIN, "arrival", [Record(timestamp=5)])
    assert ack.start.timestamp == EPOCH


async def test_a_refused_batch_changes_nothing(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    for bad in (
        [],
        [Record()] * 1001,
        [Record(b"x" * (1 << 20))],
        [Record(b"", (Header(b"", b"unknown"),))],
        [Record(b"short", (Header(b"", b"trim"),))],
        [Record(b"t" * 37, (Header(b"", b"fence"),))],
        [Record(b"", (Header(b"", b"fence"), Header(b"a", b"b")))],
    ):
        with pytest.raises(InvalidError):
            await store.append(BASIN, STREAM, bad)
    with pytest.raises(InvalidError, match="fencing token"):
        await store.append(BASIN, STREAM, bodies("x"), fencing_token="t" * 37)
    assert await read_bodies(store) == [b"a"]


async def test_the_largest_batches_are_taken(store: StreamStore) -> None:
    await store.append(BASIN, STREAM, [Record()] * 1000)
    await store.append(BASIN, STREAM, [Record(b"x" * ((1 << 20) - 8))])
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 1001


async def test_appends_that_arrive_during_a_commit_go_out_together(
    store: StreamStore, bench: Bench
) -> None:
    await store.create_stream(BASIN, "other")
    bench.engine.hold()
    before = len(bench.engine.commits)
    streams = [STREAM, "other"] * 50
    appends = [
        asyncio.create_task(store.append(BASIN, stream, bodies(str(index))))
        for index, stream in enumerate(streams)
    ]
    await asyncio.sleep(0)
    bench.engine.resume()
    acks = await asyncio.gather(*appends)
    assert len(bench.engine.commits) - before <= 2
    assert [ack.start.seq_num for ack in acks[::2]] == list(range(50))
    assert await read_bodies(store) == [str(index).encode() for index in range(0, 100, 2)]


async def test_acks_come_in_order_with_several_commits_under_way(
    store: StreamStore, bench: Bench
) -> None:
    acked: list[int] = []
    tickets = []
    for index in range(100):
        ticket = await submit(store, bodies(str(index)))
        tickets.append(asyncio.ensure_future(ticket))
        tickets[-1].add_done_callback(lambda done: acked.append(done.result().start.seq_num))
        if index % 10 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tickets)
    assert acked == list(range(100))


async def test_appends_wait_for_room_when_too_much_is_unacknowledged(bench: Bench) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        bench.engine.hold()
        large = [Record(b"x" * 600_000)]
        first = await submit(store, large)
        second = asyncio.create_task(submit(store, large))
        third = asyncio.create_task(submit(store, bodies("small")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()  # no overtaking
        bench.engine.resume()
        assert (await first).start.seq_num == 0
        assert (await (await second)).start.seq_num == 1
        assert (await (await third)).start.seq_num == 2


@pytest.mark.parametrize("gone", ["B", "D", "BD", "BCD", "ZB"])
async def test_appends_keep_their_order_when_callers_between_them_go(
    bench: Bench, gone: str
) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        bench.engine.hold()
        fills = asyncio.create_task(store.append(BASIN, STREAM, [Record(bytes(1_000_000))]))
        await asyncio.sleep(0.02)
        tasks: dict[str, asyncio.Task[AppendAck]] = {}
        for name in "ZABCDE":  # the first waits for room, and each of the others for the one before
            if name == "E":
                for other in gone:
                    tasks[other].cancel()
                await asyncio.sleep(0.02)
            batch = [Record(name.encode() * 60_000)]
            tasks[name] = asyncio.create_task(store.append(BASIN, STREAM, batch))
            await asyncio.sleep(0.02)
        bench.engine.resume()
        await fills
        acks = [await task for name, task in tasks.items() if name not in gone]
        assert [ack.start.seq_num for ack in acks] == list(range(1, len(acks) + 1))
        assert not store._queues._queues


async def test_an_append_that_is_larger_than_the_room_for_all_gets_in_alone(bench: Bench) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await create(store, STREAM)
        large = [RecordBatch.of([Record(bytes(600_000))])] * 3
        bench.engine.hold()
        appends = [
            asyncio.create_task(store.append(BASIN, STREAM, bodies("before"))),
            asyncio.create_task(append_to(store, STREAM, Claim(OCTETS), large)),
            asyncio.create_task(store.append(BASIN, STREAM, bodies("after"))),
        ]
        await until(lambda: store.queue.waiting)
        await asyncio.sleep(0.1)
        assert store.queue.waiting == 1  # the other is behind it in the queue of their stream
        bench.engine.resume()
        async with asyncio.timeout(60):
            await asyncio.gather(*appends)
        assert (store.queue.used, store.queue.waiting) == (0, 0)
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 5


async def test_a_cancelled_append_gives_its_room_back_only_when_it_is_settled(bench: Bench) -> None:
    async with bench.store(StoreSettings(inflight_bytes=1 << 20)) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, bodies("first"))
        bench.engine.hold()
        large = [Record(b"x" * 600_000)]
        given_up = asyncio.create_task(store.append(BASIN, STREAM, large))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(store.append(BASIN, STREAM, large))
        for _ in range(5):
            await asyncio.sleep(0)
        given_up.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        bench.engine.resume()
        assert (await waiting).start.seq_num == 2  # the cancelled batch had its slot


async def test_nothing_is_acknowledged_or_readable_before_it_is_durable(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, STREAM, bodies("a"))
    bench.engine.hold()
    ticket = await submit(store, bodies("b"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 1
    assert await read_bodies(store) == [b"a"]
    bench.engine.resume()
    await ticket
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 2
    assert await read_bodies(store) == [b"a", b"b"]


async def test_a_refusal_that_rests_on_undurable_state_waits_for_it(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    ticket = await submit(store, bodies("a"))
    refused = asyncio.create_task(store.append(BASIN, STREAM, bodies("b"), match_seq_num=0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not refused.done()
    bench.engine.resume()
    with pytest.raises(SeqNumMismatchError):
        await refused
    assert (await ticket).start.seq_num == 0


async def test_a_refusal_comes_although_others_never_stop_appending(
    store: StreamStore, bench: Bench
) -> None:
    commit = bench.engine.inner.commit
    begun: list[asyncio.Future[None]] = []

    async def commit_after_the_next_has_begun(batch: WriteBatch) -> None:
        if any(keys.is_chunk(key) for key, _ in batch.ops):
            begun.append(asyncio.get_running_loop().create_future())
            await begun[-1]
        await commit(batch)

    bench.engine.inner.commit = commit_after_the_next_has_begun  # type: ignore[method-assign]
    appends = [asyncio.create_task(store.append(BASIN, STREAM, bodies("first")))]
    await until(lambda: begun)
    refused = asyncio.create_task(store.append(BASIN, STREAM, bodies("x"), match_seq_num=7))
    for number in range(5):  # there is always one that is not durable
        appends.append(asyncio.create_task(store.append(BASIN, STREAM, bodies("more"))))
        await asyncio.sleep(0.02)
        while len(begun) <= number:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
        begun[number].set_result(None)
        await appends[number]
    with pytest.raises(SeqNumMismatchError):
        async with asyncio.timeout(60):
            await refused
    while len(begun) <= 5:  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    begun[5].set_result(None)
    await appends[5]


async def test_a_deletion_comes_after_the_appends_accepted_before_it(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    ticket = await submit(store, bodies("a"))
    deletion = asyncio.create_task(store.delete_stream(BASIN, STREAM))
    await asyncio.sleep(0)
    late = asyncio.create_task(store.append(BASIN, STREAM, bodies("b")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not late.done()
    bench.engine.resume()
    assert (await ticket).start.seq_num == 0
    await deletion
    with pytest.raises(StreamDeletingError):
        await late


def any_append(chance: Random) -> AppendRequest:
    """One or two batches, some of them with conditions that hold or do not."""
    records = [
        *bodies(*(chance.randbytes(3).hex() for _ in range(chance.randint(1, 2)))),
        Record(b"stamped", timestamp=chance.choice((None, EPOCH - 5, EPOCH + 5))),
        Record(b"", (Header(b"name", b"value"),)),
        fence_record(chance.choice(("a", "b", ""))),
        trim_record(chance.randint(0, 9)),
    ]
    count = chance.choice((1, 1, 2))
    batches = [chance.sample(records, chance.choice((1, 1, 3))) for _ in range(count)]
    return AppendRequest(
        tuple(RecordBatch.of(batch) for batch in batches),
        match_seq_num=chance.choice((None, None, None, 0, 3)),
        fencing_token=chance.choice((None, None, None, "a", "b")),
    )


@pytest.mark.parametrize("mode", [None, *TimestampMode])
async def test_an_append_that_waits_in_the_queue_has_the_outcome_of_one_that_does_not(
    store: StreamStore, mode: TimestampMode | None
) -> None:
    layer = StreamConfigLayer(timestamp_mode=mode)
    outcomes: list[list[AppendAck | str]] = []
    for name in ("at once", "queued"):
        await store.create_stream(BASIN, name, layer)
        stream, chance = store.stream(BASIN, name), Random(7)
        outcome: list[AppendAck | str] = []
        for _ in range(60):
            request = any_append(chance)
            try:
                outcome.append(
                    await stream.submit(request if name == "at once" else later(request)).ack
                )
            except StreamfoldError as error:
                outcome.append(f"{error.code}: {error.message}")
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]
    assert await read_bodies(store, "at once") == await read_bodies(store, "queued")
