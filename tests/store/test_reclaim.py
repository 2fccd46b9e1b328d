"""When space of deleted records is freed, and how much is rewritten, with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from streamfold.model.records import Record, trim_record
from streamfold.store.engine import slatedb_tables
from streamfold.store.engine.engine import Tables, commit_rows
from streamfold.store.engine.location import Location, open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.store.upkeep import reclaim
from streamfold.store.upkeep.reclaim import Reclaimer
from tests.s3 import S3Server
from tests.store.conftest import PATIENCE, incompressible
from tests.store.crash.verify import BASIN, read_all
from tests.store.small_tables import TABLE_BYTES, use_small_tables

KIB, MIB = 1 << 10, 1 << 20
#: Seconds, and bytes per second.
RECLAIM_AFTER, RATE = 100.0, 64 * KIB
SETTINGS = StoreSettings(
    upkeep_interval=3600,
    trim_grace=0,
    reclaim_after=RECLAIM_AFTER,
    reclaim_rate=RATE,
    chunk_file_bytes=1 << 40,  # these tests are about rows
)
#: Bytes of all records that stay, and of those that go: too few to be worth a rewrite soon.
LARGE, SMALL = 2 * MIB, 96 * KIB
#: Bytes of one of those records.
LARGE_BODY, SMALL_BODY = 256 * KIB, 32 * KIB
#: Dead bytes while the small records are there: SlateDB may drop rows of bookkeeping on its own.
STILL_THERE = SMALL * 9 // 10


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tables, and keep the store from reclaiming anything on its own."""

    async def run(reclaimer: Reclaimer) -> None:
        await asyncio.Event().wait()

    use_small_tables(monkeypatch.setattr)
    monkeypatch.setattr(Reclaimer, "run", run)


class Seconds:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Driven:
    """A store whose space is reclaimed when a test says so."""

    def __init__(self, store: StreamStore, reclaimer: Reclaimer, clock: Seconds) -> None:
        self.store = store
        self.reclaimer = reclaimer
        self.clock = clock
        self._refused = False
        self._merge = reclaimer.engine.merge
        reclaimer.engine.merge = self._note_refusal  # type: ignore[method-assign]

    @property
    def dead(self) -> int:
        use = self.reclaimer.use
        assert use is not None
        return use.dead

    async def fill(self, stream: str, size: int, body: int = SMALL_BODY) -> None:
        await self.store.ensure_stream(BASIN, stream)
        for number in range(size // body):
            await self.store.append(BASIN, stream, [Record(incompressible(body, number))])

    async def delete(self, stream: str) -> None:
        await self.store.delete_stream(BASIN, stream)
        await self.store.upkeep()

    async def after(self, seconds: float) -> int:
        """Dead bytes so much later; what SlateDB refuses during its own merges is repeated."""
        self.clock.now += seconds
        steps, self._refused = 0, False
        async with asyncio.timeout(PATIENCE):
            while steps < 6 or self._refused:
                steps, self._refused = steps + 1, False
                await self.reclaimer.step()
                await asyncio.sleep(0.05)
        return self.dead

    async def _note_refusal(self, runs: Sequence[int], *, young: bool) -> bool:
        merged = await self._merge(runs, young=young)
        self._refused |= not merged
        return merged


@asynccontextmanager
async def driven(location: Location | str) -> AsyncIterator[Driven]:
    async with open_store(location, SETTINGS) as store:
        await store.ensure_basin(BASIN)
        reclaimer = (await store._supervisor.mounted()).reclaimer
        reclaimer.clock = clock = Seconds()
        await reclaimer.step()
        yield Driven(store, reclaimer, clock)


async def check_small_deletion(location: Location | str) -> None:
    async with driven(location) as run:
        await run.fill("large", LARGE, LARGE_BODY)
        await run.fill("small", SMALL)
        await run.delete("small")
        assert await run.after(0) >= STILL_THERE
        assert await run.after(RECLAIM_AFTER - 1) >= STILL_THERE
        assert await run.after(1) < TABLE_BYTES
        assert len(await read_all(run.store, "large")) == LARGE // LARGE_BODY


async def test_a_small_deletion_is_dropped_reclaim_after_seconds_later_on_local_disk(
    tmp_path: Path,
) -> None:
    await check_small_deletion(tmp_path.as_uri())


async def test_a_small_deletion_is_dropped_reclaim_after_seconds_later_on_object_storage(
    s3_server: S3Server,
) -> None:
    url = f"s3://{s3_server.bucket}/reclaim"
    await check_small_deletion(open_location(url, s3_server.environment()))


async def test_the_oldest_records_leave_a_large_store_within_twice_its_size_by_the_rate(
    tmp_path: Path,
) -> None:
    async with driven(tmp_path.as_uri()) as run:
        await run.fill("small", SMALL)
        await run.fill("large", LARGE, LARGE_BODY)
        await run.delete("small")
        waited = 0.0
        assert await run.after(0) >= STILL_THERE
        while await run.after(RECLAIM_AFTER if not waited else LARGE / RATE / 8) >= TABLE_BYTES:
            waited += RECLAIM_AFTER if not waited else LARGE / RATE / 8
            assert waited <= RECLAIM_AFTER + 2 * LARGE / RATE
        assert len(await read_all(run.store, "large")) == LARGE // LARGE_BODY


async def test_after_a_rewrite_that_freed_little_the_next_waits_until_the_rate_allows_it(
    tmp_path: Path,
) -> None:
    async with driven(tmp_path.as_uri()) as run:
        await run.fill("small", SMALL)
        await run.fill("more", SMALL)
        await run.fill("large", LARGE, LARGE_BODY)
        await run.delete("small")
        run.reclaimer._reach = 1000.0  # everything at once
        await run.after(0)
        assert await run.after(RECLAIM_AFTER) < TABLE_BYTES
        paused_until = run.reclaimer._pause_until - run.clock.now
        assert paused_until >= LARGE / RATE
        await run.delete("more")
        run.reclaimer.reclaim_after = 1.0
        run.reclaimer._reach = 1000.0
        assert await run.after(paused_until - 1) >= STILL_THERE
        assert await run.after(1) < TABLE_BYTES


async def test_a_large_deletion_is_dropped_at_once_but_not_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "_PRESSING_BYTES", MIB)
    async with driven(tmp_path.as_uri()) as run:
        for stream in ("first", "second", "stays"):
            await run.fill(stream, LARGE, LARGE_BODY)
        run.reclaimer.observe_changes()
        for stream in ("first", "second"):
            await run.delete(stream)
            run.reclaimer.observe_changes()
            await run.after(0)
            assert await run.after(10) >= LARGE * 9 // 10
        assert run.dead >= 2 * LARGE * 9 // 10
        run.reclaimer.observe_changes()
        assert await run.after(2) < TABLE_BYTES
        assert len(await read_all(run.store, "stays")) == LARGE // LARGE_BODY


async def test_a_store_from_which_nothing_was_deleted_has_no_dead_bytes(tmp_path: Path) -> None:
    async with driven(tmp_path.as_uri()) as run:
        await run.store.ensure_stream(BASIN, "tiny")
        for _ in range(5):
            await asyncio.gather(
                *(run.store.append(BASIN, "tiny", [Record(b"x" * 512)]) for _ in range(50))
            )
            assert await run.after(0) == 0


async def test_bytes_that_slatedb_drops_on_its_own_are_no_longer_counted_as_dead(
    tmp_path: Path,
) -> None:
    async with driven(tmp_path.as_uri()) as run:
        await run.fill("stays", 4 * TABLE_BYTES)
        for _ in range(6):
            await run.fill("goes", 2 * TABLE_BYTES)
            tail = await run.store.check_tail(BASIN, "goes")
            await run.store.append(BASIN, "goes", [trim_record(tail.seq_num)])
            await run.store.upkeep()
        dead = await run.after(0)
        tables = await run.reclaimer.engine.tables()
        assert dead <= tables.total - 4 * TABLE_BYTES


async def test_dead_bytes_are_known_after_a_restart(tmp_path: Path) -> None:
    async with driven(tmp_path.as_uri()) as run:
        await run.fill("large", LARGE, LARGE_BODY)
        await run.fill("small", SMALL)
        await run.delete("small")
        before = await run.after(0)
    async with driven(tmp_path.as_uri()) as run:
        assert await run.after(0) == pytest.approx(before, abs=KIB)
        assert await run.after(RECLAIM_AFTER) < TABLE_BYTES


# Upstream defect 6.
async def test_a_run_that_slatedb_makes_meanwhile_does_not_hide_dead_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge covers all runs that were there when the tables were read, and not this one."""
    async with driven(tmp_path.as_uri()) as run:
        engine = run.reclaimer.engine
        await run.fill("goes", 4 * SMALL)
        await engine.flush()
        while not (await engine.tables()).runs:
            await engine.merge((), young=True)  # as SlateDB does on its own
        await run.fill("stays", SMALL)
        await run.delete("goes")
        reads = 0

        async def earlier() -> Tables:
            nonlocal reads
            reads += 1
            tables = await SlateEngine.tables(engine)  # type: ignore[arg-type]
            if reads > 1:
                return tables
            young = (*tables.young, *(made.size for made in tables.runs))
            return replace(tables, young=young, runs=())

        monkeypatch.setattr(engine, "tables", earlier)
        await run.after(RECLAIM_AFTER)
        for _ in range(10):
            await run.after(RECLAIM_AFTER)
        assert run.dead < TABLE_BYTES
        assert (await engine.tables()).total < SMALL + 2 * TABLE_BYTES
        assert len(await read_all(run.store, "stays")) == SMALL // SMALL_BODY


async def test_a_merge_that_slatedb_refused_does_not_count_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))

    async def write_tables(count: int) -> None:
        for number in range(count):
            await commit_rows(engine, [(b"%04d" % number, bytes(1000))])
            await engine.flush()

    while len((await engine.tables()).runs) < 2:
        await write_tables(4)
    monkeypatch.setattr(slatedb_tables, "_MERGE_CHECK_INTERVAL", 2.0)  # SlateDB forgets it by then
    oldest = (await engine.tables()).runs[-1].id
    # Young tables and the oldest run are not neighbours.
    refused = asyncio.create_task(engine.merge([oldest], young=True))
    await write_tables(16)
    assert not await refused
    await engine.close()


async def store_of_runs(count: int) -> tuple[SlateEngine, list[int]]:
    """A store in memory with a row in each run, and the ids of the runs, newest first."""
    engine = await SlateEngine.open(open_location("memory:"))
    for number in range(count):
        await commit_rows(engine, [(b"%04d" % number, bytes(1000))])
        await engine.flush()
        assert await engine.merge((), young=True)
    runs = [run.id for run in (await engine.tables()).runs]
    assert len(runs) == count
    return engine, runs


async def test_two_merges_into_one_run_do_not_end_the_store() -> None:
    """As after a kill: SlateDB continues the merge of the killed process beside the same new one
    (upstream defect 26).
    """
    engine, runs = await store_of_runs(3)
    async with asyncio.timeout(60):
        assert any(await asyncio.gather(*(engine.merge(runs, young=False) for _ in range(2))))
    await commit_rows(engine, [(b"after", b"")])
    assert [run.id for run in (await engine.tables()).runs] == [min(runs)]
    await engine.close()


async def test_of_merges_that_are_submitted_together_some_are_left_for_later(
    tmp_path: Path,
) -> None:
    """SlateDB refuses a merge once one with a newer name is stored (upstream defect 30)."""
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    for _ in range(5):
        for number in range(3):
            await commit_rows(engine, [(b"%d" % number, bytes(1000))])
            await engine.flush()
        runs = [run.id for run in (await engine.tables()).runs]
        async with asyncio.timeout(120):
            assert any(await asyncio.gather(*(engine.merge(runs, young=True) for _ in range(16))))
    await engine.close()


async def test_a_merge_does_not_lose_what_another_one_has_added_to_a_run() -> None:
    """In several stores, because it depends on which of the merges ends first."""
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(_add_to_a_run_that_is_being_merged())


async def _add_to_a_run_that_is_being_merged() -> None:
    engine, runs = await store_of_runs(4)
    await commit_rows(engine, [(b"young", bytes(1000))])
    await engine.flush()
    async with asyncio.timeout(60):
        adding = asyncio.create_task(engine.merge(runs[:1], young=True))
        while not adding.done():  # it may be over before one looks; storage announces nothing
            if not all(merge.ended for merge in await engine._admin.read_compactions()):
                break
        await engine.merge(runs, young=False)
        await adding
    for key in (b"0000", b"0001", b"0002", b"0003", b"young"):
        assert await engine.get(key) == bytes(1000), key
    await engine.close()
