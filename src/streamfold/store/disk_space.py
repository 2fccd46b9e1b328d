"""Keeps some local disk free, so that a full disk refuses appends before they are written.

An append that meets a full disk halfway is of unknown outcome. One that is refused beforehand certainly
did not happen, and what is kept free is there for the ways out: trims, deletions, and the tables that
SlateDB writes from what is acknowledged already.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from streamfold.errors import StorageFullError

logger = logging.getLogger(__name__)

#: Bytes kept free: SlateDB holds up to 128 MiB that it has yet to write as tables, commits up to 64 MiB
#: are under way, and a compaction writes 64 MiB at a time.
RESERVE_BYTES = 256 << 20
#: But at most one part in so many of a small file system, unless a setting says otherwise.
_RESERVE_PART = 4
#: Seconds between looks while more than twice the reserve is free: far more than is written meanwhile.
_LOOK_INTERVAL = 0.1

#: What the system says when there is no room, no quota, or a limit on files is reached.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")


class DiskUsage(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


#: Tells the usage of the file system that a folder is on.
UsageReader: TypeAlias = Callable[[Path], DiskUsage]


def read_usage(folder: Path) -> DiskUsage:
    usage = shutil.disk_usage(folder)
    return DiskUsage(usage.total, usage.free)


def is_disk_full(error: Exception) -> bool:
    """Whether a write failed for want of room; SlateDB has the system's error in its text alone."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(int(number) in _FULL for number in _OS_ERROR.findall(str(error)))


class DiskSpace:
    """Whether there is room for more records below `folder`; without one there always is."""

    def __init__(
        self, folder: Path | None, reserve: int | None, read: UsageReader = read_usage
    ) -> None:
        self._folder = folder
        self._read = read
        self._wanted = reserve
        #: Bytes that are free, and how many of them are kept so.
        self.free = 0
        self.reserve = 0
        self._full = False
        self._next_look = 0.0

    @property
    def bounded(self) -> bool:
        """Whether storage is a disk that can be full."""
        return self._folder is not None

    @property
    def full(self) -> bool:
        """Whether less than the reserve is free."""
        if self._folder is not None and self._next_look <= (now := time.monotonic()):
            self._look(self._folder, now)
        return self._full

    @property
    def room(self) -> float:
        """Bytes that may be written without touching the reserve; infinite if storage is."""
        if not self.bounded:
            return float("inf")
        return 0 if self.full else self.free - self.reserve

    def check(self) -> None:
        """Raise StorageFullError if there is no room for more records."""
        if self.full:
            raise StorageFullError(
                f"the disk has {_mib(self.free)} free, and {_mib(self.reserve)} are kept for trims and "
                "deletions: nothing was written; free some space, trim or delete streams, or set "
                "another reserve"
            )

    def _look(self, folder: Path, now: float) -> None:
        try:
            usage = self._read(folder)
        except OSError as error:
            # Whoever writes next gets the error itself, with more to say.
            logger.warning("the free space of %s cannot be read: %s", folder, error)
            return
        self.free = usage.free
        by_default = min(RESERVE_BYTES, usage.total // _RESERVE_PART)
        self.reserve = by_default if self._wanted is None else self._wanted
        full = usage.free < self.reserve
        if full != self._full:
            logger.warning(
                "%s: %s free, %s are kept for trims and deletions; appends are %s",
                folder,
                _mib(self.free),
                _mib(self.reserve),
                "refused" if full else "taken again",
            )
        self._full = full
        self._next_look = now + _LOOK_INTERVAL if usage.free > 2 * self.reserve else now


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
