"""Something to be measured in a process of its own: its time, processor time and memory.

A subject gets ready, says so, works, and says what came out. Memory is that of all its processes
together, shared pages counted once; processor time is theirs, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TextIO

import psutil

from bench.store import MIB, processor_times, stolen_share

#: Seconds between two looks at a subject.
LOOK = 0.1
READY = "ready"


def be_subject(work: Callable[[], dict[str, Any]]) -> None:
    """In the subject's process: everything is ready, work now."""
    print(READY, flush=True)
    began = time.perf_counter()
    found = work()
    print(json.dumps({"seconds": time.perf_counter() - began, **found}), flush=True)


def measure(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m module arguments`, which is a subject, and look at it while it works."""
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+") as complaints:
        return _measured(command, complaints)


def _measured(command: list[str], complaints: TextIO) -> dict[str, Any]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True)
    assert process.stdout is not None
    while process.stdout.readline().strip() != READY:
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(command)} did not start: {_last(complaints)}")
    before, usage = processor_times(), Usage()
    usage.look(process.pid)
    start = sum(usage.cpu.values())
    while process.poll() is None:
        usage.look(process.pid)
        time.sleep(LOOK)
    said = process.stdout.read().splitlines()
    process.stdout.close()
    if process.returncode or not said:
        failure = f"{' '.join(command)} ended with {process.returncode}"
        raise RuntimeError(f"{failure}: {_last(complaints)}")
    return {
        **json.loads(said[-1]),
        "cpu_seconds": round(sum(usage.cpu.values()) - start, 2),
        **{f"{name}_mib": round(size / MIB) for name, size in usage.peaks.items()},
        "stolen": round(stolen_share(before), 3),
    }


def _last(complaints: TextIO) -> str:
    complaints.seek(0)
    return complaints.read()[-2000:]


@dataclass
class Usage:
    """What the processes of a subject used."""

    #: Processor seconds by process.
    cpu: dict[int, float] = field(default_factory=dict)
    #: Bytes at most: of all processes, and of a driver (the first one and its Java).
    peaks: dict[str, int] = field(default_factory=lambda: {"peak": 0, "driver": 0})

    def look(self, pid: int) -> None:
        total = driver = 0
        with suppress(psutil.Error):
            first = psutil.Process(pid)
            for one in (first, *first.children(recursive=True)):
                size = self._look_at(one)
                total += size
                driver += size if one is first or _name(one) == "java" else 0
        for name, size in (("peak", total), ("driver", driver)):
            self.peaks[name] = max(self.peaks[name], size)

    def _look_at(self, process: psutil.Process) -> int:
        with suppress(psutil.Error):
            times = process.cpu_times()
            self.cpu[process.pid] = times.user + times.system
            size: int = process.memory_full_info().pss
            return size
        return 0


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.name())
    return ""
