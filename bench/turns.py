"""Measures several servers by the same workloads, in turns, in one run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.figures import Latencies, settle
from bench.h2load import Appender, Load, Shape
from bench.report import Row, Sample
from bench.store import MIB

OURS, NULL = "Streamfold", "null server"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a run measures: seconds of a load flat out and of a steady one, streams, repetitions."""

    seconds: float
    steady: float
    streams: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint, and its process when it is on this machine."""

    name: str
    url: str
    pid: int | None = None

    def cpu(self) -> float:
        """Processor seconds of the process and of its children."""
        return sum(sum(one.cpu_times()[:2]) for one in self._processes())

    def written(self) -> int:
        """Bytes that went to the disk."""
        return sum(one.io_counters().write_bytes for one in self._processes())

    def resident(self) -> float:
        """MiB of memory."""
        return float(sum(one.memory_info().rss for one in self._processes())) / MIB

    def pids(self) -> list[int]:
        """The process and its children; none if it is on another machine."""
        return [one.pid for one in self._processes()]

    def _processes(self) -> list[psutil.Process]:
        if self.pid is None:
            return []
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]


#: What a workload found: the value of each measure, in the unit that its name ends with.
Found = dict[str, float]


@dataclass(slots=True)
class Run:
    """One run of all workloads; a number makes the streams of each repetition new ones."""

    scale: Scale
    folder: Path
    number: int = 0
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def names(self, kind: str, count: int) -> list[str]:
        return [f"{kind}-{os.getpid()}-{self.number}-{index}" for index in range(count)]

    def keep(self, target: Target, found: Found) -> None:
        for measure, value in found.items():
            self.found.setdefault(measure, {}).setdefault(target.name, []).append(float(value))
            print(f"  {target.name:14} {measure:64} {value:12,.2f}", flush=True)


Workload = Callable[[Run, Target], Found]


def run_all(
    run: Run,
    everyone: Sequence[Target],
    workloads: Mapping[str, Workload],
    *,
    null: Iterable[str] = (),
    once: Iterable[str] = ("resident",),
) -> None:
    """Run every workload `repeat` times, on one target after the other.

    The null server stores nothing: it takes part in the workloads that `null` names.
    """
    for name, workload in workloads.items():
        print(name, flush=True)
        for number in range(run.scale.repeat if name not in once else 1):
            run.number = number
            for target in everyone:
                if target.name != NULL or name in null:
                    rest(*everyone)  # or one would be measured while another tidies up
                    with alone(target, everyone):
                        run.keep(target, workload(run, target))


@contextmanager
def alone(target: Target, everyone: Iterable[Target]) -> Iterator[None]:
    """Stop the others on this machine: one that is never at rest would take part of the processors."""
    pids = [one.pid for one in everyone if one is not target and one.pid is not None]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        os.sync()  # or the target would wait for what another left to the system to write
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def rest(*targets: Target) -> None:
    """Wait until these have done what they do in the background."""
    asyncio.run(settle(*(one.pid for one in targets if one.pid is not None)))


def resident(_: Run, target: Target) -> Found:
    """Memory half a minute after all other workloads."""
    rest(target)
    time.sleep(30)
    return {"resident memory after all that, MiB": target.resident()}


def percentile(latencies: Latencies, part: float) -> float:
    """In milliseconds."""
    return float(np.percentile(latencies, part)) / 1e6


def count_acks(appender: Appender, shape: Shape, seconds: float) -> int:
    """How many appends were acknowledged in so many seconds."""
    return len(asyncio.run(appender.run(shape, seconds)).latencies)


def refuse_failures(target: Target, load: Load) -> None:
    if load.failures:
        raise RuntimeError(f"{target.name} did not acknowledge {load.failures} appends")


def rows_of(run: Run) -> list[Row]:
    """Streamfold first, and a measure's unit apart from its name."""
    rows = []
    for measure, found in run.found.items():
        name, _, unit = measure.rpartition(", ")
        samples = [Sample(subject, values) for subject, values in found.items()]
        if unit.startswith(("p50 ", "p99 ", "ack ", "processor ", "refused ")):
            kind, _, unit = unit.rpartition(" ")
            name = f"{name}, {kind}"
        rows.append(Row(name, unit, samples, more=unit.endswith("/s")))
    return rows
