"""Reads and background work of a store with a damaged block: nothing is skipped, nothing is removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamfold.errors import BasinNotFoundError
from streamfold.model.names import StreamRef
from streamfold.model.records import Record
from streamfold.store import keys
from streamfold.store.damage import (
    Damage,
    KnownDamage,
    LossReport,
    StoreDamagedError,
    StreamDamagedError,
)
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.read import seek
from streamfold.store.read.requests import ReadRequest, from_seq_num, from_timestamp
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.store.catalog.test_snapshots import publication
from tests.store.conftest import BASIN, EPOCH, PATIENCE, STREAM, Bench, Clock, incompressible
from tests.store.damaged_tables import Place, Table, only_table
from tests.store.durable_streams import append, create

DAY = 24 * 60 * 60
#: Before `BASIN` in order.
OTHER = "other-basin"
#: Records, each a chunk of its own; half of them came on the first day, half on the seventh.
RECORDS = 400
HALF = RECORDS // 2
#: Without passes of their own accord: a test asks for one.
SETTINGS = StoreSettings(trim_grace=0, upkeep_interval=DAY)


@asynccontextmanager
async def opened(root: Path, clock: Clock) -> AsyncIterator[StreamStore]:
    async with open_store(root.as_uri(), SETTINGS, now=clock) as store:
        yield store


@pytest.fixture
async def table(tmp_path: Path, clock: Clock) -> Table:
    """The table of a closed store; retention is a week."""
    async with opened(tmp_path, clock) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        for number in range(RECORDS):
            if number == HALF:
                clock.pass_seconds(6 * DAY)
            await store.append(BASIN, STREAM, [Record(incompressible(900, number))])
            clock.pass_seconds(1)
        await store.upkeep()  # so that rows of what is held come behind the records
    return await only_table(tmp_path)


async def read(store: StreamStore, request: ReadRequest) -> list[int]:
    batch = await store.read(BASIN, STREAM, request)
    return [record.seq_num for record in batch.records()]


def damage_at(table: Table, seq_num: int) -> None:
    """Damage the block with this record."""
    table.flip_at(table.blocks[table.block_of(keys.chunk(1, seq_num))][0] + 100)


async def followed(store: StreamStore) -> tuple[list[int], range]:
    """The records that a session gets, and the damaged ones that it ends at."""
    records: list[int] = []
    damaged: StreamDamagedError | None = None
    try:
        async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as reader:
            async for batch in reader:
                records += [record.seq_num for record in batch.records()]
    except StreamDamagedError as error:
        damaged = error
    assert damaged is not None
    assert damaged.seq_nums is not None
    assert (damaged.basin, damaged.stream) == (BASIN, STREAM)
    return records, damaged.seq_nums


async def test_a_session_gets_everything_before_the_damage_and_may_continue_after_it(
    tmp_path: Path, table: Table, clock: Clock
) -> None:
    damage_at(table, 100)
    async with opened(tmp_path, clock) as store:
        records, damaged = await followed(store)
        assert records == list(range(damaged.start))
        assert damaged.start <= 100 < damaged.stop < HALF
        request = ReadRequest(from_seq_num(damaged.stop), count=1000)
        assert await read(store, request) == list(range(damaged.stop, RECORDS))


async def test_a_read_from_a_time_after_the_damage_works(
    tmp_path: Path, table: Table, clock: Clock
) -> None:
    damage_at(table, 100)
    async with opened(tmp_path, clock) as store:
        _, damaged = await followed(store)
        for seq_num in (0, damaged.start - 1, damaged.stop + 1, HALF - 1):
            timestamp = EPOCH + seq_num * 1000
            assert await read(store, ReadRequest(from_timestamp(timestamp), count=1)) == [seq_num]
        with pytest.raises(StreamDamagedError, match=f"^records {damaged.start} to"):
            await read(store, ReadRequest(from_timestamp(EPOCH + damaged.start * 1000 + 1)))


async def test_records_behind_a_damaged_last_block_can_be_read_as_far_back_as_the_limit(
    tmp_path: Path, table: Table, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_at(table, RECORDS - 1)
    more = 40
    async with opened(tmp_path, clock) as store:
        for number in range(more):
            await store.append(BASIN, STREAM, [Record(incompressible(60_000, number))])
    async with opened(tmp_path, clock) as store:
        behind: list[int] = []
        while len(behind) < more:  # some at a time: together they have more than a megabyte
            behind += await read(store, ReadRequest(from_seq_num(RECORDS + len(behind))))
        assert behind == list(range(RECORDS, RECORDS + more))
        monkeypatch.setattr(seek, "BEHIND_DAMAGE_MAX", 10)
        with pytest.raises(StreamDamagedError) as raised:
            await read(store, ReadRequest(from_seq_num(RECORDS)))
        assert raised.value.seq_nums == range(RECORDS, RECORDS + more - 10)
        request = ReadRequest(from_seq_num(RECORDS + more - 10), count=1)
        assert await read(store, request) == [RECORDS + more - 10]


async def test_retention_never_removes_records_because_they_are_damaged(
    tmp_path: Path, table: Table, clock: Clock
) -> None:
    damage_at(table, HALF)
    clock.pass_seconds(2 * DAY)  # the first half is too old now
    async with opened(tmp_path, clock) as store:
        await store.upkeep()
        with pytest.raises(StreamDamagedError) as raised:
            await read(store, ReadRequest(from_seq_num(0)))
        damaged = raised.value.seq_nums
        assert damaged is not None
        assert 0 < damaged.start <= HALF < damaged.stop
        request = ReadRequest(from_seq_num(damaged.stop), count=1000)
        assert await read(store, request) == list(range(damaged.stop, RECORDS))


async def test_background_work_and_appends_go_on(
    tmp_path: Path, table: Table, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    damage_at(table, 100)
    async with opened(tmp_path, clock) as store:
        await store.upkeep()
        await store.upkeep()
        await store.append(BASIN, STREAM, [Record(b"more")])
        assert (await store.check_tail(BASIN, STREAM)).seq_num == RECORDS + 1
        assert store.storage_failures == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages))


def test_places_of_the_same_damage_become_one_and_their_number_is_bounded() -> None:
    known = KnownDamage()
    for first in (30, 20, 25):
        error = StreamDamagedError(BASIN, STREAM, "why", "db/a.sst", range(first, 40))
        known.note(error.damage)
    [place] = known.report(()).places
    assert place.seq_nums == range(20, 40)
    assert place.effect.startswith("records 20 to 39 of stream")
    for number in range(1500):
        known.note(Damage(f"something else, {number}"))
    report = known.report(("db/a.sst",))
    assert len(report.places) + report.unlisted == 1501
    assert len(report.places) == 1000
    assert report.summary[0].startswith("1501 places")


async def test_a_store_that_is_read_only_refuses_every_change_at_once(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, STREAM, b"a")
        mounted = await store._supervisor.mounted()
        mounted.mount.committer.read_only = StoreDamagedError(
            "the store takes no changes", "x", None
        )
        assert mounted.mount.log_in_memory(StreamRef.parse(BASIN, STREAM)) is not None
        for change in (
            append(store, STREAM, b"b"),
            append(store, STREAM, close=True),
            store.append(BASIN, STREAM, [Record(b"b")]),
            store.create_stream(BASIN, "new"),
            create(store, "new", b"a"),
            store.stream(BASIN, STREAM).snapshots.publish(publication(1, trim=True)),
            store.delete_stream(BASIN, STREAM),
            store.delete_basin(BASIN),
        ):
            with pytest.raises(StoreDamagedError):
                async with asyncio.timeout(PATIENCE):
                    await change
        assert store._supervisor.admission.used == 0
        mounted.mount.committer.read_only = None
        assert await read(store, ReadRequest(from_seq_num(0))) == [0]


async def test_a_store_that_is_read_only_serves_streams_that_reads_keep_alive(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, STREAM, b"a", ttl=60)
        mounted = await store._supervisor.mounted()
        mounted.mount.committer.read_only = StoreDamagedError(
            "the store takes no changes", "x", None
        )
        for _ in range(3):
            clock.pass_seconds(50)
            async with store.stream(BASIN, STREAM).reading(0) as reader:
                batch = await reader.read()
            assert batch is not None
            assert batch.count == 1


async def test_a_loss_is_reported_although_names_of_streams_are_damaged(
    tmp_path: Path, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    table.flip(Place.FIRST_BLOCK)
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    try:
        loss = LossReport()
        loss.add([(keys.chunk(1, 7), b"")])
        await loss.log(engine)
    finally:
        await engine.close(flush=False)
    assert "dropped: records 7 to 7 of stream of id 1" in caplog.text


async def test_a_basin_row_that_cannot_be_decoded_costs_that_basin_alone(bench: Bench) -> None:
    async with bench.store() as store:
        for basin in (BASIN, OTHER):
            await store.create_basin(basin)
            await store.create_stream(basin, STREAM)
        mounted = await store._supervisor.mounted()
        await mounted.mount.committer.write([(keys.basin(OTHER), b"no row")])
    async with bench.store() as store:
        await store.append(BASIN, STREAM, [Record(b"a")])
        with pytest.raises(StoreDamagedError, match=f"basin {OTHER!r} cannot be used"):
            await store.append(OTHER, STREAM, [Record(b"a")])
        await store.delete_basin(BASIN)
        for _ in range(3):
            await store.upkeep()
        with pytest.raises(BasinNotFoundError):
            await store.basin_config(BASIN)
