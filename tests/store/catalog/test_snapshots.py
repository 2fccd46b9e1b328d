"""Snapshots in the store: a row publishes a blob, and blobs without a row are collected."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamfold.blob import BlobMeta, BlobStore, LocalBlobStore
from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    DataCorruptError,
    InvalidError,
    OutcomeUnknownError,
    PositionTrimmedError,
    SnapshotConflictError,
    SnapshotNotFoundError,
    StoreRecoveringError,
    StreamDeletingError,
    StreamNotFoundError,
    WriterFencedError,
)
from streamfold.model.records import Record, fence_record
from streamfold.store.catalog.snapshots import READ_PIECE, SNAPSHOTS_KEPT, Publication, Snapshot
from streamfold.store.engine.location import open_location
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.engine_faults import CommitFault
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.store.conftest import BASIN, NO_GRACE, Bench, Clock, until
from tests.store.durable_streams import append, create, fork_of, read

#: Bytes that arrive at once.
_PIECE = 1 << 16


async def pieces_of(blob: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(blob), _PIECE):
        yield blob[at : at + _PIECE]


def publication(seq_num: int, blob: bytes = b"state", **changes: Any) -> Publication:
    pieces = pieces_of(blob)
    new = Publication(seq_num, "a/b", pieces, hashlib.blake2b(), None, False, None)
    return replace(new, **changes)


async def publish(
    store: StreamStore, seq_num: int, blob: bytes = b"state", stream: str = "s"
) -> Snapshot:
    return await store.stream(BASIN, stream).snapshots.publish(publication(seq_num, blob))


async def content_of(store: StreamStore, seq_num: int, stream: str = "s") -> bytes:
    snapshot = await store.stream(BASIN, stream).snapshots.find(seq_num)
    assert snapshot is not None
    async with aclosing(store.stream(BASIN, "s").snapshots.pieces(snapshot)) as pieces:
        return b"".join([piece async for piece in pieces])


async def blobs_of(bench: Bench) -> list[str]:
    return [meta.key async for meta in bench.location.snapshots.list()]


async def prepared(store: StreamStore, records: int = 10) -> None:
    await store.create_basin(BASIN)
    await create(store, "s")
    for number in range(records):
        await append(store, "s", b"%d" % number)


async def test_a_snapshot_survives_a_restart(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        published = await publish(store, 4, b"x" * 5000)
        assert published.size == 5000
    async with bench.store() as store:
        assert await store.stream(BASIN, "s").snapshots.all() == [published]
        assert await content_of(store, 4) == b"x" * 5000


async def test_no_file_is_open_between_two_pieces_of_a_snapshot(tmp_path: Path) -> None:
    blob = bytes(range(256)) * (READ_PIECE // 128) + b"end"
    async with open_store(tmp_path.as_uri()) as store:
        await prepared(store)
        snapshot = await publish(store, 4, blob)
        found = []
        async with aclosing(store.stream(BASIN, "s").snapshots.pieces(snapshot)) as pieces:
            async for piece in pieces:
                found.append(piece)
                opened = [Path(file.path) for file in psutil.Process().open_files()]
                assert not [path for path in opened if tmp_path / "snapshots" in path.parents]
        assert list(map(len, found)) == [READ_PIECE, READ_PIECE, 3]
        assert b"".join(found) == blob


async def test_a_snapshot_whose_blob_lost_its_end_is_reported_as_corrupt(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        await prepared(store)
        snapshot = await publish(store, 4, b"state")
        (tmp_path / "snapshots" / snapshot.blob).write_bytes(b"sta")
        with pytest.raises(DataCorruptError, match="ends at byte 3 of 5"):
            await content_of(store, 4)


async def test_an_upload_that_fails_leaves_nothing(bench: Bench) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield b"half"
        raise InvalidError("the client went away")

    async with bench.store() as store:
        await prepared(store)
        with pytest.raises(InvalidError):
            await store.stream(BASIN, "s").snapshots.publish(publication(4, pieces=breaking()))
        assert await store.stream(BASIN, "s").snapshots.all() == []
        assert await blobs_of(bench) == []


@pytest.mark.parametrize("kind", [FaultKind.BEFORE, FaultKind.AFTER])
async def test_a_failing_blob_store_leaves_no_snapshot(bench: Bench, kind: FaultKind) -> None:
    plan = ScriptedFaults({Operation.PUT: [Fault(kind)]})
    whole = bench.location.snapshots
    bench.location = replace(bench.location, snapshots=FaultyBlobStore(whole, plan))
    async with bench.store() as store:
        await prepared(store)
        with pytest.raises((BlobUnavailableError, BlobOutcomeUnknownError)):
            await publish(store, 4)
        assert await store.stream(BASIN, "s").snapshots.all() == []
        await publish(store, 4)  # the way is free
        assert await content_of(store, 4) == b"state"
    async with bench.store() as store:
        await until_swept(bench, 1)
        assert await content_of(store, 4) == b"state"


async def until_swept(bench: Bench, left: int) -> None:
    """Opening sweeps in the background: wait until it has."""
    async with asyncio.timeout(60):
        while len(await blobs_of(bench)) != left:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)


async def test_a_crash_between_blob_and_row_leaves_an_orphan_that_the_next_opening_sweeps(
    bench: Bench,
) -> None:
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 2, b"two")
        bench.engine.fail_next(CommitFault.BEFORE)
        with pytest.raises(OutcomeUnknownError):
            await publish(store, 4)
        assert [s.seq_num for s in await store.stream(BASIN, "s").snapshots.all()] == [2]
        await until_swept(bench, 1)
        assert await content_of(store, 2) == b"two"
        await publish(store, 4)
        assert await content_of(store, 4) == b"state"


@pytest.mark.parametrize("fault", [CommitFault.FULL, CommitFault.BEFORE, CommitFault.AFTER])
async def test_a_snapshot_is_acknowledged_although_older_ones_cannot_be_removed(
    bench: Bench, fault: CommitFault
) -> None:
    """It is published and trims by then: an error would call what happened refused."""
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 2, b"two")
        bench.engine.fail_next(CommitFault.NONE)
        bench.engine.fail_next(fault)
        published = await store.stream(BASIN, "s").snapshots.publish(publication(4, trim=True))
        assert published.seq_num == 4
    async with bench.store() as store:
        assert [s.seq_num for s in await store.stream(BASIN, "s").snapshots.all()][-1] == 4
        assert await content_of(store, 4) == b"state"
        await publish(store, 6)
        assert [s.seq_num for s in await store.stream(BASIN, "s").snapshots.all()] == [4, 6]


@pytest.mark.parametrize("kind", [FaultKind.BEFORE, FaultKind.AFTER])
async def test_a_snapshot_is_acknowledged_although_the_blob_of_an_older_one_stays(
    bench: Bench, kind: FaultKind
) -> None:
    plan = ScriptedFaults({Operation.DELETE: [Fault(kind)]})
    whole = bench.location.snapshots
    bench.location = replace(bench.location, snapshots=FaultyBlobStore(whole, plan))
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 2, b"two")
        published = await store.stream(BASIN, "s").snapshots.publish(publication(4, trim=True))
        assert await store.stream(BASIN, "s").snapshots.all() == [published]


async def test_a_row_of_unknown_outcome_keeps_its_blob_if_it_is_there(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        bench.engine.fail_next(CommitFault.AFTER)
        with pytest.raises(OutcomeUnknownError):
            await publish(store, 4)
        assert await content_of(store, 4) == b"state"
        again = await publish(store, 4)  # a repetition finds it
        assert again.digest == (await store.stream(BASIN, "s").snapshots.all())[0].digest
    async with bench.store() as store:
        await until_swept(bench, 1)
        assert await content_of(store, 4) == b"state"


async def test_the_blob_of_a_repetition_or_refusal_is_deleted_at_once(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        published = await publish(store, 4)
        await publish(store, 4)
        assert await blobs_of(bench) == [published.blob]
        with pytest.raises(SnapshotConflictError):
            await publish(store, 4, b"other")
        assert await blobs_of(bench) == [published.blob]
        assert await content_of(store, 4) == b"state"


async def test_the_blob_of_an_upload_whose_client_goes_at_its_end_is_deleted(
    tmp_path: Path,
) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        await prepared(store)
        mounted = await store._supervisor.mounted()
        blobs, written = mounted.snapshots.blobs, asyncio.Event()
        stored = [meta async for meta in blobs.store.list()]
        put = blobs.store.put

        async def put_slowly(key: str, data: bytes | AsyncIterator[bytes]) -> None:
            await put(key, data)
            written.set()
            await asyncio.Event().wait()

        blobs.store.put = put_slowly  # type: ignore[method-assign]
        task = asyncio.create_task(publish(store, 4))
        await written.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [meta async for meta in blobs.store.list()] == stored == []


async def publishes_without_its_caller(store: StreamStore, bench: Bench, seq_num: int) -> None:
    """Publish a snapshot whose caller goes while the row is on its way, until commits are resumed."""
    bench.engine.hold()
    new = publication(seq_num, trim=True)
    task = asyncio.create_task(store.stream(BASIN, "s").snapshots.publish(new))
    while not bench.engine._order.locked():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_blob_of_a_snapshot_whose_publisher_went_is_not_collected_before_its_row(
    store: StreamStore, bench: Bench
) -> None:
    await create(store, "s", *[b"%d" % number for number in range(10)])
    mounted = await store._supervisor.mounted()
    await publishes_without_its_caller(store, bench, 6)
    await mounted.snapshots.sweep()  # as the next publisher or a trim would
    bench.engine.resume()
    async with asyncio.timeout(60):
        while await store.stream(BASIN, "s").snapshots.find(None) is None:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)
    assert await content_of(store, 6) == b"state"


async def test_a_log_stays_in_memory_until_the_snapshot_of_a_publisher_that_went_is_durable(
    bench: Bench,
) -> None:
    async with bench.store(replace(NO_GRACE, idle_streams=1)) as store:
        await prepared(store)
        await create(store, "other")
        mounted = await store._supervisor.mounted()
        async with mounted.catalog.locks.hold(BASIN, "s"):
            task = asyncio.create_task(
                store.stream(BASIN, "s").snapshots.publish(publication(6, trim=True))
            )
            async with asyncio.timeout(60):
                while not mounted.catalog.under_way:  # noqa: ASYNC110  # there is no event for it
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await read(store, "other")  # makes other logs leave memory
            await store.append(BASIN, "s", [fence_record("mine")])
        while mounted.catalog.under_way:
            await asyncio.wait(mounted.catalog.under_way)
    async with bench.store() as store:
        assert (await store.stream(BASIN, "s").status()).first == 6
        await store.append(BASIN, "s", [Record(b"more")], fencing_token="mine")


async def test_files_of_others_among_the_snapshots_are_left_alone(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        await prepared(store)
        await publish(store, 4)
    others = [tmp_path / "snapshots" / name for name in (".DS_Store", "backup/0001", "ff")]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"theirs")
    async with open_store(tmp_path.as_uri()) as store:
        await (await store._supervisor.mounted()).snapshots.sweep()
        assert await content_of(store, 4) == b"state"
    assert [path.read_bytes() for path in others] == [b"theirs"] * 3


async def test_a_sweep_of_many_streams_lists_the_blobs_once(
    store: StreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        await create(store, name, b"0", b"1")
        await publish(store, 1, stream=name)
    mounted = await store._supervisor.mounted()
    blobs, asked = mounted.snapshots.blobs, list[str]()
    listing = blobs.store.list

    def counted(prefix: str = "") -> AsyncIterator[BlobMeta]:
        asked.append(prefix)
        return listing(prefix)

    left = [f"{folder:016x}/{1:020d}-left" for folder in (1, 2, 0xFFFF)]
    for blob in left:
        await blobs.store.put(blob, b"no row names it")
    monkeypatch.setattr(blobs.store, "list", counted)
    await mounted.snapshots.sweep()
    assert asked == [""]
    assert not set(left) & {meta.key async for meta in listing()}
    for name in ("a", "b", "c"):
        assert await content_of(store, 1, stream=name) == b"state"


async def test_a_blob_without_a_row_is_kept_for_the_grace_also_when_others_are_collected(
    bench: Bench, clock: Clock
) -> None:
    """Damage may have cost it its row. What a snapshot leaves that is removed goes at once."""
    settings = replace(NO_GRACE, leftover_grace=86_400)
    async with bench.store(settings) as store:
        await prepared(store)
        old = await publish(store, 2)
        unnamed = f"{old.blob[:-1]}x"
        await bench.location.snapshots.put(unnamed, b"its row is lost")
    async with bench.store(settings) as store:
        await (await store._supervisor.mounted()).snapshots.sweep()
        new = await store.stream(BASIN, "s").snapshots.publish(publication(4, trim=True))
        assert await blobs_of(bench) == sorted([unnamed, new.blob])
        clock.pass_seconds(86_400 - 1)
        await store.upkeep()
        assert await blobs_of(bench) == sorted([unnamed, new.blob])
        clock.pass_seconds(1)
        await store.upkeep()
        assert await blobs_of(bench) == [new.blob]


async def test_a_process_that_was_replaced_collects_no_blob_of_its_successor(bench: Bench) -> None:
    async with bench.store() as first:
        await prepared(first)
        replaced = await first._supervisor.mounted()
        async with bench.store() as second:
            await publish(second, 4)
            # The sweep may have begun before, and be slow; by now, its storage may be closed.
            with pytest.raises((WriterFencedError, StoreRecoveringError)):
                await replaced.snapshots.sweep()
            assert await content_of(second, 4) == b"state"


async def test_retention_collects_snapshots_and_records(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        for seq_num in (2, 4, 6):
            await publish(store, seq_num)
        await store.stream(BASIN, "s").snapshots.retain(5, whole_appends=True)
        await store.upkeep()
        assert [s.seq_num for s in await store.stream(BASIN, "s").snapshots.all()] == [6]
        assert len(await blobs_of(bench)) == 1
        with pytest.raises(SnapshotNotFoundError):
            await content_of(store, 4)
        assert await content_of(store, 6) == b"state"
        with pytest.raises(PositionTrimmedError):
            await publish(store, 4)


async def test_a_retention_request_that_comes_during_a_deletion_does_not_undo_it(
    bench: Bench,
) -> None:
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 4)
        mounted = await store._supervisor.mounted()
        async with mounted.upkeep._turn():  # upkeep is busy with other streams
            async with mounted.catalog.locks.hold(BASIN, "s"):
                lock = mounted.catalog.locks._locks[BASIN, "s"]
                deletion = asyncio.create_task(store.stream(BASIN, "s").delete())
                await until(lambda: lock.users == 2)
                retention = asyncio.create_task(
                    store.stream(BASIN, "s").snapshots.retain(3, whole_appends=False)
                )
                await until(lambda: lock.users == 3)
            await deletion
            with pytest.raises(StreamDeletingError):
                await retention
        await store.upkeep()
        await store.create_stream(BASIN, "s")  # the name is free
        assert await blobs_of(bench) == []


async def test_deletion_collects_everything(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 2)
        await publish(store, 4)
        await store.stream(BASIN, "s").delete()
        await store.upkeep()
        assert await blobs_of(bench) == []
        rows = [key async for page in bench.engine.scan(b"\x0d", b"\x0e") for key, _ in page]
        assert rows == []


async def test_a_snapshot_that_is_being_read_stays_and_is_collected_after(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        large = bytes(20 << 20)
        await publish(store, 2, large)
        snapshot = await store.stream(BASIN, "s").snapshots.find(2)
        assert snapshot is not None
        async with aclosing(store.stream(BASIN, "s").snapshots.pieces(snapshot)) as pieces:
            got = [await anext(pieces)]
            await publish(store, 4)
            await store.stream(BASIN, "s").snapshots.retain(4, whole_appends=True)
            await store.upkeep()
            assert len(await blobs_of(bench)) == 2
            got += [piece async for piece in pieces]
        assert b"".join(got) == large
    async with bench.store():
        await until_swept(bench, 1)


async def test_a_stream_that_goes_away_during_the_upload_gets_no_snapshot(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)

        async def slow() -> AsyncIterator[bytes]:
            yield b"half"
            await store.stream(BASIN, "s").delete()
            await create(store, "s", b"another")
            yield b"whole"

        with pytest.raises(StreamNotFoundError):
            await store.stream(BASIN, "s").snapshots.publish(publication(4, pieces=slow()))
        assert await store.stream(BASIN, "s").snapshots.all() == []
    async with bench.store():
        await until_swept(bench, 0)


async def test_what_happened_during_an_upload_counts(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)

        async def slow() -> AsyncIterator[bytes]:
            yield b"half"
            await publish(store, 6)

        with pytest.raises(SnapshotConflictError):
            await store.stream(BASIN, "s").snapshots.publish(publication(4, pieces=slow()))
        assert [s.seq_num for s in await store.stream(BASIN, "s").snapshots.all()] == [6]


class PausedLists(FaultyBlobStore):
    """Pauses before a listing, so that a test can do something at that moment."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def list(self, prefix: str = "") -> AsyncIterator[BlobMeta]:
        self.reached.set()
        await self.go_on.wait()
        async for meta in super().list(prefix):
            yield meta


async def test_collection_never_takes_a_snapshot_that_is_published_meanwhile(bench: Bench) -> None:
    paused = PausedLists(bench.location.snapshots)
    bench.location = replace(bench.location, snapshots=paused)
    async with bench.store() as store:
        await prepared(store, 40)
        for seq_num in range(1, SNAPSHOTS_KEPT + 1):
            await publish(store, seq_num)
        mounted = await store._supervisor.mounted()
        paused.reached.clear()
        paused.go_on.clear()
        collecting = asyncio.create_task(mounted.snapshots.sweep())
        await paused.reached.wait()
        late = asyncio.create_task(publish(store, 30))
        found = store.stream(BASIN, "s").snapshots.all
        async with asyncio.timeout(60):
            while (await found())[-1].seq_num < 30:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
        paused.go_on.set()
        await asyncio.gather(collecting, late)
        for snapshot in await store.stream(BASIN, "s").snapshots.all():
            assert await content_of(store, snapshot.seq_num) == b"state"
        assert len(await blobs_of(bench)) == SNAPSHOTS_KEPT


async def test_snapshots_on_local_disk_are_in_a_folder_of_their_own(tmp_path: Path) -> None:
    location = open_location(tmp_path.as_uri())
    assert isinstance(location.snapshots, LocalBlobStore)
    async with open_store(location) as store:
        await prepared(store)
        await publish(store, 4, b"on disk")
    async with open_store(tmp_path.as_uri()) as store:
        assert await content_of(store, 4) == b"on disk"
    found = [path for path in (tmp_path / "snapshots").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in found] == [b"on disk"]


async def test_a_fork_has_none_of_its_source(bench: Bench) -> None:
    async with bench.store() as store:
        await prepared(store)
        await publish(store, 4)
        await create(store, "fork", fork=fork_of("s"))
        assert await store.stream(BASIN, "fork").snapshots.all() == []
