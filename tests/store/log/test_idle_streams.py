"""Streams that are not in use are used again as they were, whatever happened meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from streamfold.errors import InvalidError, OutcomeUnknownError, ProducerGapError
from streamfold.model.configs import BasinConfig, StreamReconfiguration, TimestampMode
from streamfold.model.names import StreamRef
from streamfold.model.records import Record, fence_record
from streamfold.store import ReadRequest, StoreSettings, StreamStore, from_seq_num, keys, rows
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.log import chunks
from streamfold.store.log.chunks import Chunk
from streamfold.store.mount import Mount
from streamfold.store.rows import ResumeRow, StreamRow, WriterRow
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, Bench, Clock, bodies
from tests.store.durable_streams import append, create

#: One stream is in use at a time, and memory keeps nothing of the others.
NONE_IDLE = StoreSettings(idle_streams=1, idle_bytes=0, upkeep_interval=1e6, trim_grace=0)
CREATING = BasinConfig(create_stream_on_append=True)
A = StreamRef.parse(BASIN, "a")
#: A ResumeRow that this version cannot read.
LATER_FORMAT = b"\xc1"


def mount_of(store: StreamStore) -> Mount:
    assert store._supervisor.current is not None
    return store._supervisor.current.mount


async def put_away(store: StreamStore, *streams: str) -> None:
    """Have the store write the state of `streams` to storage, by using others."""
    for name in streams:
        await store.check_tail(BASIN, name)
    for name in ("other", "another"):
        await store.append(BASIN, name, bodies("x"))
    await mount_of(store).idle.written([StreamRef.parse(BASIN, name) for name in streams])


async def content(store: StreamStore, stream: str) -> list[bytes]:
    batch = await store.read(BASIN, stream, ReadRequest(from_seq_num(0)))
    return [record.body for record in batch.records()]


async def outdated_row(bench: Bench) -> bytes:
    """The ResumeRow of `a`, as an opening wrote it whose rows do not count."""
    engine = await SlateEngine.open(bench.location)
    value = await engine.get(keys.resume(*A))
    await engine.close()
    assert value is not None
    row = msgspec.msgpack.decode(value, type=ResumeRow)
    return msgspec.msgpack.encode(replace(row, epoch=0))


async def test_a_stream_that_is_not_in_use_is_opened_by_one_read_of_one_row(bench: Bench) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", [fence_record("token"), *bodies("x")])
        await put_away(store, "a")
    async with bench.store(NONE_IDLE) as store:
        held = bench.engine.hold_read(keys.resume(*A))
        tail = asyncio.create_task(store.check_tail(BASIN, "a"))
        await held.answered.wait()
        # Whatever else storage has of the stream is not read.
        row = await mount_of(store).stream(A)
        assert row is not None
        await commit_rows(
            bench.engine.inner, [(keys.chunk(row.id, 1), b"?"), (keys.state(row.id), b"?")]
        )
        held.release.set()
        assert (await tail).seq_num == 2


async def test_the_row_of_an_unused_stream_goes_in_the_commit_that_changes_the_stream(
    bench: Bench,
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        for change in (
            lambda: store.append(BASIN, "a", bodies("y")),
            lambda: store.reconfigure_stream(
                BASIN, "a", StreamReconfiguration(timestamp_mode=TimestampMode.ARRIVAL)
            ),
            lambda: store.delete_stream(BASIN, "a"),
        ):
            await put_away(store, "a")
            assert await bench.engine.get(keys.resume(*A)) is not None
            bench.engine.commits.clear()
            await change()
            (commit,) = [
                commit for commit in bench.engine.commits if (keys.resume(*A), None) in commit
            ]
            assert len(commit) > 1
            assert await bench.engine.get(keys.resume(*A)) is None


async def test_a_stream_that_is_only_read_is_written_once(bench: Bench) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await store.append(BASIN, "b", bodies("x"))
        for turn in range(3):
            bench.engine.commits.clear()
            for stream in ("a", "b"):
                assert await content(store, stream) == [b"x"]
                await mount_of(store).idle.written([A, StreamRef.parse(BASIN, "b")])
            assert bool(bench.engine.commits) == (turn == 0)


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_an_append_whose_outcome_is_unknown_leaves_a_stream_that_continues(
    bench: Bench, fault: CommitFault
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await put_away(store, "a")
        bench.engine.fail_next(fault, with_records=True)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, "a", bodies("y"))
        ack = await store.append(BASIN, "a", bodies("z"))
        written = fault is CommitFault.AFTER
        assert ack.start.seq_num == (2 if written else 1)
        assert await content(store, "a") == [b"x", *[b"y"] * written, b"z"]


async def test_producers_of_a_stream_that_was_not_in_use_are_recognised(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await create(store, "a")
        for number in range(3):
            await append(store, "a", b"%d" % number, producer=("p", 0, number))
            await put_away(store, "a")
    async with bench.store(NONE_IDLE) as store:
        await append(store, "a", b"again", producer=("p", 0, 2))
        with pytest.raises(ProducerGapError):
            await append(store, "a", b"gap", producer=("p", 0, 5))
        await append(store, "a", b"3", producer=("p", 0, 3))
        assert await content(store, "a") == [b"0", b"1", b"2", b"3"]


async def test_an_earlier_version_may_append_between_two_openings_of_this_one(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        row = await mount_of(store).stream(A)
    assert row is not None
    # An earlier version writes chunks, leaves ResumeRows alone, and writes no WriterRow.
    engine = await SlateEngine.open(bench.location)
    assert await engine.get(keys.resume(*A)) is not None
    record = chunks.decode(await engine.get(keys.chunk(row.id, 0)) or b"")
    at = clock.now + 5
    late = Chunk(1, 1, record.metered, at, at, at, bytes(record.payload))
    await commit_rows(engine, [(keys.chunk(row.id, 1), chunks.encode(late).row)])
    await engine.close()
    for expected in (2, 3):
        async with bench.store(NONE_IDLE) as store:
            ack = await store.append(BASIN, "a", [Record(b"z")])
            assert ack.start.seq_num == expected
            assert ack.start.timestamp >= late.last_timestamp


async def test_a_name_that_is_used_again_by_an_earlier_version_is_the_new_stream(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        row = await mount_of(store).stream(A)
    assert row is not None
    engine = await SlateEngine.open(bench.location)
    new = StreamRow(row.id + 1000, clock.now, row.config)
    await commit_rows(engine, [(keys.stream(*A), rows.encode(new))])
    await engine.close()
    async with bench.store(NONE_IDLE) as store:
        assert (await store.append(BASIN, "a", bodies("new"))).start.seq_num == 0


async def test_rows_of_unused_streams_count_while_every_opening_is_known(bench: Bench) -> None:
    for turn in range(3):
        async with bench.store(NONE_IDLE) as store:
            await store.ensure_basin(BASIN, CREATING)
            value = await bench.engine.get(keys.WRITER)
            assert value is not None
            assert rows.decode(value, WriterRow) == WriterRow(turn + 1, 1)
    await (await SlateEngine.open(bench.location)).close()
    async with bench.store(NONE_IDLE):
        value = await bench.engine.get(keys.WRITER)
        assert value is not None
        assert rows.decode(value, WriterRow) == WriterRow(5, 5)


async def test_a_row_that_cannot_be_read_does_not_hide_its_stream(bench: Bench) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await put_away(store, "a")
        await commit_rows(bench.engine, [(keys.resume(*A), LATER_FORMAT)])
        assert (await store.append(BASIN, "a", bodies("y"))).start.seq_num == 1


@pytest.mark.parametrize("kept", [NONE_IDLE, StoreSettings(idle_streams=1, upkeep_interval=1e6)])
async def test_a_row_that_is_not_used_goes_in_the_commit_that_changes_the_stream(
    bench: Bench, kept: StoreSettings
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
    for unused in (LATER_FORMAT, await outdated_row(bench)):
        async with bench.store(kept) as store:
            await commit_rows(bench.engine, [(keys.resume(*A), unused)])
            await store.check_tail(BASIN, "a")
            mount_of(store).idle.may_write = lambda: False
            await put_away(store, "a")
            assert await bench.engine.get(keys.resume(*A)) == unused
            await store.append(BASIN, "a", bodies("y"))
            # A version that can read the row would assign the record's seq_num again.
            assert await bench.engine.get(keys.resume(*A)) is None


async def test_a_row_that_is_not_used_is_replaced_when_its_stream_leaves_memory(
    bench: Bench,
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
    for unused in (LATER_FORMAT, await outdated_row(bench)):
        async with bench.store(NONE_IDLE) as store:
            await commit_rows(bench.engine, [(keys.resume(*A), unused)])
            await put_away(store, "a")
            value = await bench.engine.get(keys.resume(*A))
            assert value is not None
            row = msgspec.msgpack.decode(value, type=ResumeRow)
            assert (row.epoch, row.seq_num) == (bench.engine.epoch, 1)


async def test_a_configuration_that_changes_while_the_row_is_being_written_leaves_no_row(
    bench: Bench,
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        mount = mount_of(store)
        row = await mount.stream(A)
        assert row is not None
        required = dataclasses.replace(row.config, timestamp_mode=TimestampMode.CLIENT_REQUIRE)
        # The change is made in the turn of the event loop in which the stream leaves memory.
        await asyncio.gather(mount.rest(), mount.put_stream(A, replace(row, config=required)))
        assert await bench.engine.get(keys.resume(*A)) is None
        with pytest.raises(InvalidError, match="timestamp"):
            await store.append(BASIN, "a", bodies("without a timestamp"))


async def test_a_name_that_is_freed_while_the_row_is_being_written_can_be_used_again(
    bench: Bench,
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await store.delete_stream(BASIN, "a")
        mount = mount_of(store)
        await asyncio.gather(mount.rest(), mount.put_stream(A, None))
        assert await bench.engine.get(keys.resume(*A)) is None
        assert (await store.append(BASIN, "a", bodies("new"))).start.seq_num == 0
    async with bench.store(NONE_IDLE) as store:
        assert await content(store, "a") == [b"new"]


async def test_a_stream_whose_configuration_changed_in_memory_is_written_when_it_leaves(
    bench: Bench,
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "a", bodies("x"))
        await put_away(store, "a")
        with await mount_of(store).lease(A):
            change = StreamReconfiguration(timestamp_mode=TimestampMode.ARRIVAL)
            await store.reconfigure_stream(BASIN, "a", change)
        await put_away(store, "a")
        value = await bench.engine.get(keys.resume(*A))
        assert value is not None
        row = msgspec.msgpack.decode(value, type=ResumeRow).row
        assert row.config.timestamp_mode is TimestampMode.ARRIVAL


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_a_row_whose_commit_failed_leaves_a_stream_that_continues(
    bench: Bench, fault: CommitFault
) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        await store.append(BASIN, "b", bodies("x"))
        await create(store, "a")
        await append(store, "a", b"0", producer=("p", 0, 0))
        bench.engine.fail_next(fault)
        mount = mount_of(store)
        await mount.rest()  # writes the row of `a`
        for number in (1, 2):
            for _ in range(2):  # the producer repeats itself
                await append(store, "a", b"%d" % number, producer=("p", 0, number))
            await put_away(store, "a")
        assert mount_of(store) is not mount
        assert await content(store, "a") == [b"0", b"1", b"2"]


async def test_a_row_that_a_former_writer_is_writing_does_not_reach_storage(bench: Bench) -> None:
    async with bench.store(NONE_IDLE) as former:
        await former.create_basin(BASIN, CREATING)
        await former.append(BASIN, "a", bodies("x"))
        former_engine = bench.engine
        former_engine.hold()
        writing = asyncio.create_task(mount_of(former).rest())
        async with bench.store(NONE_IDLE) as store:
            await store.append(BASIN, "a", bodies("y"))
            former_engine.resume()
            await writing
            assert await bench.engine.get(keys.resume(*A)) is None
            await put_away(store, "a")
            assert (await store.append(BASIN, "a", bodies("z"))).start.seq_num == 2


async def test_a_stream_that_left_memory_with_nothing_to_commit_takes_appends_at_once(
    bench: Bench,
) -> None:
    async with bench.store(StoreSettings(idle_streams=1, upkeep_interval=1e6)) as store:
        await store.create_basin(BASIN, CREATING)
        for name in ("a", "b", "a"):
            await store.append(BASIN, name, bodies("x"))
        mount = mount_of(store)
        log = mount.log_in_memory(A)
        assert log is not None
        # A repeated append does this, and its caller may be cancelled before the next commit.
        mount.committer.touch(log)
        assert mount.log_in_memory(StreamRef.parse(BASIN, "b")) is not None
        assert mount.log_in_memory(A) is not log
        async with asyncio.timeout(60):  # it must not wait for the next append
            await store.append(BASIN, "a", bodies("y"))


async def test_nothing_is_written_for_unused_streams_while_the_disk_is_full(bench: Bench) -> None:
    async with bench.store(NONE_IDLE) as store:
        await store.create_basin(BASIN, CREATING)
        mount_of(store).idle.may_write = lambda: False
        for name in ("a", "b", "c", "a"):
            await store.append(BASIN, name, bodies("x"))
    written = [key for commit in bench.engine.commits for key, value in commit if value]
    assert keys.stream(*A) in written
    assert keys.resume(*A) not in written
