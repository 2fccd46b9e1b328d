"""A folder has one writer. A second opening is rejected and names the lock's owner."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamfold.errors import DataCorruptError, StoreInUseError, WriterFencedError
from streamfold.model.records import Record
from streamfold.store.engine.local_disk import LocalDisk
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine
from streamfold.store.read_only import open_read_only
from streamfold.store.settings import StoreSettings
from streamfold.store.store import open_store
from tests.store.conftest import BASIN, STREAM

#: Locks the file that is its argument, says so, and freezes as `kill -STOP` does.
FROZEN = """
import asyncio, os, signal, sys
from pathlib import Path
from streamfold.store.engine.process_locks import exclusive

async def main() -> None:
    async with exclusive(Path(sys.argv[1]), 1):
        print("locked", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


@pytest.mark.parametrize("fsync", [True, False])
async def test_a_store_that_is_open_is_not_opened_again_and_keeps_working(
    tmp_path: Path, fsync: bool
) -> None:
    settings = StoreSettings(fsync=fsync)
    async with open_store(tmp_path.as_uri(), settings) as first:
        await first.create_basin(BASIN)
        with pytest.raises(
            StoreInUseError, match=rf"{tmp_path} is in use by process {os.getpid()} "
        ):
            async with open_store(tmp_path.as_uri(), settings):
                pass
        await first.create_stream(BASIN, STREAM)
    async with open_store(tmp_path.as_uri(), settings) as second:
        assert [info.name for info in (await second.list_streams(BASIN)).items] == [STREAM]


async def test_who_takes_over_has_the_lock_also_when_the_other_one_ends(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    async with open_store(url, take_over=True) as second:  # there is nobody to take over from
        async with open_store(url, take_over=True) as third:
            with pytest.raises(WriterFencedError):
                await second.upkeep()
            with pytest.raises(StoreInUseError):
                async with open_store(url):
                    pass
            await third.create_basin(BASIN)
        async with open_store(url) as fourth:  # the one that was replaced holds nothing up
            await fourth.create_stream(BASIN, STREAM)
    async with open_store(url):
        pass


async def test_an_opening_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri()):
        pass
    marker = tmp_path / "db" / "restore-point"
    content = marker.read_bytes()
    marker.write_bytes(b"{}")
    with pytest.raises(DataCorruptError):
        async with open_store(tmp_path.as_uri()):
            pass
    marker.write_bytes(content)
    async with open_store(tmp_path.as_uri()):
        pass


async def test_a_store_in_use_can_be_read_past_its_writer(tmp_path: Path) -> None:
    async with open_store(tmp_path.as_uri()) as store:
        await store.create_basin(BASIN)
        await store.create_stream(BASIN, STREAM)
        await store.append(BASIN, STREAM, [Record(b"read")])
        async with open_read_only(tmp_path.as_uri()) as streams:
            assert await streams.names(BASIN) == [STREAM]
        await store.append(BASIN, STREAM, [Record(b"goes on")])


@asynccontextmanager
async def frozen_holder(lock: Path) -> AsyncIterator[int]:
    """A process that has locked the file and does not go on; its pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, str(lock), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"locked\n"
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_frozen_process_that_holds_the_restore_point_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    disk = LocalDisk(location.folder, lock_limit=1.5)
    async with frozen_holder(location.folder / "restore-point.lock") as pid:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(StoreInUseError, match=rf"by process {pid} .*kill -CONT.*kill -KILL"),
        ):
            await SlateEngine.open(location, disk)
        assert f"waiting up to 1.5 s for process {pid} " in caplog.text
    engine = await SlateEngine.open(location, disk)
    await engine.close()
