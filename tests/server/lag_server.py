"""A server in a process of its own that tells, when asked, how long its event loop was held up.

It prints its port. For each line that it reads it prints two numbers, in milliseconds, of the time
since the line before: the longest time for which the loop answered nothing, and the most processor
time that the loop's own thread used in one go. The second one says the same on a busy machine.
"""

from __future__ import annotations

import asyncio
import sys
import time

from streamfold.server.main import loop_factory, running_server, tune_collector
from streamfold.server.workers import SWITCH_INTERVAL
from tests.server.conftest import BASIN, STREAM, configuration

#: Seconds between two looks at the clock.
TICK = 0.001


class Watch:
    """Looks at the clocks all the time."""

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

    def report(self) -> str:
        text = f"{self.waited * 1000:.1f} {self.worked * 1000:.1f}"
        self.waited = self.worked = 0.0
        return text


async def main() -> None:
    async with running_server(configuration()) as server:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        print(server.port, flush=True)
        watch = Watch()
        watching = asyncio.create_task(watch.run())
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while await lines.readline():
            print(watch.report(), flush=True)
        watching.cancel()


if __name__ == "__main__":
    tune_collector()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
