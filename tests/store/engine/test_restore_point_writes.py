"""A restore point sends tables to the device in parts: commits need not wait for a whole one."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamfold._native import write_range
from streamfold.errors import DeviceFailedError
from streamfold.store.engine import partial_io
from streamfold.store.engine.engine import commit_rows
from streamfold.store.engine.local_disk import LocalDisk, sync_path
from streamfold.store.engine.location import open_location
from streamfold.store.engine.slatedb import SlateEngine

PART = 1 << 20
TABLE_ROWS = [(b"%d" % number, os.urandom(PART)) for number in range(3)]


class Device:
    """The real system call and the real sync, with a record of both."""

    def __init__(self) -> None:
        self.failure = 0
        #: File name to the parts that were written, and None for a sync.
        self.written: dict[str, list[tuple[int, int] | None]] = {}

    def write_range(self, handle: int, start: int, size: int) -> None:
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure))
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        self.written.setdefault(name, []).append((start, size))
        write_range(handle, start, size)

    def sync(self, path: Path) -> None:
        self.written.setdefault(path.name, []).append(None)
        sync_path(path)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(partial_io, "write_range", device.write_range)
    return device


@pytest.fixture
async def engine(tmp_path: Path, device: Device) -> AsyncIterator[SlateEngine]:
    """An engine with one table that is not on the device yet."""
    location = open_location(tmp_path.as_uri())
    assert location.folder is not None
    engine = await SlateEngine.open(location, LocalDisk(location.folder, sync=device.sync))
    await commit_rows(engine, TABLE_ROWS)
    await engine.flush()
    yield engine
    await engine.close()


def only_table(folder: Path) -> Path:
    (table,) = (folder / "db" / "compacted").iterdir()
    return table


async def test_a_restore_point_writes_all_parts_of_a_table_before_it_syncs_it(
    engine: SlateEngine, device: Device, tmp_path: Path
) -> None:
    await engine.collect()
    table = only_table(tmp_path)
    size = table.stat().st_size
    assert size > 3 * PART
    parts = [(start, PART) for start in range(0, size, PART)]
    assert device.written[table.name] == [*parts, None]


async def test_the_log_is_synced_whole_because_a_commit_waits_for_it(
    engine: SlateEngine, device: Device, tmp_path: Path
) -> None:
    logs = [path.name for path in (tmp_path / "db" / "wal").iterdir()]
    assert logs
    assert all(set(device.written[name]) == {None} for name in logs if name in device.written)


async def test_a_device_that_fails_to_write_a_part_stops_the_restore_point(
    engine: SlateEngine, device: Device
) -> None:
    device.failure = errno.EIO
    with pytest.raises(DeviceFailedError, match="Input/output error"):
        await engine.collect()


async def test_a_system_that_cannot_write_parts_syncs_tables_whole(
    engine: SlateEngine, device: Device, tmp_path: Path
) -> None:
    device.failure = errno.ENOSYS
    await engine.collect()
    assert device.written[only_table(tmp_path).name] == [None]
