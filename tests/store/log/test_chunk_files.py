"""Large chunks are files: durable before the commit that names them, and gone with their records."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from streamfold.blob import BlobMeta, BlobStore, LocalBlobStore, open_blob_store
from streamfold.errors import (
    DeviceFailedError,
    StorageError,
    StreamfoldError,
)
from streamfold.model.records import Record, trim_record
from streamfold.store import keys
from streamfold.store.engine.engine import Engine, Op, WriteBatch, commit_rows
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.leftovers import Leftovers
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import ChunkFiles, FileName
from streamfold.store.store import open_store
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.engine_faults import CommitFault, FaultyEngine
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.store.conftest import BASIN, EPOCH, STREAM, Bench, Clock
from tests.store.log.large_records import LARGE, LIMITS, SETTINGS, bodies, names, prepare

#: Seconds.
DAY = 86_400


async def test_large_appends_are_files_and_small_ones_are_rows(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(b"small")])
        assert await names(bench) == []
        await store.append(BASIN, STREAM, [Record(LARGE), Record(LARGE)])
        await store.append(BASIN, STREAM, [Record(b"small, too")])
        assert len(await names(bench)) == 1
        expected = [b"small", LARGE, LARGE, b"small, too"]
        assert await bodies(store) == expected
    async with bench.store(SETTINGS) as store:
        assert await bodies(store) == expected
        assert await bodies(store, start=2) == expected[2:]
        assert (await store.check_tail(BASIN, STREAM)).seq_num == 4


async def test_one_file_holds_all_chunks_of_a_stream_in_a_commit(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        bench.engine.hold()
        batches = [[Record(b"%d" % number)] * 1000 for number in range(8)]
        appends = [asyncio.create_task(store.append(BASIN, STREAM, batch)) for batch in batches]
        await asyncio.sleep(0)  # all of them are accepted in this turn
        bench.engine.resume()
        await asyncio.gather(*appends)
        assert len(await names(bench)) < len(batches)
        assert await bodies(store) == [record.body for batch in batches for record in batch]


async def test_a_trim_deletes_the_files_whose_records_are_all_trimmed(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for _ in range(3):
            await store.append(BASIN, STREAM, [Record(LARGE), Record(LARGE)])
        before = await names(bench)
        await store.append(BASIN, STREAM, [trim_record(3)])
        await store.upkeep()
        assert await names(bench) == before[1:]
        assert (await bodies(store))[:3] == [LARGE] * 3


async def test_a_deleted_stream_leaves_no_files(bench: Bench) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.delete_stream(BASIN, STREAM)
        for _ in range(3):
            await store.upkeep()
        assert await names(bench) == []


async def test_files_stay_until_the_deletion_of_their_stream_is_synced(bench: Bench) -> None:
    """Reads show a commit a little earlier: a power cut could still undo the deletion."""
    engines: list[UnsyncedEngine] = []
    blobs = DeletesNoted(open_blob_store("memory:"))
    bench.location = replace(bench.location, chunks=blobs)

    async def open_engine() -> UnsyncedEngine:
        engines.append(UnsyncedEngine(await SlateEngine.open(bench.location), blobs.next_step))
        return engines[-1]

    async with open_store(bench.location, SETTINGS, opener=open_engine) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.upkeep()
        engine = engines[-1]
        engine.synced.clear()
        deletion = asyncio.create_task(store.delete_stream(BASIN, STREAM))
        blobs.next_step.clear()
        await engine.visible.wait()
        upkeep = asyncio.create_task(store.upkeep())
        await blobs.next_step.wait()  # upkeep deletes the file, or waits for the commit
        too_early = list(blobs.deleted)
        engine.synced.set()
        await asyncio.gather(deletion, upkeep)
        assert not too_early
        await store.upkeep()
        assert len(blobs.deleted) == 1


class UnsyncedEngine(FaultyEngine):
    """While `synced` is not set, reads find what was committed, but commits do not return."""

    def __init__(self, inner: Engine, on_empty: asyncio.Event) -> None:
        super().__init__(inner)
        self.synced, self.visible = asyncio.Event(), asyncio.Event()
        self.synced.set()
        #: Set by a commit without rows, which only waits for those before it.
        self._on_empty = on_empty

    async def commit(self, batch: WriteBatch) -> None:
        await super().commit(batch)
        if not batch.ops:
            self._on_empty.set()
        elif not self.synced.is_set():
            self.visible.set()
            await self.synced.wait()


class DeletesNoted(FaultyBlobStore):
    """Knows which blobs were deleted."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.deleted: list[str] = []
        self.next_step = asyncio.Event()

    async def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.next_step.set()
        await super().delete(key)


@pytest.mark.parametrize("fault", [CommitFault.BEFORE, CommitFault.AFTER])
async def test_the_next_opening_deletes_the_file_of_a_commit_that_failed_and_no_other(
    bench: Bench, fault: CommitFault
) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        bench.engine.fail_next(fault, with_records=True)
        with pytest.raises(StreamfoldError):
            await store.append(BASIN, STREAM, [Record(LARGE + b"2")])
        await store.append(BASIN, STREAM, [Record(LARGE + b"3")])
        await store.upkeep()
        found = await bodies(store)
    second = [] if fault is CommitFault.BEFORE else [LARGE + b"2"]
    stored = [LARGE, *second, LARGE + b"3"]
    assert found == stored
    async with bench.store(SETTINGS) as store:
        await store.upkeep()
        assert len(await names(bench)) == len(stored)
        assert await bodies(store) == stored


async def test_a_file_of_a_former_writer_that_arrives_late_is_deleted_by_the_next_opening(
    bench: Bench,
) -> None:
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        (stored,) = await names(bench)
        first = FileName.parse(stored)
        assert first is not None
    late = str(first._replace(number=first.number + 1, last_seq_num=1))
    async with bench.store(SETTINGS) as store:
        await store.append(BASIN, STREAM, [Record(LARGE + b"2")])
        await store.upkeep()
        await store.upkeep()  # the first may have come before the sweep was over
        kept = await names(bench)
        assert bench.location.chunks is not None
        await bench.location.chunks.put(late, LARGE)  # after the sweep
    async with bench.store(SETTINGS) as store, asyncio.timeout(60):
        while await names(bench) != kept:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)
        assert await bodies(store) == [LARGE, LARGE + b"2"]


async def swept(blobs: BlobStore, engine: Engine) -> ChunkFiles:
    """The files after a sweep of what epochs before the third left."""
    files = ChunkFiles(blobs, 3, LIMITS)
    await files.sweep(engine, leftovers(engine, grace=0))
    return files


def leftovers(engine: Engine, grace: float, now: Callable[[], int] = lambda: EPOCH) -> Leftovers:
    return Leftovers("chunk", engine, partial(commit_rows, engine), grace, now)


async def test_a_sweep_counts_the_files_that_it_leaves(bench: Bench) -> None:
    blobs = open_blob_store("memory:")
    engine = await bench._open_engine()
    row = chunks.StoredChunk(7, bytes((1, *bytes(39))), LARGE)
    file, (value,) = ChunkFiles(blobs, 1, LIMITS).lay_out(5, [row])
    await blobs.put(file.name, file.data)
    await commit_rows(engine, [(keys.chunk(5, 7), value)])
    await blobs.put(str(FileName(1, 1, 5, 9)), b"of a commit that failed")
    await blobs.put(str(FileName(2, 0, 6, 0)), b"another")
    assert (await swept(blobs, engine)).size == len(file.data)
    assert [meta.key async for meta in blobs.list()] == [file.name]
    await engine.close()


async def test_a_file_without_a_row_is_kept_for_the_grace_from_when_that_was_found(
    bench: Bench, clock: Clock
) -> None:
    """However old the file is: until now its row may have been there, and can be restored."""
    blobs, name = open_blob_store("memory:"), str(FileName(1, 0, 5, 7))
    await blobs.put(name, LARGE)
    engine = await bench._open_engine()
    for day in range(7):  # each time by a server that has just been started
        files, noted = ChunkFiles(blobs, 3 + day, LIMITS), leftovers(engine, 7 * DAY, clock)
        await files.sweep(engine, noted)
        assert await blobs.get(name) == LARGE
        assert (files.size, files.leftover_size) == (len(LARGE), len(LARGE))
        assert noted.due_at == EPOCH + 7 * DAY * 1000
        clock.pass_seconds(DAY)
    await files.sweep(engine, noted)  # by the same server
    assert [meta.key async for meta in blobs.list()] == []
    assert (files.size, files.leftover_size) == (0, 0)
    await engine.close()


async def test_a_file_whose_row_is_restored_within_the_grace_is_kept_for_good(
    bench: Bench, clock: Clock
) -> None:
    blobs = open_blob_store("memory:")
    row = chunks.StoredChunk(7, bytes((1, *bytes(39))), LARGE)
    file, (value,) = ChunkFiles(blobs, 1, LIMITS).lay_out(5, [row])
    await blobs.put(file.name, file.data)
    engine = await bench._open_engine()
    files, noted = ChunkFiles(blobs, 3, LIMITS), leftovers(engine, DAY, clock)
    await files.sweep(engine, noted)
    await commit_rows(engine, [(keys.chunk(5, 7), value)])
    clock.pass_seconds(2 * DAY)
    await files.sweep(engine, noted)
    assert await blobs.get(file.name) == file.data
    assert files.leftover_size == 0
    await commit_rows(engine, [(keys.chunk(5, 7), None)])
    await files.sweep(engine, noted)  # the grace begins again
    assert await blobs.get(file.name) == file.data
    await engine.close()


async def test_a_running_store_deletes_leftover_files_when_their_grace_is_over(
    bench: Bench, clock: Clock
) -> None:
    settings = replace(SETTINGS, leftover_grace=DAY)
    async with bench.store(settings) as store:
        await prepare(store)
        bench.engine.fail_next(CommitFault.BEFORE, with_records=True)
        with pytest.raises(StreamfoldError):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.append(BASIN, STREAM, [Record(LARGE + b"2")])
        mounted = await store._supervisor.mounted()
        async with asyncio.timeout(60):
            while not mounted.mount.files.leftover_size:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
        clock.pass_seconds(DAY - 1)
        await store.upkeep()
        assert len(await names(bench)) == 2
        clock.pass_seconds(1)
        await store.upkeep()
        assert len(await names(bench)) == 1
        assert await bodies(store) == [LARGE + b"2"]


async def test_a_sweep_leaves_a_file_whose_row_cannot_be_read(bench: Bench) -> None:
    blobs, name = open_blob_store("memory:"), str(FileName(1, 0, 5, 7))
    await blobs.put(name, LARGE)
    engine = await bench._open_engine()
    await commit_rows(engine, [(keys.chunk(5, 7), b"damaged")])
    await swept(blobs, engine)
    assert await blobs.get(name) == LARGE
    await engine.close()


async def test_a_sweep_of_many_files_gives_way_to_others(bench: Bench) -> None:
    blobs = open_blob_store("memory:")
    for number in range(3000):
        await blobs.put(str(FileName(1, number, 5, number)), b"")
    metas = [meta async for meta in blobs.list()]
    engine = await bench._open_engine()
    await commit_rows(engine, [(keys.chunk(5, 2999), b"damaged")])
    sweeping = asyncio.create_task(swept(Listed(blobs, metas), engine))
    turns = 0
    while not sweeping.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > len(metas) // 300
    await engine.close()


class Listed(FaultyBlobStore):
    """Has a listing in memory, and yields it without waiting for anything."""

    def __init__(self, inner: BlobStore, metas: list[BlobMeta]) -> None:
        super().__init__(inner, ScriptedFaults())
        self._metas = metas

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        for meta in self._metas:
            yield meta


async def test_a_commit_without_files_does_not_overtake_one_with_a_file(bench: Bench) -> None:
    """Otherwise a crash could leave later records without earlier ones."""
    blobs = HeldBlobs(open_blob_store("memory:"))
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        blobs.open.clear()
        large = asyncio.create_task(store.append(BASIN, STREAM, [Record(LARGE)]))
        await blobs.reached.wait()
        commits = len(bench.engine.commits)
        small = asyncio.create_task(store.append(BASIN, STREAM, [Record(b"small")]))
        other = asyncio.create_task(store.create_stream(BASIN, "other"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(bench.engine.commits) == commits
        assert not any(task.done() for task in (large, small, other))
        blobs.open.set()
        acks = await asyncio.gather(large, small)
        await other
        assert [ack.end.seq_num for ack in acks] == [1, 2]


async def test_a_commit_does_not_overtake_one_that_cannot_be_built(bench: Bench) -> None:
    """Otherwise its records would be stored without those before them."""
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(b"first")])
        engine = bench.engine
        building, may_fail = threading.Event(), threading.Event()
        prepare_rows = engine.prepare

        def fail_once(ops: list[Op]) -> WriteBatch:
            if building.is_set():
                return prepare_rows(ops)
            building.set()
            may_fail.wait()
            raise StorageError("injected: the rows cannot be prepared")

        reached: list[WriteBatch] = []
        commit_batch = engine.commit

        async def commit(batch: WriteBatch) -> None:
            reached.append(batch)
            await commit_batch(batch)

        engine.prepare, engine.commit = fail_once, commit  # type: ignore[method-assign]
        # Large enough to be built in a thread, but not to keep the next commit from starting.
        body = random.Random(0).randbytes(200 << 10)
        lost = asyncio.create_task(store.append(BASIN, STREAM, [Record(body)]))
        await asyncio.to_thread(building.wait)
        after = asyncio.create_task(store.append(BASIN, STREAM, [Record(b"after")]))
        for _ in range(10):
            await asyncio.sleep(0)  # its commit waits for the one that is built
        may_fail.set()
        outcomes = await asyncio.gather(lost, after, return_exceptions=True)
        assert all(isinstance(outcome, StreamfoldError) for outcome in outcomes)
        assert not reached
    async with bench.store(SETTINGS) as store:
        assert await bodies(store) == [b"first"]


class HeldBlobs(FaultyBlobStore):
    """Holds uploads back while `open` is not set."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.open, self.reached = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def put(self, key: str, data: bytes | AsyncIterator[bytes]) -> None:
        self.reached.set()
        await self.open.wait()
        await super().put(key, data)


async def test_an_append_whose_file_cannot_be_written_fails_and_the_store_continues(
    bench: Bench,
) -> None:
    faults = ScriptedFaults({Operation.PUT: [Fault(FaultKind.BEFORE)]})
    blobs = FaultyBlobStore(open_blob_store("memory:"), faults)
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        with pytest.raises(StreamfoldError):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.append(BASIN, STREAM, [Record(LARGE + b"again")])
        assert await bodies(store) == [LARGE + b"again"]


async def test_files_on_object_storage_are_deleted_at_the_same_time(bench: Bench) -> None:
    """One after the other, a large stream would keep upkeep from all others for an hour."""
    blobs = DeletesTogether(open_blob_store("memory:"), 8)
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        for _ in range(24):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        await store.delete_stream(BASIN, STREAM)
        for _ in range(3):
            await store.upkeep()
        assert await names(bench) == []
        assert blobs.together.is_set()


class DeletesTogether(FaultyBlobStore):
    """Sets `together` once as many deletions as `wanted` run at the same time."""

    def __init__(self, inner: BlobStore, wanted: int) -> None:
        super().__init__(inner, ScriptedFaults())
        self.together = asyncio.Event()
        self._wanted, self._running = wanted, 0

    async def delete(self, key: str) -> None:
        self._running += 1
        if self._running >= self._wanted:
            self.together.set()
        await asyncio.sleep(0)
        await super().delete(key)
        self._running -= 1


@pytest.mark.parametrize("kind", [FaultKind.BEFORE, FaultKind.AFTER])
async def test_a_file_that_cannot_be_deleted_is_tried_again_and_other_streams_do_not_wait(
    bench: Bench, kind: FaultKind
) -> None:
    faults = ScriptedFaults({Operation.DELETE: [Fault(kind)]})
    blobs = FaultyBlobStore(open_blob_store("memory:"), faults)
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.create_stream(BASIN, "other")
        for stream in (STREAM, "other"):
            await store.append(BASIN, stream, [Record(LARGE)])
        for stream in (STREAM, "other"):
            await store.append(BASIN, stream, [trim_record(1)])
        await store.upkeep()
        await store.upkeep()
        assert await names(bench) == []
        assert len(bench.engines) == 1, "the store was not closed and opened again"


async def test_a_store_whose_files_cannot_be_listed_still_takes_appends(bench: Bench) -> None:
    faults = ScriptedFaults({Operation.LIST: [Fault(FaultKind.BEFORE)] * 100})
    blobs = FaultyBlobStore(open_blob_store("memory:"), faults)
    bench.location = replace(bench.location, chunks=blobs)
    async with bench.store(SETTINGS) as store:
        await prepare(store)
        await store.upkeep()
        await store.append(BASIN, STREAM, [Record(LARGE)])
        assert await bodies(store) == [LARGE]
        assert len(bench.engines) == 1, "the store was not closed and opened again"


async def test_a_full_disk_refuses_the_append_that_needs_a_file(tmp_path: Path) -> None:
    full = False

    def sync(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    chunk_files = LocalBlobStore(tmp_path / "chunks", fsync=sync)
    location = replace(open_location(tmp_path.as_uri()), chunks=chunk_files)
    async with open_store(location, SETTINGS) as store:
        await prepare(store)
        full = True
        with pytest.raises(StreamfoldError, match="disk is full"):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        full = False
        await store.append(BASIN, STREAM, [Record(LARGE)])
        assert await bodies(store) == [LARGE]


async def test_a_device_that_fails_to_write_a_file_stops_the_store(tmp_path: Path) -> None:
    failing = False

    def sync(descriptor: int) -> None:
        if failing:
            raise OSError(errno.EIO, "Input/output error")

    chunk_files = LocalBlobStore(tmp_path / "chunks", fsync=sync)
    location = replace(open_location(tmp_path.as_uri()), chunks=chunk_files)
    async with open_store(location, SETTINGS) as store:
        await prepare(store)
        failing = True
        with pytest.raises(DeviceFailedError):
            await store.append(BASIN, STREAM, [Record(LARGE)])
        assert isinstance(await store.stopped(), DeviceFailedError)


async def test_a_device_that_fails_to_delete_a_file_stops_the_store(tmp_path: Path) -> None:
    failing = False

    def sync(descriptor: int) -> None:
        if failing:
            raise OSError(errno.EIO, "Input/output error")

    chunk_files = LocalBlobStore(tmp_path / "chunks", fsync=sync)
    location = replace(open_location(tmp_path.as_uri()), chunks=chunk_files)
    async with open_store(location, SETTINGS) as store:
        await prepare(store)
        await store.append(BASIN, STREAM, [Record(LARGE)])
        failing = True
        await store.append(BASIN, STREAM, [trim_record(1)])
        assert isinstance(await store.stopped(), DeviceFailedError)


@pytest.mark.parametrize(
    "name", ["", "x", "00/1-2-3", "../0000-1", f"{'0' * 8}/{'0' * 8}/00g-{'0' * 16}-{'0' * 16}"]
)
def test_other_files_are_not_taken_for_chunk_files(name: str) -> None:
    assert FileName.parse(name) is None


def test_a_name_says_what_it_was_made_of() -> None:
    name = FileName(7, 0x12ABC, 2**40 + 0x3F, 2**63)
    assert str(name).startswith("00000007/00000012/abc-")
    assert FileName.parse(str(name)) == name
