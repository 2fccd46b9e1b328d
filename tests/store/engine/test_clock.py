"""System clocks that go back: between two openings, and while a store is open."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamfold.errors import OutcomeUnknownError
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record
from streamfold.store.engine import slatedb
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store, wall_clock
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from tests.store.conftest import BASIN, PATIENCE, STREAM, Bench, Clock, at_rest, bodies
from tests.store.small_tables import small_settings

EVERYTHING = ReadRequest(from_seq_num(0))
#: Milliseconds by which the clock goes back.
STEP = 300_000


def early() -> int:
    """The clock before it went back."""
    return wall_clock() + STEP


async def prepare(store: StreamStore) -> None:
    await store.create_basin(BASIN)
    await store.create_stream(BASIN, STREAM)


async def timestamps(store: StreamStore) -> list[int]:
    batch = await store.read(BASIN, STREAM, EVERYTHING)
    return [int(record.timestamp) for record in batch.records()]


@pytest.fixture(params=["memory", "file"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return open_location("memory:" if request.param == "memory" else tmp_path.as_uri())


async def test_appends_continue_after_a_restart_with_the_clock_300_s_behind(
    location: Location,
) -> None:
    async with open_store(location, now=early) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, bodies("a"))
    for tail in (
        2,
        3,
        4,
    ):  # closing writes tables: each opening finds newer times than the one before
        async with open_store(location) as store:
            ack = await store.append(BASIN, STREAM, bodies("b"))
            assert ack.end.seq_num == tail
            await store.upkeep()
            found = await timestamps(store)
            assert found == sorted(found)
            assert found[0] > wall_clock()


async def test_appends_continue_after_a_crash_and_a_restart_with_the_clock_behind(
    tmp_path: Path, no_collections: None
) -> None:
    quiet = StoreSettings(
        upkeep_interval=3600, reclaim_after=3600
    )  # nothing moves while it is copied
    async with open_store((tmp_path / "live").as_uri(), quiet, now=early) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, bodies("a"))
        await at_rest(store)
        # What a killed process leaves: times are in the WAL alone.
        draft = shutil.ignore_patterns("*.new")  # a restore point that is being written
        shutil.copytree(tmp_path / "live", tmp_path / "image", ignore=draft)
    async with open_store((tmp_path / "image").as_uri()) as store:
        ack = await store.append(BASIN, STREAM, bodies("b"))
        assert ack.end.seq_num == 2


async def test_tables_are_written_and_compacted_while_the_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slatedb, "_settings", small_settings)
    body = bytes(100_000)  # more than a table: each append makes one
    for now in (early, wall_clock, wall_clock):
        async with open_store(tmp_path.as_uri(), now=now) as store:
            await store.ensure_basin(BASIN)
            await store.ensure_stream(BASIN, STREAM)
            for _ in range(20):
                await store.append(BASIN, STREAM, [Record(body)])
    async with open_store(tmp_path.as_uri()) as store:
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 60


async def test_a_store_that_reopens_after_the_clock_jumped_back_takes_appends() -> None:
    location, engines = open_location("memory:"), list[FaultyEngine]()
    clock: list[Callable[[], int]] = [early]

    def now() -> int:
        return clock[0]()

    async def opener() -> FaultyEngine:
        engines.append(FaultyEngine(await SlateEngine.open(location, now=now)))
        return engines[-1]

    patient = StoreSettings(recovery_timeout=PATIENCE)
    async with open_store(location, patient, now=now, opener=opener) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, bodies("a"))
        clock[0] = wall_clock
        await store.append(BASIN, STREAM, bodies("b"))
        engines[-1].fail_next(CommitFault.BEFORE)
        with pytest.raises(OutcomeUnknownError):
            await store.append(BASIN, STREAM, bodies("lost"))
        ack = await store.append(BASIN, STREAM, bodies("c"))
        assert (ack.end.seq_num, len(engines)) == (3, 2)
        found = await timestamps(store)
        assert found == sorted(found)


async def test_records_that_arrive_while_the_clock_is_wrong_are_not_taken_for_old(
    bench: Bench, clock: Clock
) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM, StreamConfigLayer(retention=3600))
        await store.append(BASIN, STREAM, bodies("a"))
        right, clock.now = clock.now, 0  # a machine that starts in 1970
        await store.append(BASIN, STREAM, bodies("b"))
    async with bench.store() as store:
        await store.append(BASIN, STREAM, bodies("c"))
        clock.now = right + 1000
        await store.upkeep()
        assert len(await timestamps(store)) == 3
        clock.pass_seconds(3600)
        await store.upkeep()
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 3
        await store.append(BASIN, STREAM, bodies("d"))
        assert len(await timestamps(store)) == 1
