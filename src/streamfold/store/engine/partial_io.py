"""Writes and frees large files in small parts, so that commits can sync in between.

A sync of one file writes, and frees, all that is due: on ext4 every file is in one transaction of its
journal. The sync of a commit would wait for whole tables.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from streamfold._native import write_range

#: Bytes of a table that are sent to the device at a time. A commit's sync may have to wait for them: a
#: slow device takes 10 ms for a MiB, and 0.6 s for a whole table.
_PART_BYTES = 1 << 20
#: Seconds of pauses between parts, in one restore point: it must keep up with a writer at full speed.
_PAUSES_MAX = 2.0
#: Seconds below which a part was on the device already, and needs no pause after it.
_UNCHANGED = 0.0002
#: Bytes that are freed at a time, and seconds of the pause after that. A device that discards freed
#: blocks takes 0.2 ms for a MiB, and the next sync waits for it.
_FREED_BYTES, _FREED_PAUSE = 4 << 20, 0.005


class PartialWrites:
    """Sends large files to the device in parts, each followed by a pause of the same length.

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
    """Whether the system can do this; raises if the device failed."""
    try:
        write_range(handle, start, _PART_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def delete_slowly(files: Iterable[Path]) -> None:
    """Delete files, with a pause after each few MiB; files that are gone already are passed over."""
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
