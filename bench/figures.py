"""What a benchmark of the server reports: a figure over HTTP, and the same in this process."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import psutil

from bench.store import processor_times, stolen_share

Latencies = npt.NDArray[np.int64]

#: Seconds between two looks at a process that is to come to rest, and looks at most.
SETTLE_INTERVAL, SETTLE_MAX = 0.2, 50
#: Part of a processor that an idle server uses.
IDLE = 0.1


@dataclass(slots=True)
class Spent:
    """What happened while something was measured; filled in at its end."""

    seconds: float = 0.0
    #: Processor seconds of the process that held the store.
    cpu: float = 0.0
    #: Processor seconds of the clients, if they were not in that process.
    client_cpu: float = 0.0
    #: Part of the processors' time that the host gave to others.
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement. A shared machine distorts rates, processor time much less so."""

    per_second: float
    spent: Spent
    #: Microseconds of processor per operation: of the process that holds the store, and of clients.
    cpu_us: float
    client_cpu_us: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    #: Resident memory of the server, in MiB.
    rss_before_mib: float | None = None
    rss_after_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The same work over HTTP and in this process; without a figure over HTTP, it was skipped."""

    name: str
    #: What `per_second` counts.
    unit: str
    http: Figure | None
    in_process: Figure
    note: str = ""

    @property
    def ratios(self) -> dict[str, float | None]:
        """What is left of the rate over HTTP, and what it adds to latency and processor time."""
        http, beside = self.http, self.in_process
        if http is None:
            return {"rate": None, "p50": None, "cpu": None}
        return {
            "rate": http.per_second / beside.per_second,
            "p50": http.p50_ms / beside.p50_ms if http.p50_ms and beside.p50_ms else None,
            "cpu": http.cpu_us / beside.cpu_us if beside.cpu_us else None,
        }


async def settle(*pids: int) -> None:
    """Wait until these processes are idle, so that none works off what was measured before.

    One that does not come to rest is measured all the same, after `SETTLE_MAX` looks.
    """
    used = _cpu(*pids)
    for _ in range(SETTLE_MAX):
        await asyncio.sleep(SETTLE_INTERVAL)
        before, used = used, _cpu(*pids)
        if used - before <= SETTLE_INTERVAL * IDLE:
            return


def _cpu(*pids: int) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@contextmanager
def measured(pid: int) -> Iterator[Spent]:
    """Measure the block: time, and the processor time of process `pid` and of its clients.

    Clients are this process, unless it is the one, and the processes that it started and awaited.
    """
    spent, since = Spent(), processor_times()
    clients, cpu, began = _clients_cpu(), _cpu(pid), time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - began
    spent.cpu = _cpu(pid) - cpu
    spent.client_cpu = 0.0 if pid == os.getpid() else _clients_cpu() - clients
    spent.stolen = stolen_share(since)


def _clients_cpu() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def figure_of(spent: Spent, operations: float, latencies: Latencies | None = None) -> Figure:
    """The figure for so many operations, whose latencies are in nanoseconds."""
    each = 1e6 / operations
    figure = Figure(operations / spent.seconds, spent, spent.cpu * each, spent.client_cpu * each)
    if latencies is None:
        return figure
    p50, p99, most = (float(value) / 1e6 for value in np.percentile(latencies, (50, 99, 100)))
    return replace(figure, p50_ms=p50, p99_ms=p99, max_ms=most)
