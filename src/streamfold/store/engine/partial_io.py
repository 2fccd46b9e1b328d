"""Writes and frees large files in small parts, so that commits can sync in between.

The sync of one file also writes and frees everything else that is due, because on ext4 all files
share one journal transaction. Without parts, a commit's sync would wait for whole tables.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from streamfold._native import write_range

#: Bytes of a table sent to the device at a time. A commit's sync may have to wait for them: a slow
#: device takes 10 ms for a MiB, and 0.6 s for a whole table.
_PART_BYTES = 1 << 20
#: Maximum seconds of pauses in one restore point, which must keep up with a writer at full speed.
_PAUSES_MAX = 2.0
#: Seconds below which a part was already on the device and needs no pause after it.
_UNCHANGED = 0.0002
#: Bytes freed at a time, and seconds of the pause after that. A device that discards freed blocks
#: takes 0.2 ms for a MiB, and the next sync waits for it.
_FREED_BYTES, _FREED_PAUSE = 4 << 20, 0.005


class PartialWrites:
    """Sends large files to the device in parts, each followed by an equally long pause.

    Does nothing where the system cannot write parts.
    """

    def __init__(self) -> None:
        self._pauses_left = _PAUSES_MAX

    def write(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            for start in range(0, os.fstat(handle).st_size, _PART_BYTES):
                began = time.perf_counter()
                if not _write_part(handle, start):
                    return
                self._pause(time.perf_counter() - began)
        finally:
            os.close(handle)

    def _pause(self, seconds: float) -> None:
        if _UNCHANGED < seconds < self._pauses_left:
            self._pauses_left -= seconds
            time.sleep(seconds)


def _write_part(handle: int, start: int) -> bool:
    """Write one part. Returns False if the system cannot do this. Raises if the device failed."""
    try:
        write_range(handle, start, _PART_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def delete_slowly(files: Iterable[Path]) -> None:
    """Delete files, pausing after every few MiB. Files that are already gone are ignored."""
    freed = 0
    for path in files:
        with suppress(FileNotFoundError):
            freed += path.stat().st_size
            path.unlink()
        if freed >= _FREED_BYTES:
            time.sleep(_FREED_PAUSE)
            freed = 0


def shrink(path: Path) -> None:
    """Free most of a large file that is about to be deleted, unless it has another name."""
    with suppress(FileNotFoundError):
        while (stat := path.stat()).st_nlink == 1 and stat.st_size > _FREED_BYTES:
            os.truncate(path, stat.st_size - _FREED_BYTES)
            time.sleep(_FREED_PAUSE)
