"""On a full disk, appends are rejected in advance, and operations that free space work."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamfold._native import EngineError
from streamfold.errors import InvalidError, OutcomeUnknownError, StorageFullError
from streamfold.model.records import Record, fence_record, trim_record
from streamfold.model.resources import Claim
from streamfold.store.engine.disk_space import RESERVE_BYTES, DiskSpace, DiskUsage, is_disk_full
from streamfold.store.read.requests import ReadRequest, from_seq_num
from streamfold.store.settings import StoreSettings
from streamfold.store.store import StreamStore, open_store
from streamfold.testing.engine_faults import CommitFault
from tests.store.conftest import BASIN, NO_GRACE, STREAM, Bench, bodies, submit
from tests.store.durable_streams import append_to, batches, spec
from tests.store.engine import filling_disk

EVERYTHING = ReadRequest(from_seq_num(0))
MIB = 1 << 20


class Disk:
    """A disk of which a test says how much is free."""

    def __init__(self) -> None:
        self.free = 1000 * MIB
        self.looks = 0

    def __call__(self, folder: Path) -> DiskUsage:
        self.looks += 1
        return DiskUsage(100_000 * MIB, self.free)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def store(disk: Disk, tmp_path: Path) -> AsyncIterator[StreamStore]:
    """A store with two records, on a disk that is nearly full: it is looked at for each append."""
    disk.free = 300 * MIB
    async with open_store(tmp_path.as_uri(), NO_GRACE, disk_usage=disk) as opened:
        await opened.create_basin(BASIN)
        await opened.create_stream(BASIN, STREAM)
        await opened.append(BASIN, STREAM, bodies("a", "b"))
        yield opened


async def test_appends_to_a_full_disk_are_refused_and_nothing_happened(
    store: StreamStore, disk: Disk
) -> None:
    disk.free = 255 * MIB
    for records in (bodies("c"), [Record(b"c"), trim_record(1)], [fence_record("token")]):
        with pytest.raises(StorageFullError, match=r"255\.0 MiB free, and 256\.0 MiB") as caught:
            await store.append(BASIN, STREAM, records)
        assert (caught.value.code, caught.value.definite) == ("storage_full", True)
    assert (await store.check_tail(BASIN, STREAM)).seq_num == 2


async def test_reads_trims_and_deletions_work_on_a_full_disk(
    store: StreamStore, disk: Disk
) -> None:
    await store.create_stream(BASIN, "doomed")
    disk.free = 0
    assert len((await store.read(BASIN, STREAM, EVERYTHING)).records()) == 2
    await store.append(BASIN, STREAM, [trim_record(1)])
    assert (await store.read(BASIN, STREAM, EVERYTHING)).first_seq_num == 1
    await store.delete_stream(BASIN, "doomed")
    await store.upkeep()
    assert [found.name for found in (await store.list_streams(BASIN)).items] == [STREAM]


async def test_appends_are_taken_again_as_soon_as_there_is_room(
    store: StreamStore, disk: Disk
) -> None:
    disk.free = 10 * MIB
    with pytest.raises(StorageFullError):
        await store.append(BASIN, STREAM, bodies("c"))
    disk.free = 256 * MIB
    assert (await store.append(BASIN, STREAM, bodies("c"))).end.seq_num == 3


async def test_durable_streams_and_snapshots_take_nothing_more_either(
    store: StreamStore, disk: Disk
) -> None:
    await store.stream(BASIN, "events").create(spec())
    disk.free = 0
    with pytest.raises(StorageFullError):
        await append_to(store, "events", Claim(), batches(b"c"))
    with pytest.raises(StorageFullError):
        await store.stream(BASIN, "more").create(spec())
    closed = await append_to(store, "events", Claim(close=True), batches())
    assert closed.closed
    await store.stream(BASIN, "events").delete()


async def test_a_disk_with_plenty_of_room_is_not_looked_at_for_each_append(
    disk: Disk, tmp_path: Path
) -> None:
    space = DiskSpace(tmp_path, None, disk)
    for _ in range(1000):
        space.check()
    assert disk.looks < 1000
    assert (space.free, space.reserve) == (1000 * MIB, RESERVE_BYTES)


def test_the_reserve_is_at_most_a_quarter_of_the_disk_unless_it_is_set(tmp_path: Path) -> None:
    small = DiskUsage(100 * MIB, 26 * MIB)
    assert not DiskSpace(tmp_path, None, lambda _: small).full
    assert DiskSpace(tmp_path, 30 * MIB, lambda _: small).full
    assert not DiskSpace(tmp_path, 0, lambda _: DiskUsage(100, 0)).full
    assert not DiskSpace(None, 30 * MIB, lambda _: small).full


async def test_a_commit_that_finds_no_room_is_of_unknown_outcome_and_says_why(bench: Bench) -> None:
    async with bench.store() as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        bench.engine.hold()
        under_way = asyncio.ensure_future(await submit(store, bodies("a")))
        for _ in range(5):
            await asyncio.sleep(0)
        second = asyncio.ensure_future(await submit(store, bodies("b")))
        for _ in range(5):
            await asyncio.sleep(0)
        unsent = asyncio.ensure_future(await submit(store, bodies("c")))
        bench.engine.fail_next(CommitFault.FULL)
        bench.engine.resume()
        results = await asyncio.gather(under_way, second, unsent, return_exceptions=True)
        kinds = [type(result) for result in results]
        assert kinds == [OutcomeUnknownError, OutcomeUnknownError, StorageFullError]
        assert "the disk is full" in str(results[0])
        assert (await store.append(BASIN, STREAM, bodies("d"))).end.seq_num == 1


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (EngineError("unavailable", "Unable to copy: No space left", errno.ENOSPC), True),
        (EngineError("unavailable", "Unable to open: Too many open files", errno.EMFILE), False),
        (EngineError("unavailable", "the connection was reset", None), False),
    ],
)
def test_errors_for_want_of_room_are_distinguished_from_others(
    error: Exception, full: bool
) -> None:
    assert is_disk_full(error) is full


async def test_a_write_that_the_system_refuses_fails_at_once_and_the_store_recovers(
    tmp_path: Path,
) -> None:
    """A real process whose files may not grow: the system itself answers the write with an error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", filling_disk.__name__, str(tmp_path), stdout=PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output) == {
        "refused": "outcome_unknown",
        "why": "the disk is full",
        "meanwhile": 2,
        "after": 3,
    }


def test_a_reserve_below_zero_is_refused() -> None:
    with pytest.raises(InvalidError, match="disk_reserve"):
        StoreSettings(disk_reserve=-1)
