"""Snapshots that are uploaded at the same time leave the disk's reserve to records."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamfold.blob.local_store import WRITE_BUFFER, LocalBlobStore
from streamfold.errors import InvalidError, StorageFullError
from streamfold.store.catalog.snapshots import Publication, Snapshot
from streamfold.store.engine.disk_space import DiskUsage
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from tests.folder_size import stored_bytes
from tests.store.conftest import BASIN, Bench, bodies
from tests.store.durable_streams import create

RESERVE = 8 << 20
#: Bytes that may be written without touching the reserve.
ROOM = 10 << 20
SIZE = 4 << 20
PIECE = 1 << 16
STREAMS = ("a", "b", "c", "d")


class SmallDisk:
    """A disk that holds snapshots alone: its free space follows from the files that are there."""

    def __init__(self, folder: Path) -> None:
        self.snapshots = folder / "snapshots"

    def __call__(self, folder: Path) -> DiskUsage:
        return DiskUsage(100 * ROOM, self.free)

    @property
    def free(self) -> int:
        return RESERVE + ROOM - stored_bytes(self.snapshots)


@pytest.fixture
def disk(tmp_path: Path) -> SmallDisk:
    return SmallDisk(tmp_path)


@pytest.fixture
async def store(disk: SmallDisk, tmp_path: Path) -> AsyncIterator[StreamStore]:
    settings = StoreSettings(disk_reserve=RESERVE)
    async with open_store(tmp_path.as_uri(), settings, disk_usage=disk) as opened:
        await opened.create_basin(BASIN)
        for name in STREAMS:
            await create(opened, name)
        yield opened


class Upload:
    """A body whose client sends `before` bytes, and the rest when it is let."""

    def __init__(self, size: int, before: int = PIECE) -> None:
        self.size = size
        self.go_on = asyncio.Event()
        self.paused = asyncio.Event()
        self._before = before

    async def pieces(self) -> AsyncIterator[bytes]:
        for at in range(0, self.size, PIECE):
            if at >= self._before and not self.paused.is_set():
                self.paused.set()
                await self.go_on.wait()
            yield bytes(min(PIECE, self.size - at))


def publish(
    store: StreamStore, stream: str, upload: Upload, *, declared: bool
) -> asyncio.Task[Snapshot]:
    size = upload.size if declared else None
    new = Publication(0, "a/b", upload.pieces(), hashlib.blake2b(), None, False, None, size=size)
    return asyncio.create_task(store.stream(BASIN, stream).snapshots.publish(new))


async def outcomes(*tasks: asyncio.Task[Snapshot]) -> list[bool]:
    """Whether each upload was stored; those that were not must have been refused for want of room."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    refusals = [one for one in found if isinstance(one, BaseException)]
    assert all(isinstance(one, StorageFullError) for one in refusals), refusals
    return [isinstance(one, Snapshot) for one in found]


def files(disk: SmallDisk) -> int:
    return len([path for path in disk.snapshots.rglob("*") if path.is_file()])


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_uploads_at_the_same_time_leave_the_reserve_free(
    store: StreamStore, disk: SmallDisk, declared: bool
) -> None:
    uploads = [Upload(SIZE) for _ in STREAMS]
    tasks = [
        publish(store, name, upload, declared=declared)
        for name, upload in zip(STREAMS, uploads, strict=True)
    ]
    for task, upload in zip(tasks, uploads, strict=True):
        paused = asyncio.create_task(upload.paused.wait())
        await asyncio.wait({task, paused}, return_when=asyncio.FIRST_COMPLETED)
        paused.cancel()
    for upload in uploads:
        upload.go_on.set()
    stored = await outcomes(*tasks)
    assert disk.free >= RESERVE
    assert files(disk) == sum(stored)
    if declared:
        assert sum(stored) == 2  # whichever came first
    assert store.space.claimed == 0
    await store.append(BASIN, "a", bodies("there is room for records"))


async def test_a_refused_upload_leaves_its_room_to_the_next(
    store: StreamStore, disk: SmallDisk
) -> None:
    assert await outcomes(publish(store, "a", _whole(ROOM + 1), declared=False)) == [False]
    assert files(disk) == 0
    assert await outcomes(publish(store, "a", _whole(ROOM), declared=True)) == [True]


async def test_what_an_upload_has_written_is_not_counted_twice(store: StreamStore) -> None:
    large = Upload(ROOM - SIZE, before=ROOM - SIZE - PIECE)
    first = publish(store, "a", large, declared=True)
    await large.paused.wait()
    assert store.space.claimed <= WRITE_BUFFER + 2 * PIECE
    beside = publish(store, "b", _whole(SIZE - 2 * WRITE_BUFFER), declared=True)
    assert await outcomes(beside) == [True]
    large.go_on.set()
    assert await outcomes(first) == [True]


async def test_an_upload_that_breaks_off_claims_nothing_any_more(store: StreamStore) -> None:
    async def breaking() -> AsyncIterator[bytes]:
        yield b"half"
        raise InvalidError("the client went away")

    new = Publication(0, "a/b", breaking(), hashlib.blake2b(), None, False, None, size=ROOM)
    with pytest.raises(InvalidError):
        await store.stream(BASIN, "a").snapshots.publish(new)
    assert store.space.claimed == 0


async def test_a_disk_that_fills_while_an_upload_is_written_is_reported_as_full(
    bench: Bench, tmp_path: Path
) -> None:
    full = asyncio.Event()

    def sync(descriptor: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)

    bench.location = replace(bench.location, snapshots=LocalBlobStore(tmp_path, fsync=sync))
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await create(store, "a")
        full.set()
        assert await outcomes(publish(store, "a", _whole(PIECE), declared=True)) == [False]
        full.clear()
        assert await outcomes(publish(store, "a", _whole(PIECE), declared=True)) == [True]


def _whole(size: int) -> Upload:
    upload = Upload(size)
    upload.go_on.set()
    return upload
