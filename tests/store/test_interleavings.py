"""Changes during a call's wait for storage: nothing acknowledged is lost, nothing ends early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from streamfold.errors import OutcomeUnknownError, PositionTrimmedError, StreamfoldError
from streamfold.model.configs import BasinConfig, StreamReconfiguration
from streamfold.model.names import StreamRef
from streamfold.model.records import Record, trim_record
from streamfold.store import (
    ReadRequest,
    StoreSettings,
    StreamStore,
    from_seq_num,
    from_timestamp,
    keys,
    rows,
)
from streamfold.store.log import committer
from streamfold.store.log.chunks import Chunk
from streamfold.store.rows import StateRow
from streamfold.testing.engine_faults import CommitFault
from tests.store.catalog.test_snapshots import publication
from tests.store.conftest import BASIN, Bench, Clock, at_rest, bodies
from tests.store.durable_streams import append, create, fork_of, read

#: The background does only what a test asks for, and readers read from storage.
QUIET = StoreSettings(upkeep_interval=1e6, trim_grace=0, recent_bytes=0)
HOUR = 3600


@pytest.fixture
async def store(bench: Bench) -> AsyncIterator[StreamStore]:
    async with bench.store(QUIET) as opened:
        await opened.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        await at_rest(opened)  # or the first pass makes a scan that a test holds back
        yield opened


async def id_of(store: StreamStore, stream: str) -> int:
    mounted = await store._supervisor.mounted()
    row = await mounted.mount.stream(StreamRef.parse(BASIN, stream))
    assert row is not None
    return row.id


async def test_a_fork_keeps_what_is_appended_while_its_inherited_records_expire(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await create(store, "source", b"old")
    source_id = await id_of(store, "source")
    clock.pass_seconds(2 * HOUR)
    await create(store, "fork", fork=fork_of("source", 1))
    change = StreamReconfiguration(retention=HOUR)
    await store.reconfigure_stream(BASIN, "fork", change)
    held = bench.engine.hold_scan(keys.chunk(source_id, 0))
    searching = asyncio.create_task(store.read(BASIN, "fork", ReadRequest(from_seq_num(1))))
    await held.answered.wait()
    await append(store, "fork", b"new")
    held.release.set()
    await searching
    for _ in range(3):
        await store.upkeep()
    assert await read(store, "fork", 1) == [b"new"]


async def test_a_snapshot_that_trims_during_a_search_of_old_records_stays_with_what_follows(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await create(store, "s", b"old")
    await store.reconfigure_stream(BASIN, "s", StreamReconfiguration(retention=HOUR))
    clock.pass_seconds(HOUR // 2)
    await append(store, "s", b"younger")
    clock.pass_seconds(HOUR // 2 + 1)
    held = bench.engine.hold_scan(keys.chunk(await id_of(store, "s"), 0))
    searching = asyncio.create_task(store.read(BASIN, "s", ReadRequest(from_seq_num(0))))
    await held.answered.wait()
    await store.stream(BASIN, "s").snapshots.publish(publication(2, trim=True))
    await store.upkeep()
    await append(store, "s", b"new")
    held.release.set()
    await searching
    for _ in range(3):
        await store.upkeep()
    snapshot = await store.stream(BASIN, "s").snapshots.find(None)
    assert snapshot is not None
    assert snapshot.seq_num == 2
    assert await read(store, "s", 2) == [b"new"]


async def test_a_reader_from_a_timestamp_gets_what_is_appended_while_it_is_searched(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await create(store, "s", b"0")
    clock.pass_seconds(1)
    await append(store, "s", b"1")
    held = bench.engine.hold_scan(keys.chunk(await id_of(store, "s"), 0))
    request = ReadRequest(from_timestamp(clock.now))
    reading = asyncio.create_task(store.read(BASIN, "s", request))
    await held.answered.wait()
    await store.stream(BASIN, "s").snapshots.publish(publication(2, trim=True))
    await store.upkeep()
    await append(store, "s", b"2")
    held.release.set()
    assert [record.body for record in (await reading).records()] == [b"2"]


async def test_a_snapshot_and_its_trim_are_one_commit_however_much_is_pending(
    store: StreamStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "_STREAMS_MAX", 1)
    await create(store, "s", b"a")
    stream_id = await id_of(store, "s")
    names = [f"other-{number}" for number in range(8)]
    for name in names:
        await store.append(BASIN, name, bodies("x"))
    bench.engine.commits.clear()
    bench.engine.hold()
    # Two commits are in flight, then the stream waits, then others do: a commit takes one of them.
    appends = [
        asyncio.create_task(store.append(BASIN, name, bodies("x")))
        for name in (*names[:3], "s", *names[3:])
    ]
    await asyncio.sleep(0)
    publishing = asyncio.create_task(
        store.stream(BASIN, "s").snapshots.publish(publication(1, trim=True))
    )
    mounted = await store._supervisor.mounted()
    trims = mounted.mount.trims_in_memory(StreamRef.parse(BASIN, "s"), stream_id)
    assert trims is not None
    async with asyncio.timeout(60):
        while not trims.accepted:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.001)
    bench.engine.resume()
    await asyncio.gather(*appends, publishing)
    (commit,) = [
        dict(commit)
        for commit in bench.engine.commits
        if any(key == keys.snapshot(stream_id, 1) for key, _ in commit)
    ]
    state = commit.get(keys.state(stream_id))
    assert state is not None
    assert rows.decode(state, StateRow).trim_point == 1


async def test_a_snapshot_that_trims_and_fails_after_the_write_is_unknown_and_whole(
    store: StreamStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "_STREAMS_MAX", 1)
    await create(store, "s", b"a")
    bench.engine.fail_next(CommitFault.AFTER)
    with pytest.raises(OutcomeUnknownError):
        await store.stream(BASIN, "s").snapshots.publish(publication(1, trim=True))
    snapshot = await store.stream(BASIN, "s").snapshots.find(None)
    assert snapshot is not None
    pieces = [piece async for piece in store.stream(BASIN, "s").snapshots.pieces(snapshot)]
    assert pieces == [b"state"]


async def test_a_fork_of_a_fork_keeps_what_it_inherits_while_its_source_is_cleaned_up(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "source", b"0", b"1")
    await create(store, "fork", fork=fork_of("source", 2))
    await store.append(BASIN, "source", [trim_record(2)])
    held = bench.engine.hold_scan(keys.forks_span(await id_of(store, "source"))[0])
    cleaning = asyncio.create_task(store.upkeep())
    await held.answered.wait()
    await create(store, "fork of fork", fork=fork_of("fork", 2))
    await store.append(BASIN, "fork", [trim_record(2)])
    held.release.set()
    await cleaning
    for _ in range(3):
        await store.upkeep()
    assert await read(store, "fork of fork") == [b"0", b"1"]


async def test_a_fork_of_a_fork_that_is_being_created_keeps_what_it_inherits(
    store: StreamStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(store, "source", b"0", b"1")
    await create(store, "fork", fork=fork_of("source", 2))
    await store.append(BASIN, "source", [trim_record(2)])
    entered, released = asyncio.Event(), asyncio.Event()
    mounted = await store._supervisor.mounted()
    insert = type(mounted.catalog).insert

    async def insert_late(self: object, *args: object, **options: object) -> None:
        entered.set()
        await released.wait()
        await insert(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(mounted.catalog), "insert", insert_late)
    creation = asyncio.create_task(create(store, "fork of fork", fork=fork_of("fork", 2)))
    await entered.wait()
    await store.append(BASIN, "fork", [trim_record(2)])
    cleaning = asyncio.create_task(store.upkeep())
    # It comes to the source first, and then waits for the fork, which is locked.
    await asyncio.wait([cleaning], timeout=0.3)
    released.set()
    await asyncio.gather(creation, cleaning)
    for _ in range(3):
        await store.upkeep()
    assert await read(store, "fork of fork") == [b"0", b"1"]


async def test_a_stream_whose_creation_takes_long_lives_as_long_as_it_says(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store(QUIET) as store:
        await store.create_basin(BASIN)
        bench.engine.hold()
        creation = asyncio.create_task(create(store, "s", b"a", ttl=100))
        async with asyncio.timeout(60):
            while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0)
        clock.pass_seconds(90)
        bench.engine.resume()
        await creation
        clock.pass_seconds(60)  # 60 of the 100 seconds that its creator was promised
        async with bench.store(QUIET) as successor:  # without a stop of the first
            assert await read(successor, "s") == [b"a"]


async def test_a_log_that_fails_with_a_commit_gives_back_all_it_had_admitted(
    store: StreamStore, bench: Bench
) -> None:
    await store.append(BASIN, "s", bodies("x"))
    admission = store._supervisor.admission
    bench.engine.hold()
    first = asyncio.create_task(store.append(BASIN, "s", bodies("a")))
    async with asyncio.timeout(60):
        while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
    second = asyncio.create_task(store.append(BASIN, "s", [Record(b"b")]))
    await asyncio.sleep(0)
    bench.engine.fail_next(CommitFault.BEFORE)
    bench.engine.resume()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)
    assert admission.used == 0


async def test_a_snapshot_whose_records_are_trimmed_during_its_last_checks_is_refused(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "s", b"0", b"1")
    stream_id = await id_of(store, "s")
    await store.stream(BASIN, "s").snapshots.publish(publication(1))
    mounted = await store._supervisor.mounted()
    async with mounted.catalog.locks.hold(BASIN, "s"):
        publishing = asyncio.create_task(
            store.stream(BASIN, "s").snapshots.publish(publication(1, b"other state"))
        )
        async with asyncio.timeout(60):
            while not mounted.catalog.under_way:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0.001)
        held = bench.engine.hold_scan(keys.snapshots_span(stream_id)[0])
    await held.answered.wait()
    await store.append(BASIN, "s", [trim_record(2)])
    held.release.set()
    with pytest.raises(PositionTrimmedError):
        await publishing


async def test_a_stream_that_is_replaced_because_it_ended_takes_no_append_if_the_clock_goes_back(
    store: StreamStore, bench: Bench, clock: Clock
) -> None:
    await create(store, "s", b"old", ttl=10)
    stream_id = await id_of(store, "s")
    clock.pass_seconds(20)
    held = bench.engine.hold_read(keys.basin(BASIN))
    mounted = await store._supervisor.mounted()
    mounted.mount._basins.clear()
    replacing = asyncio.create_task(create(store, "s", b"new", ttl=10))
    await held.answered.wait()
    clock.pass_seconds(-15)
    late = asyncio.create_task(append(store, "s", b"late"))
    await asyncio.wait([late], timeout=0.1)  # a refusal waits for the creation
    held.release.set()
    await replacing
    with pytest.raises(StreamfoldError):
        await late
    assert await id_of(store, "s") != stream_id
    assert await read(store, "s") == [b"new"]


@pytest.mark.parametrize("skipping", [True, False])
async def test_a_batch_has_no_gap_where_records_are_trimmed_while_it_is_read(
    bench: Bench, skipping: bool
) -> None:
    async with bench.store(replace(QUIET, chunk_file_bytes=1)) as store:
        await store.create_basin(BASIN)
        await create(store, "s")
        for number in range(4):
            await append(store, "s", b"%d" % number)
        mounted = await store._supervisor.mounted()
        read_files, reads = mounted.mount.files.read, 0

        async def read_late(run: Sequence[Chunk]) -> list[Chunk]:
            nonlocal reads
            reads += 1
            loaded = await read_files(run)
            if reads == 2:
                await store.stream(BASIN, "s").snapshots.publish(publication(3, trim=True))
            return loaded

        mounted.mount.files.read = read_late  # type: ignore[method-assign]
        if skipping:
            batch = await store.read(BASIN, "s", ReadRequest(from_seq_num(0)))
            assert [int(record.seq_num) for record in batch.records()] == [0]
            assert batch.count == 1
            batch = await store.read(BASIN, "s", ReadRequest(from_seq_num(1)))
            assert [int(record.seq_num) for record in batch.records()] == [3]
        else:
            with pytest.raises(PositionTrimmedError):
                await read(store, "s")


async def test_a_fork_is_read_on_behind_a_chunk_that_it_inherits_a_part_of_and_that_is_trimmed(
    bench: Bench,
) -> None:
    async with bench.store(replace(QUIET, chunk_file_bytes=1)) as store:
        await store.create_basin(BASIN)
        await create(store, "source", b"0", b"1", b"2", b"3")
        await create(store, "fork", b"own", fork=fork_of("source", 0, 2, in_records=True))
        await append(store, "fork", b"more")
        mounted = await store._supervisor.mounted()
        read_files = mounted.mount.files.read

        async def read_late(run: Sequence[Chunk]) -> list[Chunk]:
            loaded = await read_files(run)
            await store.stream(BASIN, "fork").snapshots.publish(publication(3, trim=True))
            return loaded

        mounted.mount.files.read = read_late  # type: ignore[method-assign]
        batch = await store.read(BASIN, "fork", ReadRequest(from_seq_num(0)))
        assert [record.body for record in batch.records()] == [b"more"]
