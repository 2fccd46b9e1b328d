"""Keeps some disk space, or memory, free, so that appends are rejected before it runs out.

An append that fills the disk midway has an unknown outcome. One rejected beforehand certainly did
not happen. The reserve leaves room for trims, deletions, and the tables that SlateDB writes from
acknowledged records.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from streamfold.blob.local_store import WRITE_BUFFER
from streamfold.errors import StorageFullError
from streamfold.store.engine.native import number_of

logger = logging.getLogger(__name__)

#: Bytes kept free: SlateDB holds up to 128 MiB yet to be written as tables, commits of up to 64 MiB
#: are in flight, and a compaction writes 64 MiB at a time.
RESERVE_BYTES = 256 << 20
#: By default, the reserve is at most 1/4 of a small file system.
_RESERVE_PART = 4
#: Seconds between checks while more than twice the reserve is free: too short to fill the rest.
_CHECK_INTERVAL = 0.1

#: Error numbers for a full disk, an exhausted quota and the maximum file size.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class DiskUsage(NamedTuple):
    """Total and free bytes of a file system."""

    total: int
    free: int


#: Reads the usage of the file system that contains a folder.
UsageReader: TypeAlias = Callable[[Path], DiskUsage]


def read_usage(folder: Path) -> DiskUsage:
    usage = shutil.disk_usage(folder)
    return DiskUsage(usage.total, usage.free)


def is_disk_full(error: Exception) -> bool:
    """Return whether a write failed for lack of space."""
    return number_of(error) in _FULL


class DiskSpace:
    """Tracks whether the disk of `folder` has room for more records.

    A `folder` of None means unlimited room. Without a `reserve`, keeps `by_default` bytes free, or
    a quarter of the disk if that is less.
    """

    def __init__(
        self,
        folder: Path | None,
        reserve: int | None,
        read: UsageReader = read_usage,
        medium: str = "the disk",
        by_default: int = RESERVE_BYTES,
    ) -> None:
        self._medium = medium
        self._by_default = by_default
        self._folder = folder
        self._read = read
        self._configured_reserve = reserve
        #: Free bytes, and how many of them must stay free.
        self.free = 0
        self.reserve = 0
        self._full = False
        self._next_check = 0.0
        #: Bytes that running uploads have yet to write.
        self.claimed = 0

    @property
    def bounded(self) -> bool:
        """Whether storage can become full."""
        return self._folder is not None

    @property
    def full(self) -> bool:
        """Whether less than the reserve is free."""
        if self._folder is not None and self._next_check <= (now := time.monotonic()):
            self._read_usage(self._folder, now)
        return self._full

    @property
    def room(self) -> float:
        """Bytes that may be written without touching the reserve; infinite if storage is unlimited."""
        if not self.bounded:
            return float("inf")
        return 0 if self.full else max(0, self.free - self.reserve - self.claimed)

    def check(self) -> None:
        """Raise StorageFullError if the disk has no room for more records."""
        if self.full:
            raise StorageFullError(
                f"{self._medium} has {_mib(self.free)} free, and {_mib(self.reserve)} are kept for "
                "trims and deletions: nothing was written; free some space, trim or delete streams, or "
                "set another reserve"
            )

    def check_upload(self, size: int) -> None:
        """Raise StorageFullError if `size` bytes do not fit beside the claims of running uploads."""
        self._next_check = 0.0  # uploads are fast enough to fill a small reserve between two checks
        self.check()
        if size and self.room < size:
            raise StorageFullError(
                f"an upload of {_mib(size)} does not fit: {self._medium} has {_mib(self.free)} free, "
                f"{_mib(self.reserve)} are kept for trims and deletions, and {_mib(self.claimed)} for "
                "other uploads; nothing was stored; free some space, or send it again later"
            )

    @contextmanager
    def claim(self, size: int | None) -> Iterator[SpaceClaim]:
        """Reserve room for an upload of `size` bytes, if known, until the context ends."""
        claim = SpaceClaim(self, size or 0)
        try:
            yield claim
        finally:
            claim.release()

    def _read_usage(self, folder: Path, now: float) -> None:
        try:
            usage = self._read(folder)
        except OSError as error:
            # The next write raises the error itself, with more detail.
            logger.warning("cannot read the free space of %s: %s", folder, error)
            return
        self.free = usage.free
        by_default = min(self._by_default, usage.total // _RESERVE_PART)
        self.reserve = by_default if self._configured_reserve is None else self._configured_reserve
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
        self._next_check = now + _CHECK_INTERVAL if usage.free > 2 * self.reserve else now


class SpaceClaim:
    """The room that one upload still needs: bytes declared or received, minus those on disk."""

    def __init__(self, space: DiskSpace, declared: int) -> None:
        self._space = space
        self._declared = declared
        self._came = 0
        #: Bytes buffered by the blob store, and bytes that it has written.
        self._gathered = 0
        self._written = 0
        self._claimed = 0

    def add(self, size: int) -> None:
        """Count bytes before they are written.

        Raises StorageFullError if they would touch the reserve.

        The first call claims all declared bytes: a client that sends nothing claims nothing.
        """
        if self._gathered >= WRITE_BUFFER:  # the blob store wrote them before asking for more
            self._written += self._gathered
            self._claim(-self._gathered)
            self._gathered = 0
        self._gathered += size
        self._came += size
        more = max(self._declared, self._came) - self._written - self._claimed
        self._space.check_upload(more)
        self._claim(more)

    def release(self) -> None:
        self._claim(-self._claimed)

    def _claim(self, size: int) -> None:
        self._claimed += size
        self._space.claimed += size


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


#: Bytes kept free: what clients may hold (docs/reference/limits.md), and SlateDB's buffers.
MEMORY_RESERVE_BYTES = 1 << 30
#: Where Linux shows this process, and its container's memory limits, by cgroup version.
_PROCESS = Path("/proc/self")
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_space(reserve: int | None) -> DiskSpace:
    """Return the free space of an in-memory store. Unlimited where the system hides memory usage."""
    folder = _PROCESS if _PROCESS.exists() else None
    return DiskSpace(folder, reserve, read_memory_usage, "memory", MEMORY_RESERVE_BYTES)


def read_memory_usage(process: Path) -> DiskUsage:
    """Return the memory that the machine or container allows this process, and how much is left."""
    total = memory_total()
    resident = os.sysconf("SC_PAGE_SIZE") * int((process / "statm").read_text().split()[1])
    return DiskUsage(total, max(0, total - resident))


def memory_total() -> int:
    """Return the memory that the machine or container allows this process; unlimited if unknown."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return sys.maxsize
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # another version, or "max"
            total = min(total, int(limit.read_text()))
    return total
