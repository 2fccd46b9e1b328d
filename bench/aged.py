"""Measures a store that was written for an hour beside a new one: `python -m bench.aged --help`.

The hour is a steady load of everything that leaves garbage: bulk appends that are trimmed as fast as
they are written, small appends to many streams, and streams that come and go. Then the aged store and a
new one do the same work in turns.

    python -m bench.aged                            an hour, then the comparison
    python -m bench.aged --age --folder DIR         only the hour, and keep the store
    python -m bench.aged --measure --folder DIR     only the comparison, of a store that was kept
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.bodies import noise
from bench.space import sizes
from bench.store import BASIN, MIB, measure_acks, measure_throughput
from streamfold.model.records import Record, trim_record
from streamfold.records.batch import RecordBatch
from streamfold.server.main import loop_factory, tune_allocator, tune_collector
from streamfold.store import StreamStore, open_store

RESULTS = Path(__file__).parent / "results" / "aged.json"
#: Bulk: batches of 256 KiB, and how many of them are kept.
BODY, BATCH, KEPT = 1024, 256, 2048
#: Streams that small appends go to in turn, and how many of those that come and go are there at once.
SMALL_STREAMS, PASSING = 2000, 50
#: Small appends of a second, and streams that come and go in it.
SMALL_RATE, PASSING_RATE = 200, 2
#: Comparisons, each of both stores in turn; seconds of appends and MiB of bulk in each.
ROUNDS, SECONDS, BULK = 3, 5.0, 512
#: Seconds between two lines about the aging store.
EVERY = 60.0


class Aging:
    """The load that ages a store, for so many seconds."""

    def __init__(self, store: StreamStore, folder: Path, seconds: float, rate: float) -> None:
        self.store = store
        self.folder = folder
        self.rate = rate
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.appended = 0
        #: Live bytes of bulk and of small appends, metered; streams that pass hold 2 MiB at most.
        self.bulk_live = self.small_live = 0

    async def run(self) -> None:
        await self.store.create_basin(BASIN)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.bulk())
            group.create_task(self.small())
            group.create_task(self.passing())
            group.create_task(self.report())

    async def at_rate(self, per_second: float) -> AsyncIterator[int]:
        """Yield numbers at this rate, or as fast as they are taken, until the end."""
        number = 0
        while (due := self.began + number / per_second) < self.end and time.monotonic() < self.end:
            await asyncio.sleep(due - time.monotonic())
            yield number
            number += 1

    async def bulk(self) -> None:
        await self.store.ensure_stream(BASIN, "aging")
        batch = RecordBatch.of([Record(noise(BODY, number)) for number in range(BATCH)])
        async for number in self.at_rate(self.rate * MIB / batch.metered):
            ack = await self.store.append(BASIN, "aging", batch)
            self.appended += batch.metered
            self.bulk_live = min(number + 1, KEPT) * batch.metered
            if number % 64 == 0 and number >= KEPT:
                trim = [trim_record(ack.end.seq_num - KEPT * BATCH)]
                await self.store.append(BASIN, "aging", trim)

    async def small(self) -> None:
        batch = RecordBatch.of([Record(noise(256, 0))])
        for number in range(SMALL_STREAMS):
            await self.store.ensure_stream(BASIN, f"small-{number}")
        async for number in self.at_rate(SMALL_RATE):
            await self.store.append(BASIN, f"small-{number % SMALL_STREAMS}", batch)
            self.small_live = (number + 1) * batch.metered

    async def passing(self) -> None:
        record = [Record(noise(256, number)) for number in range(100)]
        async for number in self.at_rate(PASSING_RATE):
            await self.store.ensure_stream(BASIN, f"passing-{number}")
            await self.store.append(BASIN, f"passing-{number}", record)
            if number >= PASSING:
                await self.store.delete_stream(BASIN, f"passing-{number - PASSING}")

    async def report(self) -> None:
        async for _ in self.at_rate(1 / EVERY):
            print(json.dumps(self.state()), flush=True)

    def state(self) -> dict[str, float]:
        found = list(sizes(self.folder))
        disk, live = sum(size for _, size in found), self.bulk_live + self.small_live
        return {
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "appended_mib": round(self.appended / MIB),
            "live_mib": round(live / MIB),
            "disk_mib": round(disk / MIB),
            "disk_per_live_byte": round(disk / max(1, live), 2),
            "files": len(found),
        }


async def age(folder: Path, seconds: float, rate: float) -> dict[str, float]:
    async with open_store(folder.as_uri()) as store:
        aging = Aging(store, folder, seconds, rate)
        await aging.run()
        return aging.state()


async def measure(folder: Path, turn: int) -> dict[str, float]:
    """The work that both stores do."""
    began = time.perf_counter()
    async with open_store(folder.as_uri()) as store:
        await store.ensure_basin(BASIN)
        restart = time.perf_counter() - began
        alone = await measure_acks(store, 1, 1, SECONDS)
        many = await measure_acks(store, 100, 100, SECONDS)
        bulk = await measure_throughput(store, BULK, f"bulk-{turn}")
    return {
        "restart until the first answer, s": restart,
        "one writer, ack p50, ms": alone["p50_ms"],
        "100 writers to 100 streams, ack p50, ms": many["p50_ms"],
        "100 writers to 100 streams, ack p99, ms": many["p99_ms"],
        "bulk append of 1 MiB, ms": 1000 / bulk["append_mib_per_s"],
        "catch-up of 1 MiB, ms": 1000 / bulk["catch_up_mib_per_s"],
    }


async def compare(aged: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"aged": [], "new": []}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-new-", dir=aged.parent) as new:
            folders = {"aged": aged, "new": Path(new)}
            for name in sorted(folders, reverse=bool(number % 2)):
                found[name].append(await measure(folders[name], number))
                print(name, json.dumps(found[name][-1]), flush=True)
    return found


@contextmanager
def chosen(folder: Path | None) -> Iterator[Path]:
    """The folder that was given, or one that is removed."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="bench-aged-") as made:
            yield Path(made) / "store"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="of aging")
    parser.add_argument("--mib-per-second", type=float, default=10, help="of bulk while aging")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the comparison")
    parser.add_argument("--folder", type=Path, help="keep the aged store here")
    parser.add_argument("--age", action="store_true", help="age a store, measure nothing")
    parser.add_argument("--measure", action="store_true", help="measure a store that was aged")
    options = parser.parse_args()
    tune_collector()
    tune_allocator()
    with chosen(options.folder) as folder, asyncio.Runner(loop_factory=loop_factory()) as runner:
        note = folder.with_name(folder.name + ".json")
        if not options.measure:
            state = runner.run(age(folder, options.seconds, options.mib_per_second))
            note.write_text(json.dumps(state))
        if not options.age:
            found: dict[str, Any] = {"after": json.loads(note.read_text())}
            found |= runner.run(compare(folder, options.rounds))
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
