"""What servers sync to disk before they acknowledge, counted by strace in a short load of its own.

A lone writer that waits for each ack shows it best: a server that syncs before it acknowledges makes at
least one call per ack. Many writers show how many acks share a call. strace sees system calls only: it
would not count a sync through io_uring.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.turns import Target

#: System calls that make written bytes durable.
CALLS = ("fsync", "fdatasync", "syncfs", "sync_file_range", "msync", "sync")
#: Acks that the lone writer waits for.
ALONE = 200
#: Seconds in which strace has to attach, and to detach.
_TIMEOUT = 60.0


@dataclass(slots=True)
class SyncCounts:
    """Calls by name; filled in at the end of the block, unless `problem` says why they could not be."""

    calls: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __str__(self) -> str:
        if not self.calls:
            return "no sync"
        return " + ".join(f"{count:,} {name}" for name, count in self.calls.items())


@contextmanager
def counted(pids: Sequence[int]) -> Iterator[SyncCounts]:
    """Count what these processes, with all their threads, sync during the block."""
    counts = SyncCounts()
    with tempfile.TemporaryDirectory(prefix="streamfold-bench-") as folder:
        summary = Path(folder) / "summary"
        tracer = _attach(pids, summary, counts)
        try:
            yield counts
        finally:
            if tracer is not None:
                _detach(tracer)
                counts.calls = parse(summary.read_text())


def _attach(pids: Sequence[int], summary: Path, counts: SyncCounts) -> subprocess.Popen[str] | None:
    if shutil.which("strace") is None:
        counts.problem = "strace is not installed"
        return None
    command = ["strace", "-f", "-c", f"--trace={','.join(CALLS)}", f"--output={summary}"]
    command += [f"--attach={pid}" for pid in pids]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    for _ in pids:  # it says for each process that it is attached
        if " attached" not in (line := tracer.stderr.readline()):
            tracer.kill()
            tracer.communicate()
            counts.problem = f"strace could not attach: {line.strip()}"
            return None
    return tracer


def _detach(tracer: subprocess.Popen[str]) -> None:
    """End strace as Ctrl-C does, so that it writes its summary; without waiting for its messages."""
    tracer.send_signal(signal.SIGINT)
    try:
        tracer.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        tracer.kill()
        raise


def parse(summary: str) -> dict[str, int]:
    """Calls by name from the table of `strace -c`."""
    rows = (line.split() for line in summary.splitlines())
    return {row[-1]: int(row[3]) for row in rows if row and row[-1] in CALLS}


def describe(target: Target, append: Callable[[], None], load: Callable[[], int]) -> str:
    """Say in a sentence what `target` syncs for a lone writer's appends, and under a load of many.

    `append` returns when one append is acknowledged, `load` how many were.
    """
    if target.pid is None:
        return f"{target.name}: not on this machine, so its syncs were not counted"
    append()  # the first one may create what all others find
    with counted(target.pids()) as single:
        for _ in range(ALONE):
            append()
    with counted(target.pids()) as many:
        began = time.perf_counter()
        acks = load()
        seconds = time.perf_counter() - began
    if problem := single.problem or many.problem:
        return f"{target.name}: {problem}, so its syncs were not counted"
    return (
        f"{target.name} under strace, which slows it: {single} for {ALONE} acks of one writer; with "
        f"many writers {many.total / seconds:,.0f} syncs and {acks / seconds:,.0f} acks per second"
    )
