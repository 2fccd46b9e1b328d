"""Evidence by which a process can prove that another one on the same machine has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Positions in `/proc/PID/stat` after the command's name: the state, and the start time.
_STATE, _START = 0, 19
#: The state of a process that has ended, and whose parent has not noticed yet.
_ZOMBIE = "Z"
#: On Linux, the one that also runs while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_clock() -> float:
    """Return seconds that never go back, and that pass while the machine sleeps, on Linux."""
    return time.clock_gettime(_CLOCK)


def process_evidence(pid: int) -> str:
    """Return what identifies a process: boot, process namespace, number and start time.

    Empty if the system does not say, or if there is no such process.
    """
    world, status = _world(), _status_of(pid)
    return f"{world}/{pid}/{status[_START]}" if world and status is not None else ""


def has_ended(evidence: str) -> bool:
    """Whether the process has certainly ended; False if that cannot be known from here.

    It can be known in the same process namespace of the same boot. Containers and other machines have
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
    """Return the boot of the machine and the namespace of its processes; empty if unknown."""
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
    """Whether there is such a process; `/proc` may hide those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
