"""Trimmed, expired and deleted records leave storage without further writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record, trim_record
from streamfold.store import keys, rows
from streamfold.store.engine import location, slatedb_tables
from streamfold.store.engine.disk_space import RESERVE_BYTES, DiskUsage
from streamfold.store.engine.engine import TableDamagedError, TableRun, commit_rows, first_row
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.rows import SpaceRow
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.store.upkeep.reclaim import (
    StorageUse,
    newest_runs,
    pause_after,
    similar_runs,
    wait_for,
)
from tests.folder_size import stored_bytes
from tests.s3 import S3Server, s3_client
from tests.store.conftest import STREAM, Clock, incompressible
from tests.store.crash.verify import BASIN, read_all
from tests.store.small_tables import TABLE_BYTES, use_small_tables

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Background work at the scale of small tables. Seconds.
QUICK = StoreSettings(upkeep_interval=0.2, trim_grace=0, reclaim_after=0.2)
#: None: what is dead stays.
NEVER = StoreSettings(upkeep_interval=3600, trim_grace=0, reclaim_after=3600)
BODY_BYTES = 32 * KIB
#: Bytes that a store without records may take: its rows, and files that are yet to be deleted.
EMPTY_BYTES = 2 * TABLE_BYTES
#: Seconds after which a test fails that waits for files to be deleted.
TIMEOUT = 120.0


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tables(monkeypatch.setattr)


def local_bytes(folder: Path) -> int:
    """Bytes of tables and log."""
    return stored_bytes(folder / "db" / "compacted", folder / "db" / "wal")


def s3_bytes(server: S3Server, prefix: str) -> int:
    pages = s3_client(server).get_paginator("list_objects_v2")
    return sum(
        entry["Size"]
        for name in ("compacted", "wal")
        for page in pages.paginate(Bucket=server.bucket, Prefix=f"{prefix}/db/{name}/")
        for entry in page.get("Contents", ())
    )


async def falls_below(bound: float, measure: Callable[[], int]) -> None:
    """Return once `measure` is at most `bound`; nothing says when files are deleted."""
    deadline = time.monotonic() + TIMEOUT
    while (found := _measured(measure)) > bound:
        assert time.monotonic() < deadline, f"{found} bytes stayed, more than {bound}"
        await asyncio.sleep(0.05)


def _measured(measure: Callable[[], int]) -> int:
    while True:
        try:
            return measure()
        except FileNotFoundError:
            continue  # deleted while we looked


async def fill(store: StreamStore, size: int, stream: str = STREAM) -> int:
    """Append records of `size` bytes in all; the number of records."""
    count = size // BODY_BYTES
    for number in range(count):
        await store.append(BASIN, stream, [Record(incompressible(BODY_BYTES, number))])
    return count


async def prepare(store: StreamStore, retention: int = 86_400) -> None:
    await store.ensure_basin(BASIN)
    await store.ensure_stream(BASIN, STREAM, StreamConfigLayer(retention=retention))


async def give_up(way: str, store: StreamStore, clock: Clock) -> None:
    """Have every record of the stream trimmed, expired or deleted."""
    if way == "trimmed":
        tail = await store.check_tail(BASIN, STREAM)
        await store.append(BASIN, STREAM, [trim_record(tail.seq_num)])
    elif way == "expired":
        clock.pass_seconds(3600)
    else:
        await store.delete_stream(BASIN, STREAM)


@pytest.mark.parametrize("way", ["trimmed", "expired", "deleted"])
async def test_what_cannot_be_read_any_more_leaves_the_disk_without_further_writes(
    tmp_path: Path, clock: Clock, way: str
) -> None:
    async with open_store(tmp_path.as_uri(), QUICK, now=clock) as store:
        await prepare(store, retention=600)
        await fill(store, 4 * MIB)
        assert local_bytes(tmp_path) >= 4 * MIB
        await give_up(way, store, clock)
        await falls_below(EMPTY_BYTES, lambda: local_bytes(tmp_path))


async def test_the_store_reports_what_is_live_what_is_dead_and_what_its_files_take(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path.as_uri(), QUICK) as store:

        def use() -> StorageUse:
            return store.storage_use or StorageUse(MIB, MIB, MIB)

        await prepare(store)
        await fill(store, 4 * MIB)
        await falls_below(1.2 * 4 * MIB, lambda: local_bytes(tmp_path))
        await falls_below(MIB // 2, lambda: abs(use().live - 4 * MIB))
        await falls_below(MIB, lambda: abs(use().disk - 4 * MIB))
        await falls_below(EMPTY_BYTES, lambda: use().dead)
        await store.delete_stream(BASIN, STREAM)
        await falls_below(EMPTY_BYTES, lambda: use().live)
        await falls_below(EMPTY_BYTES, lambda: use().dead)
        await falls_below(MIB, lambda: use().disk)


async def test_a_deleted_stream_leaves_object_storage_without_further_writes(
    s3_server: S3Server,
) -> None:
    location = open_location(f"s3://{s3_server.bucket}/space", s3_server.environment())
    async with open_store(location, QUICK) as store:
        await prepare(store)
        await fill(store, MIB)
        assert s3_bytes(s3_server, "space") >= MIB
        await store.delete_stream(BASIN, STREAM)
        await falls_below(EMPTY_BYTES, lambda: s3_bytes(s3_server, "space"))


async def test_many_small_commits_on_object_storage_become_a_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(location, "_REMOTE_COMMITS", 20)
    async with open_store("memory:", QUICK) as store:
        await prepare(store)
        for _ in range(20):
            await store.append(BASIN, STREAM, [Record(b"small")])
        engine = (await store._supervisor.mounted()).mount.engine
        async with asyncio.timeout(TIMEOUT):
            while not (await engine.tables()).young:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.05)


async def test_a_store_at_rest_takes_little_more_than_it_holds(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), QUICK) as store:
        await prepare(store)
        count = await fill(store, 6 * MIB)
        await falls_below(1.2 * 6 * MIB, lambda: local_bytes(tmp_path))
        assert len(await read_all(store, STREAM)) == count


async def test_trimming_half_of_a_stream_frees_half_of_its_space_and_keeps_the_rest(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path.as_uri(), QUICK) as store:
        await prepare(store)
        count = await fill(store, 6 * MIB)
        kept = await read_all(store, STREAM)
        await store.append(BASIN, STREAM, [trim_record(count // 2)])
        await falls_below(1.2 * 3 * MIB, lambda: local_bytes(tmp_path))
        left = await read_all(store, STREAM)
        assert left[:-1] == kept[count // 2 :]


async def test_a_stream_that_is_trimmed_as_fast_as_it_is_written_keeps_its_footprint(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path.as_uri(), QUICK) as store:
        await prepare(store)
        for _ in range(5):
            await fill(store, MIB)
            tail = await store.check_tail(BASIN, STREAM)
            await store.append(BASIN, STREAM, [trim_record(tail.seq_num - 8)])
            await falls_below(8 * BODY_BYTES + 3 * TABLE_BYTES, lambda: local_bytes(tmp_path))


async def test_space_comes_back_beside_a_large_stream_that_stays(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri(), QUICK) as store:
        await prepare(store)
        await store.ensure_stream(BASIN, "large")
        large = await fill(store, 4 * MIB, "large")
        for _ in range(3):
            await fill(store, 2 * MIB)
            tail = await store.check_tail(BASIN, STREAM)
            await store.append(BASIN, STREAM, [trim_record(tail.seq_num)])
            await falls_below(1.2 * 4 * MIB, lambda: local_bytes(tmp_path))
        assert len(await read_all(store, "large")) == large


async def test_a_merge_that_does_not_fit_on_the_disk_waits_for_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = 4 * GIB

    def usage(folder: Path) -> DiskUsage:
        return DiskUsage(8 * GIB, free)

    async with open_store(tmp_path.as_uri(), QUICK, disk_usage=usage) as store:
        await prepare(store)
        count = await fill(store, 4 * MIB)
        await falls_below(1.2 * 4 * MIB, lambda: local_bytes(tmp_path))
        free = RESERVE_BYTES + MIB
        await store.append(BASIN, STREAM, [trim_record(count // 2)])
        await falls_below(0, lambda: "cannot drop" not in caplog.text)
        assert local_bytes(tmp_path) >= 4 * MIB
        free = 4 * GIB
        await falls_below(1.2 * 2 * MIB, lambda: local_bytes(tmp_path))


@pytest.mark.parametrize(
    "row",
    [b"", None, rows.encode(SpaceRow(0))],
    ids=["counted", "of an earlier version", "counted too low"],
)
async def test_what_was_deleted_before_a_restart_leaves_the_disk_after_it(
    tmp_path: Path, row: bytes | None
) -> None:
    async with open_store(tmp_path.as_uri(), NEVER) as store:
        await prepare(store)
        await store.ensure_stream(BASIN, "other")
        await fill(store, 2 * MIB)
        kept = await fill(store, 2 * MIB, "other")
        await store.delete_stream(BASIN, STREAM)
        await store.upkeep()
        assert local_bytes(tmp_path) >= 4 * MIB
    if row != b"":
        engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
        await commit_rows(engine, [(keys.SPACE, row)])
        await engine.close()
    async with open_store(tmp_path.as_uri(), QUICK) as store:
        await falls_below(1.2 * 2 * MIB, lambda: local_bytes(tmp_path))
        assert len(await read_all(store, "other")) == kept


@pytest.mark.parametrize("descending", [False, True])
async def test_a_scan_outlives_the_tables_that_it_began_with(
    tmp_path: Path, descending: bool
) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    written = [(b"%04d" % number, bytes(BODY_BYTES)) for number in range(400)]
    for first in range(0, 400, 20):
        await commit_rows(engine, written[first : first + 20])
    await engine.flush()
    before = {path.name for path in (tmp_path / "db" / "compacted").iterdir()}
    found = []
    async with aclosing(engine.scan(b"0", b"9", first=1, descending=descending)) as pages:
        async for page in pages:
            found += page
            if len(found) == 1:
                await replace_tables(engine, tmp_path, before)
    assert found == (written[::-1] if descending else written)
    await engine.close()


async def test_manifests_are_deleted_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slatedb_tables, "_LOCAL_MANIFEST_MIN_AGE_MS", 0)
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    for _ in range(3):
        for number in range(10):
            await commit_rows(engine, [(b"%04d" % number, bytes(1000))])
            await engine.flush()
        await engine.collect()
        # The newest, what checkpoints name, and what was written meanwhile.
        assert len(list((tmp_path / "db" / "manifest").iterdir())) < 10
    await engine.close()


async def replace_tables(engine: SlateEngine, folder: Path, names: set[str]) -> None:
    """Merge all tables into one run, and return once those of these names are deleted."""
    deadline = time.monotonic() + TIMEOUT
    while names & {path.name for path in (folder / "db" / "compacted").iterdir()}:
        assert time.monotonic() < deadline, "replaced tables were not deleted"
        tables = await engine.tables()
        await engine.merge([run.id for run in tables.runs], young=True)
        await engine.flush()
        await engine.collect()
        await asyncio.sleep(0.05)


async def test_a_row_that_cannot_be_read_ends_a_scan(tmp_path: Path) -> None:
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    await commit_rows(engine, [(b"%04d" % number, bytes(BODY_BYTES)) for number in range(100)])
    await engine.close()
    for path in (tmp_path / "db" / "compacted").iterdir():
        path.unlink()
    engine = await SlateEngine.open(open_location(tmp_path.as_uri()))
    with pytest.raises(TableDamagedError, match=r"db/compacted/.*backup"):
        await first_row(engine, b"0", b"9")
    await engine.close(flush=False)


def runs(*sizes: int) -> tuple[TableRun, ...]:
    """Runs of these sizes, the newest first."""
    return tuple(TableRun(len(sizes) - index, size) for index, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "merged"),
    [
        ((), None),
        ((256 * MIB,) * 3, None),
        ((100 * MIB,) * 4, None),
        ((100 * MIB,) * 8, (8, 7, 6, 5)),
        ((30 * MIB,) * 4, (4, 3, 2, 1)),
        ((100 * MIB, 100 * MIB, 100 * MIB, 100 * MIB, 8 * GIB), (5, 4, 3, 2)),
        ((MIB, 30 * MIB, 30 * MIB, 30 * MIB, 30 * MIB), (4, 3, 2, 1)),
        ((GIB, GIB, GIB, GIB), None),
        ((GIB, GIB, GIB, GIB, 4 * GIB), (5, 4, 3, 2)),
        ((10 * MIB,) * 12, (12, 11, 10, 9, 8, 7, 6, 5)),
    ],
)
def test_runs_of_similar_size_are_merged_unless_they_are_most_of_the_store(
    sizes: tuple[int, ...], merged: tuple[int, ...] | None
) -> None:
    assert similar_runs(runs(*sizes)) == merged


def test_a_store_that_only_grows_has_few_runs_and_is_rewritten_few_times() -> None:
    found: tuple[TableRun, ...] = ()
    written = rewritten = 0
    for number in range(1, 2000):
        found = (TableRun(number, 128 * MIB), *found)
        written += 128 * MIB
        while (merge := similar_runs(found)) is not None:
            size = sum(run.size for run in found if run.id in merge)
            assert size <= max(written // 2, 128 * MIB)
            rewritten += size
            oldest = TableRun(min(merge), size)
            found = tuple(
                oldest if run.id == oldest.id else run
                for run in found
                if run.id not in merge or run.id == oldest.id
            )
        assert len(found) <= 24
    assert rewritten <= 6 * written


def test_the_newest_runs_that_have_so_many_bytes_are_reclaimed_first() -> None:
    found = runs(10, 20, 30)
    assert newest_runs(found, 5) == found[:1]
    assert newest_runs(found, 30) == found[:2]
    assert newest_runs(found, 1000) == found
    assert newest_runs((), 10) == ()


def test_few_dead_bytes_wait_longer_in_proportion_but_reclaim_after_at_most() -> None:
    assert wait_for(100 * MIB, 0, 600) == 30
    assert wait_for(GIB, 5 * GIB, 600) == 30
    assert wait_for(GIB, 50 * GIB, 600) == 300
    assert wait_for(MIB, 1000 * GIB, 600) == 600
    assert wait_for(GIB, 5 * GIB, 10) == 10
    assert wait_for(KIB, GIB, 600) == float("inf")


def test_dead_bytes_that_are_half_of_the_live_ones_are_dropped_at_once() -> None:
    assert wait_for(512 * MIB, GIB, 600) == 2
    assert wait_for(300 * MIB, 0, 600) == 2
    assert wait_for(511 * MIB, GIB, 600) == 30


def test_a_rewrite_that_frees_little_is_followed_by_a_pause_that_keeps_to_the_rate() -> None:
    assert pause_after(32 * GIB, 8 * GIB, seconds=100, rate=32 * MIB) == 100
    assert pause_after(32 * GIB, GIB, seconds=100, rate=32 * MIB) == 924
    assert pause_after(MIB, 0, seconds=3, rate=32 * MIB) == 3
