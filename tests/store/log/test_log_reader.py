"""A stream that leaves memory is opened again as it was, whatever happened meanwhile."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from streamfold.errors import OutcomeUnknownError, ProducerGapError
from streamfold.model.configs import BasinConfig, StreamReconfiguration, TimestampMode
from streamfold.model.names import StreamRef
from streamfold.model.records import fence_record
from streamfold.store import ReadRequest, StoreSettings, StreamStore, from_seq_num, keys, rows
from streamfold.store.engine.engine import commit_rows
from streamfold.store.mount import Mount
from streamfold.store.rows import StateRow, TailMark
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, Bench, Clock, at_rest, bodies
from tests.store.durable_streams import append, create
from tests.store.many_streams import watch

#: One stream is in memory at a time.
ONE_LOG = StoreSettings(idle_streams=1, upkeep_interval=1e6, trim_grace=0)
CREATING = BasinConfig(create_stream_on_append=True)
A = StreamRef.parse(BASIN, "a")


def mount_of(store: StreamStore) -> Mount:
    assert store._supervisor.current is not None
    return store._supervisor.current.mount


async def evict(store: StreamStore) -> None:
    """Drop the log of `a` from memory by using other streams."""
    for name in ("other", "another"):
        await store.append(BASIN, name, bodies("x"))
    assert mount_of(store).log_in_memory(A) is None


async def content(store: StreamStore, stream: str) -> list[bytes]:
    batch = await store.read(BASIN, stream, ReadRequest(from_seq_num(0)))
    return [record.body for record in batch.records()]


async def state_of(store: StreamStore) -> StateRow:
    mount = mount_of(store)
    row = await mount.stream(A)
    assert row is not None
    value = await mount.engine.get(keys.state(row.id))
    assert value is not None
    return rows.decode(value, StateRow)


async def test_every_commit_with_records_stores_the_tail_that_they_lead_to(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.create_stream(BASIN, "a")
        assert (await state_of(store)).tail == TailMark(0, 0, clock.now)
        for end in (2, 4):
            clock.pass_seconds(1)
            bench.engine.commits.clear()
            await store.append(BASIN, "a", bodies("x", "y"))
            (commit,) = bench.engine.commits
            assert len(commit) == 2  # the records and the state, all or nothing
            assert (await state_of(store)).tail == TailMark(end, clock.now, clock.now)


async def test_a_stream_is_opened_by_point_reads_of_two_rows(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", [fence_record("token"), *bodies("x")])
        row = await mount_of(store).stream(A)
        assert row is not None
    async with bench.store(ONE_LOG) as store:
        await at_rest(store)
        watched = watch(bench)
        assert (await store.check_tail(BASIN, "a")).seq_num == 2
        assert watched.read_by_callers == [[keys.stream(*A)], [keys.state(row.id)]]


async def test_a_state_of_an_earlier_format_leaves_the_tail_to_the_last_chunk(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x", "y"))
        row, state = await mount_of(store).stream(A), await state_of(store)
    assert row is not None
    async with bench.store(ONE_LOG) as store:
        earlier = msgspec.structs.replace(state, tail=None)
        await commit_rows(bench.engine, [(keys.state(row.id), rows.encode(earlier))])
        assert (await store.append(BASIN, "a", bodies("z"))).start.seq_num == 2
        tail = (await state_of(store)).tail
        assert tail is not None
        assert tail.seq_num == 3


async def test_a_trim_of_everything_keeps_the_tail_of_an_earlier_format(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x", "y"))
        row, state = await mount_of(store).stream(A), await state_of(store)
    assert row is not None
    async with bench.store(ONE_LOG) as store:
        earlier = msgspec.structs.replace(state, tail=None, trim_point=2)
        cleanup = rows.encode(rows.CleanupRow(*A))
        await commit_rows(
            bench.engine,
            [(keys.state(row.id), rows.encode(earlier)), (keys.cleanup(row.id), cleanup)],
        )
        await store.upkeep()
        assert await bench.engine.get(keys.chunk(row.id, 1)) is None
        await evict(store)
        assert (await store.check_tail(BASIN, "a")).seq_num == 2


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_an_append_whose_outcome_is_unknown_leaves_a_stream_that_continues(
    bench: Bench, fault: CommitFault
) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await evict(store)
        bench.engine.fail_next(fault, with_records=True)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, "a", bodies("y"))
        ack = await store.append(BASIN, "a", bodies("z"))
        written = fault is CommitFault.AFTER
        assert ack.start.seq_num == (2 if written else 1)
        assert await content(store, "a") == [b"x", *[b"y"] * written, b"z"]


async def test_producers_of_a_stream_that_was_not_in_memory_are_recognised(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await create(store, "a")
        for number in range(3):
            await append(store, "a", b"%d" % number, producer=("p", 0, number))
            await evict(store)
    async with bench.store(ONE_LOG) as store:
        await append(store, "a", b"again", producer=("p", 0, 2))
        with pytest.raises(ProducerGapError):
            await append(store, "a", b"gap", producer=("p", 0, 5))
        await append(store, "a", b"3", producer=("p", 0, 3))
        assert await content(store, "a") == [b"0", b"1", b"2", b"3"]


async def test_a_changed_configuration_applies_to_a_stream_that_left_memory(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await evict(store)
        change = StreamReconfiguration(timestamp_mode=TimestampMode.ARRIVAL)
        await store.reconfigure_stream(BASIN, "a", change)
        await evict(store)
        with await mount_of(store).lease(A) as log:
            assert log.row.config.timestamp_mode is TimestampMode.ARRIVAL


async def test_a_log_stays_in_memory_while_a_commit_of_its_state_is_in_flight(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        await create(store, "a", ttl=100)
        mount = mount_of(store)
        with await mount.lease(A) as log:
            clock.pass_seconds(90)
            bench.engine.hold()
            assert log.renew(clock.now)
            lease_until = log.lifetime.lease_until
        committing = asyncio.create_task(mount.committer.write_with(log))
        while not log._committing:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
        loading = asyncio.create_task(mount.lease(StreamRef.parse(BASIN, "none")))
        with pytest.raises(Exception, match="none"):
            await loading
        assert mount.log_in_memory(A) is log
        bench.engine.resume()
        await committing
        await evict(store)
        with await mount.lease(A) as reopened:
            assert reopened.lifetime.lease_until == lease_until


async def test_rows_of_earlier_builds_are_deleted(bench: Bench) -> None:
    async with bench.store(ONE_LOG) as store:
        await store.create_basin(BASIN, CREATING)
        obsolete = [(keys.OBSOLETE_START + b"name\x00%d" % number, b"?") for number in range(300)]
        await commit_rows(bench.engine, obsolete)
    async with bench.store(ONE_LOG) as store:
        async with asyncio.timeout(60):
            while await bench.engine.get(obsolete[-1][0]) is not None:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)
        assert await bench.engine.get(obsolete[0][0]) is None
