"""More streams than fit in memory: created by appends, used in turn, listed, restarted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from streamfold.errors import (
    ConditionFailedError,
    OutcomeUnknownError,
    SeqNumMismatchError,
    StreamNotFoundError,
)
from streamfold.model.configs import (
    BasinReconfiguration,
    StreamConfigLayer,
)
from streamfold.model.names import StreamRef
from streamfold.store import (
    ReadRequest,
    StoreSettings,
    StreamStore,
    from_seq_num,
    from_tail,
    keys,
    rows,
)
from streamfold.store import mount as mount_module
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.rows import StreamRow
from streamfold.testing.engine_faults import CommitFault
from tests.proving import PROVING
from tests.store import durable_streams
from tests.store.conftest import BASIN, PATIENCE, Bench, Clock, at_rest, bodies
from tests.store.many_streams import (
    CREATING,
    QUIET,
    WRITERS,
    append_in_turn,
    mount_of,
    watch,
)

#: Streams of the test that has many.
STREAMS = 1_000_000 if PROVING else 600


@pytest.fixture
async def store(bench: Bench) -> AsyncIterator[StreamStore]:
    async with bench.store(QUIET) as opened:
        await opened.create_basin(BASIN, CREATING)
        await at_rest(opened)
        yield opened


async def commit_begins(store: StreamStore) -> None:
    """Return once a commit is under way."""
    await mount_of(store).committer._started.wait()


async def list_all(store: StreamStore) -> list[str]:
    names: list[str] = []
    while True:
        page = await store.list_streams(BASIN, start_after=names[-1] if names else "")
        names += [str(item.name) for item in page.items]
        if not page.has_more:
            return names


async def test_streams_are_created_appended_to_in_turn_and_listed_with_few_in_memory(
    bench: Bench,
) -> None:
    few = StoreSettings(
        idle_streams=STREAMS // 20,
        upkeep_interval=1e6,
        recent_bytes=1 << 20,
    )
    names = [f"agent-{number:07d}" for number in range(STREAMS)]
    async with bench.store(few) as store:
        await store.create_basin(BASIN, CREATING)
        for _ in range(2):
            await append_in_turn(store, names)
            assert len(mount_of(store)._logs) <= STREAMS // 20 + WRITERS
        assert await list_all(store) == names
    async with bench.store(few) as store:
        await append_in_turn(store, names)
        assert len(mount_of(store)._logs) <= STREAMS // 20 + WRITERS
        assert await list_all(store) == names
        for name in (names[0], names[STREAMS // 2], names[-1]):
            batch = await store.read(BASIN, name, ReadRequest(from_seq_num(0)))
            assert [record.body for record in batch.records()] == [name.encode()] * 3


async def test_a_stream_is_committed_together_with_the_append_that_creates_it(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.commits.clear()
    ack = await store.append(BASIN, "new", bodies("a"))
    assert ack.end.seq_num == 1
    (commit,) = bench.engine.commits
    row = next(value for key, value in commit if key == keys.stream(BASIN, "new"))
    assert row is not None
    stream_id = rows.decode(row, StreamRow).id
    assert keys.chunk(stream_id, 0) in [key for key, _ in commit]


async def test_a_stream_that_an_append_creates_is_looked_for_once_and_not_read_back(
    store: StreamStore, bench: Bench
) -> None:
    watched = watch(bench)
    for _ in range(2):
        await store.append(BASIN, "new", bodies("a"))
    assert watched.read_by_callers == [[keys.stream(BASIN, "new")]]


async def test_appends_to_cold_streams_in_one_turn_are_opened_together(bench: Bench) -> None:
    names = [f"s-{number:02d}" for number in range(20)]
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, names)
    async with bench.store(QUIET) as store:
        await store.basin_config(BASIN)
        await at_rest(store)
        watched = watch(bench)
        await append_in_turn(store, names)
        streams, states = watched.read_by_callers
        assert streams == [keys.stream(BASIN, name) for name in names]
        assert len(states) == len(names)


async def test_an_append_to_a_cold_stream_waits_for_no_change_of_the_stream(bench: Bench) -> None:
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("a"))
    async with bench.store(QUIET) as store:
        locks = (await store._supervisor.mounted()).catalog.locks
        async with locks.hold(BASIN, "a"), asyncio.timeout(PATIENCE):
            ack = await store.append(BASIN, "a", bodies("b"))
        assert ack.end.seq_num == 2


@pytest.mark.parametrize("names", [1, 3])
async def test_a_name_without_a_stream_is_looked_up_again_once_it_has_one(
    store: StreamStore, monkeypatch: pytest.MonkeyPatch, names: int
) -> None:
    monkeypatch.setattr(mount_module, "_MISSING_MAX", 2)
    lease = mount_of(store).lease
    for _ in range(2):
        for number in range(names):
            with pytest.raises(StreamNotFoundError):
                await lease(StreamRef.parse(BASIN, f"s-{number}"))
    for number in range(names):
        await store.create_stream(BASIN, f"s-{number}")
        (await lease(StreamRef.parse(BASIN, f"s-{number}"))).release()
    await store.delete_stream(BASIN, "s-0")
    await store.upkeep()
    ref = StreamRef.parse(BASIN, "s-0")
    with pytest.raises(StreamNotFoundError):
        await lease(ref)
    # Streams of the other protocol are written in another way.
    await durable_streams.create(store, "s-0")
    (await lease(ref)).release()


async def test_appends_that_arrive_while_a_stream_is_created_follow_in_it(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    appends = [asyncio.create_task(store.append(BASIN, "new", bodies(str(n)))) for n in range(10)]
    await commit_begins(store)
    tail = asyncio.create_task(store.check_tail(BASIN, "new"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in (*appends, tail))
    bench.engine.resume()
    acks = await asyncio.gather(*appends)
    assert sorted(int(ack.start.seq_num) for ack in acks) == list(range(10))
    # Nothing was acknowledged when it was asked for: the stream may have been created without records.
    assert (await tail).seq_num <= 10
    assert (await store.check_tail(BASIN, "new")).seq_num == 10


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_a_creation_that_fails_leaves_the_stream_as_storage_has_it(
    store: StreamStore, bench: Bench, fault: CommitFault
) -> None:
    bench.engine.fail_next(fault, with_records=True)
    with pytest.raises(OutcomeUnknownError):
        await store.append(BASIN, "new", bodies("a"))
    ack = await store.append(BASIN, "new", bodies("b"))
    assert ack.start.seq_num == (1 if fault is CommitFault.AFTER else 0)


async def test_a_caller_that_is_cancelled_while_a_stream_is_created_holds_no_lease(
    store: StreamStore, bench: Bench
) -> None:
    bench.engine.hold()
    append = asyncio.create_task(store.append(BASIN, "new", bodies("a")))
    await commit_begins(store)
    append.cancel()
    await asyncio.wait([append])
    bench.engine.resume()
    await store.append(BASIN, "new", bodies("b"))
    log = mount_of(store).log_in_memory(StreamRef.parse(BASIN, "new"))
    assert log is not None
    assert (log.leases, log.durable.seq_num) == (0, 2)


async def test_an_append_that_is_refused_creates_the_stream_without_records(
    store: StreamStore,
) -> None:
    with pytest.raises(SeqNumMismatchError):
        await store.append(BASIN, "new", bodies("a"), match_seq_num=5)
    assert (await store.check_tail(BASIN, "new")).seq_num == 0


async def test_streams_that_appends_create_leave_no_reference_cycles(store: StreamStore) -> None:
    await append_in_turn(store, ["warm"])
    gc.collect()
    gc.disable()
    try:
        await append_in_turn(store, [f"s-{number:03d}" for number in range(300)])
        assert gc.collect() < 300
    finally:
        gc.enable()


async def test_stream_ids_are_never_assigned_twice(bench: Bench) -> None:
    ids: list[int] = []
    for turn in range(3):
        async with bench.store(QUIET) as store:
            if not turn:
                await store.create_basin(BASIN, CREATING)
            names = [f"s-{turn}-{number}" for number in range(300 if turn == 1 else 3)]
            await append_in_turn(store, names)
            for name in names:
                row = await mount_of(store).stream(StreamRef.parse(BASIN, name))
                assert row is not None
                ids.append(row.id)
    assert len(set(ids)) == len(ids)


async def test_a_changed_basin_applies_to_the_next_stream_that_is_created_in_it(
    store: StreamStore,
) -> None:
    await store.append(BASIN, "a", bodies("a"))
    await store.reconfigure_basin(BASIN, BasinReconfiguration(create_stream_on_append=False))
    with pytest.raises(StreamNotFoundError):
        await store.append(BASIN, "b", bodies("b"))


async def test_upkeep_opens_no_stream_that_is_younger_than_its_retention(
    bench: Bench, clock: Clock
) -> None:
    names = [f"s-{number:02d}" for number in range(20)]
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, names)
    clock.pass_seconds(6 * 24 * 3600)
    async with bench.store(QUIET) as store:
        watched = watch(bench)
        await store.upkeep()
        streams = {keys.stream(BASIN, name) for name in names}
        assert streams.isdisjoint(key for read in watched.read for key in read)
        clock.pass_seconds(2 * 24 * 3600)
        await store.upkeep()
        assert streams == {key for read in watched.read for key in read} & streams


async def test_a_pass_of_upkeep_reads_the_rows_of_streams_that_are_due(
    bench: Bench, clock: Clock
) -> None:
    names = [f"s-{number:04d}" for number in range(1000)]
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, names)
    async with bench.store(QUIET) as store:
        await at_rest(store)  # the first pass visits all
        watched = watch(bench)
        await store.upkeep()
        assert watched.stream_rows == 1  # whether the basin has a stream
        await store.ensure_stream(BASIN, "s-0500", StreamConfigLayer(retention=60))
        clock.pass_seconds(61)
        await store.upkeep()
        assert 1 <= watched.stream_rows < 600
        batch = await store.read(BASIN, "s-0500", ReadRequest(from_tail(1), clamp=True))
        assert not list(batch.records())
        clock.pass_seconds(8 * 24 * 3600)
        await store.upkeep()
        for name in names:
            assert (await store.read(BASIN, name, ReadRequest(from_tail(1), clamp=True))).count == 0


async def test_upkeep_of_a_store_that_was_closed_counts_nothing_again(
    bench: Bench,
) -> None:
    names = [f"s-{number:02d}" for number in range(20)]
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN, CREATING)
        await append_in_turn(store, names)
        await store.upkeep()
        await append_in_turn(store, names[:5])  # not in rows of what is held yet
    async with bench.store(QUIET) as store:
        watched = watch(bench)
        await append_in_turn(store, names[3:7])
        watched.read.clear()
        await store.upkeep()
        held = [keys.stream_bytes(n) for n in range(1, 30)]
        assert len({key for read in watched.read for key in read} & set(held)) == 7
        assert watched.chunks == 0
        by_basin = _held(store)
    # Killed: everything is counted, and the result is the same.
    await (await SlateEngine.open(bench.location)).close()
    async with bench.store(QUIET) as store:
        watched = watch(bench)
        await store.upkeep()
        assert watched.chunks == 0
        assert _held(store) == by_basin


def _held(store: StreamStore) -> dict[str, int] | None:
    assert store._supervisor.current is not None
    return store._supervisor.current.usage.held_bytes.by_basin


async def test_appends_keep_their_order_while_the_first_creates_their_stream(
    store: StreamStore, bench: Bench
) -> None:
    """However far the creation has come when the next append arrives."""
    appends = []
    for number in range(300):
        appends.append(asyncio.create_task(store.append(BASIN, "new", bodies(str(number)))))
        await asyncio.sleep(0)
    acks = await asyncio.gather(*appends)
    assert [ack.start.seq_num for ack in acks] == list(range(300))


async def test_a_refused_append_holds_up_no_later_one(store: StreamStore, bench: Bench) -> None:
    """It is answered once what it depends on is durable; others need not wait for that."""
    await store.append(BASIN, "new", bodies("a"))
    bench.engine.hold()
    pending = asyncio.create_task(store.append(BASIN, "new", bodies("b")))
    refused = asyncio.create_task(store.append(BASIN, "new", bodies("c"), match_seq_num=9))
    later = asyncio.create_task(store.append(BASIN, "new", bodies("d")))
    for _ in range(100):
        await asyncio.sleep(0)
    assert store.queue.used == 2 * 9  # both wait for storage alone
    assert not refused.done()
    bench.engine.resume()
    acks = await asyncio.gather(pending, later)
    assert [ack.start.seq_num for ack in acks] == [1, 2]
    with pytest.raises(ConditionFailedError):
        await refused
