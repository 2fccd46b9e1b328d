"""Evidence that proves to another process on the same machine that a process has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Positions in `/proc/PID/stat` after the command name: the state, and the start time.
_STATE, _START = 0, 19
#: State of a process that has ended but whose parent has not noticed yet.
_ZOMBIE = "Z"
#: On Linux, a clock that also runs while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_clock() -> float:
    """Return seconds that never go backwards and, on Linux, also count while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def process_evidence(pid: int) -> str:
    """Return a process's identity: boot, process namespace, PID and start time.

    Returns "" if the system does not reveal it, or if the process does not exist.
    """
    world, status = _world(), _status_of(pid)
    return f"{world}/{pid}/{status[_START]}" if world and status is not None else ""


def has_ended(evidence: str) -> bool:
    """Return whether the process has certainly ended, or False if this process cannot tell.

    It can tell within the same process namespace and boot. Containers and other machines have
    others.
    """
    world, _, process = evidence.partition("/")
    pid, _, started = process.partition("/")
    if not world or world != _world() or not (pid.isascii() and pid.isdecimal()) or not started:
        return False
    status = _status_of(int(pid))
    if status is None:
        return not _exists(int(pid))
    return status[_START] != started or status[_STATE] == _ZOMBIE


def _world() -> str:
    """Return the machine's boot id and process namespace, or "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink().name
    except OSError:
        return ""
    return f"{boot}:{namespace.removeprefix('pid:[').removesuffix(']')}"


def _status_of(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(") ")[2].split()


def _exists(pid: int) -> bool:
    """Return whether the process exists. `/proc` may hide processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
