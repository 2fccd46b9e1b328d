"""A server in a process of its own that reports, when asked, how long its event loop was held up.

    python -m tests.server.lag_server [LOCATION]

It prints its port. For each line that it reads it prints three numbers, in milliseconds, about the time
since the line before:

- the longest time for which the loop answered nothing, by the clock on the wall;
- the most processor time that the loop's own thread used in one iteration;
- the most processor time that one thread used while it kept the interpreter's lock, which the loop
  needs for everything.

The last two are nearly the same on a busy machine as on a quiet one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamfold.server.http.offload import SWITCH_INTERVAL
from streamfold.server.main import (
    loop_factory,
    running_server,
    tune_allocator,
    tune_collector,
)
from tests.server.conftest import BASIN, STREAM, configuration

Clocks: TypeAlias = npt.NDArray[np.int32]
#: Seconds and nanoseconds of each.
Times: TypeAlias = npt.NDArray[np.int64]

#: Seconds between two looks at the clock.
TICK = 0.001
#: Milliseconds from which holds of the lock are shown on standard error, with what held it.
SHOWN_FROM = float(os.environ.get("LAG_SHOWN_FROM", "inf"))


class LoopWatch:
    """Reads the clocks in every iteration of the loop."""

    def __init__(self) -> None:
        self.waited = self.worked = 0.0

    async def run(self) -> None:
        now, work = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(TICK)
            before, work_before = now, work
            now, work = time.perf_counter(), time.thread_time()
            self.waited = max(self.waited, now - before - TICK)
            self.worked = max(self.worked, work - work_before)

    def report(self) -> tuple[float, float]:
        found = self.waited, self.worked
        self.waited = self.worked = 0.0
        return found


#: Sleeps and then reads clocks of threads, all of it without the lock: ctypes releases it.
_NAP = """
#include <time.h>
#include <unistd.h>
void nap(int count, const int *clocks, struct timespec *times) {
    usleep(1000);
    for (int at = 0; at < count; at++) clock_gettime(clocks[at], &times[at]);
}
"""


def _without_the_lock() -> Callable[[Clocks, Times], None]:
    """The function above, compiled: whatever can build the native part has a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "nap.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=_NAP.encode(), check=True)
        compiled = ctypes.CDLL(str(library)).nap
    compiled.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    compiled.restype = None
    return lambda clocks, times: compiled(len(clocks), clocks.ctypes.data, times.ctypes.data)


class LockWatch(threading.Thread):
    """Wants the interpreter's lock again and again, and sees what a worker did before it got it.

    The processor time that a worker used between the request and the answer is time for which the loop
    would have had to wait, too.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.held = 0.0
        self._nap = _without_the_lock()
        self._nap(np.empty(0, np.int32), np.empty((0, 2), np.int64))

    def run(self) -> None:
        while True:
            workers = _workers()
            clocks = [time.pthread_getcpuclockid(ident) for ident in workers]
            times = np.zeros((len(clocks), 2), np.int64)
            self._nap(np.array(clocks, np.int32), times)
            for ident, clock, (seconds, nanoseconds) in zip(workers, clocks, times, strict=True):
                spent = _read(clock) - seconds - nanoseconds / 1e9
                self.held = max(self.held, float(spent))
                if spent * 1000 >= SHOWN_FROM:
                    stack = traceback.format_stack(sys._current_frames().get(ident), 6)
                    print(f"the lock was kept for {spent * 1000:.1f} ms", *stack, file=sys.stderr)

    def report(self) -> float:
        assert self.is_alive()
        found, self.held = self.held, 0.0
        return found


def _read(clock: int) -> float:
    """The time of a thread; nothing of one that has ended."""
    with suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0


def _workers() -> list[int]:
    """Threads that do work for requests: those of `OffloadPool`, and those of `asyncio.to_thread`."""
    return [
        thread.ident
        for thread in threading.enumerate()
        if thread.name.startswith(("streamfold-worker", "asyncio_")) and thread.ident is not None
    ]


async def main(location: str) -> None:
    async with running_server(configuration(location=location)) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        print(server.port, flush=True)
        loop_watch, lock_watch = LoopWatch(), LockWatch()
        lock_watch.start()
        watching = asyncio.create_task(loop_watch.run())
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            figures = *loop_watch.report(), lock_watch.report()
            print(*(f"{figure * 1000:.1f}" for figure in figures), flush=True)
        watching.cancel()


if __name__ == "__main__":
    tune_collector()
    tune_allocator()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(sys.argv[1] if len(sys.argv) > 1 else "memory:"))
