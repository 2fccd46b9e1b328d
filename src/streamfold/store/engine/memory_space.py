"""How much memory a store in memory may still take: what it holds is this process's own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from streamfold.store.engine.disk_space import DiskSpace, DiskUsage

#: Bytes kept free: what clients may hold (docs/reference/limits.md), and SlateDB's buffers.
RESERVE_BYTES = 1 << 30
#: Where Linux shows this process, and the limits of its container, by version of control groups.
_PROCESS = Path("/proc/self")
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_space(reserve: int | None) -> DiskSpace:
    """The room of a store in memory; unlimited on systems that do not show what a process uses."""
    folder = _PROCESS if _PROCESS.exists() else None
    return DiskSpace(folder, reserve, read_usage, "memory", RESERVE_BYTES)


def read_usage(process: Path) -> DiskUsage:
    """The memory that the machine, or the container, lets a process have, and what is left of it."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # not this version, or "max"
            total = min(total, int(limit.read_text()))
    resident = page * int((process / "statm").read_text().split()[1])
    return DiskUsage(total, max(0, total - resident))
