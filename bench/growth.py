"""Measures what records, followers, snapshots and rows of a table cost as there are more of them.

    python -m bench.growth            1, 10 and 100 times as many of each
    python -m bench.growth --quick    a hundredth of that, to see it run

Each size is measured in a process of its own, so that memory is that of one store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.bodies import noise
from bench.store import BASIN, MIB
from bench.subjects import be_subject, measure
from bench.table_archives import write_archive
from streamfold import archive
from streamfold.blob import open_blob_store
from streamfold.follow import external
from streamfold.model.records import BATCH_RECORDS_MAX, Record
from streamfold.records.batch import RecordBatch
from streamfold.server.main import loop_factory, tune_allocator, tune_collector
from streamfold.store import ReadRequest, StreamStore, from_seq_num, open_store

RESULTS = Path(__file__).parent / "results" / "growth.json"
STREAM = "growing"
#: Bytes of a record, and batches that are under way at once.
BODY, WRITERS = 16, 8
#: Reads at random positions, and records of each.
READS, READ_RECORDS = 200, 100
#: Appends of one record, one after the other.
APPENDS = 300
#: Records that are sent to followers.
DELIVERED = 200
#: Bytes of a snapshot, and how often the newest is looked up.
SNAPSHOT, LOOKS = 1024, 20
#: Rows of a table that share a bucket, and of how many rows one changes.
BUCKET_ROWS, CHANGED = 250_000, 100
#: What one size of a case came to.
Found = dict[str, float]


async def records(count: int, folder: Path) -> Found:
    """One stream of so many records: writing them, a restart, reads anywhere, more appends."""
    url = folder.as_uri()
    batch = RecordBatch.of([Record(noise(BODY, number)) for number in range(BATCH_RECORDS_MAX)])
    async with open_store(url) as store:
        await store.create_basin(BASIN)
        await store.ensure_stream(BASIN, STREAM)
        left = iter(range(count // batch.count))

        async def write() -> None:
            for _ in left:
                await store.append(BASIN, STREAM, batch)

        cpu = time.process_time()
        await asyncio.gather(*(write() for _ in range(WRITERS)))
        written = time.process_time() - cpu
    began = time.perf_counter()
    async with open_store(url) as store:
        tail = (await store.check_tail(BASIN, STREAM)).seq_num
        restart = time.perf_counter() - began
        return {
            "append in batches, µs of processor per record": written / tail * 1e6,
            "restart until the first answer, s": restart,
            "read of 100 records anywhere, ms": await read_anywhere(store, tail) * 1000,
            "append of one record, ms": await append_one_by_one(store) * 1000,
            "memory after that, MiB": psutil.Process().memory_info().rss / MIB,
        }


async def read_anywhere(store: StreamStore, tail: int) -> float:
    """Mean seconds of a read at a random position."""
    rng, began = random.Random(1), time.perf_counter()
    for _ in range(READS):
        start = from_seq_num(rng.randrange(max(1, tail - READ_RECORDS)))
        await store.read(BASIN, STREAM, ReadRequest(start, count=READ_RECORDS))
    return (time.perf_counter() - began) / READS


async def append_one_by_one(store: StreamStore) -> float:
    """Mean seconds until the ack."""
    record, began = [Record(b"x" * BODY)], time.perf_counter()
    for _ in range(APPENDS):
        await store.append(BASIN, STREAM, record)
    return (time.perf_counter() - began) / APPENDS


async def followers(count: int, folder: Path) -> Found:
    """So many followers of one stream, in the process of the store."""
    async with open_store(folder.as_uri()) as store:
        await store.create_basin(BASIN)
        await store.ensure_stream(BASIN, STREAM)
        before = psutil.Process().memory_info().rss
        opened = asyncio.Semaphore(0)

        async def follow() -> None:
            left = DELIVERED
            async with store.follow(BASIN, STREAM, ReadRequest(from_seq_num(0))) as session:
                opened.release()
                async for batch in session:
                    left -= batch.count
                    if not left:
                        return

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(follow())
            for _ in range(count):
                await opened.acquire()
            resident = psutil.Process().memory_info().rss
            cpu = time.process_time()
            for _ in range(DELIVERED):
                await store.append(BASIN, STREAM, [Record(b"x" * BODY)])
        spent = time.process_time() - cpu
    return {
        "delivery to a follower, µs of processor": spent / (count * DELIVERED) * 1e6,
        "memory of a follower, KiB": (resident - before) / count / 1024,
    }


async def snapshots(count: int, folder: Path) -> Found:
    """So many snapshots of one stream outside it: the look for the newest of them."""
    store = external(open_blob_store(folder.as_uri())).store
    assert store is not None
    for cursor in range(1, count + 1):
        await store.save(cursor, "json", b"x" * SNAPSHOT)
    began = time.perf_counter()
    for _ in range(LOOKS):
        newest = await store.newest()
        assert newest is not None
        assert newest.cursor == count
    return {"look for the newest, ms": (time.perf_counter() - began) / LOOKS * 1000}


async def rows(count: int, folder: Path) -> Found:
    """A table of so many rows in files: a new base after changes in all buckets, and a reader."""
    buckets = 1 << (count // BUCKET_ROWS - 1).bit_length()
    await write_archive(folder, count, [np.arange(0, count, CHANGED)], buckets=buckets)
    read = await asyncio.to_thread(measure, "bench.growth", "--read", str(folder))
    rebased = await asyncio.to_thread(measure, "bench.rebase", "--subject", str(folder))
    return {
        "new base, µs per row": rebased["seconds"] / count * 1e6,
        "new base, memory at most, MiB": rebased["peak_mib"],
        "read of all rows, µs per row": read["seconds"] / count * 1e6,
        "read of all rows, memory at most, MiB": read["peak_mib"],
    }


def read_table(folder: Path) -> dict[str, Any]:
    """Read the table at its head, batch by batch."""

    async def read() -> int:
        opened = await archive.open(folder.as_uri())
        return sum([batch.num_rows async for batch in opened.batches()])

    return {"rows": asyncio.run(read())}


Case = Callable[[int, Path], Coroutine[Any, Any, Found]]
#: What grows, its first size, and what is measured.
CASES: dict[str, tuple[int, Case]] = {
    "records": (1_000_000, records),
    "followers": (10, followers),
    "snapshots": (100, snapshots),
    "rows": (1_000_000, rows),
}


def measure_here(case: str, size: int) -> Found:
    """Measure one size in this process, with the settings that a server has."""
    tune_collector()
    tune_allocator()
    with (
        tempfile.TemporaryDirectory(prefix="streamfold-bench-") as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        return runner.run(CASES[case][1](size, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is kept")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        be_subject(lambda: read_table(options.read))
        return
    if options.alone:
        case, size = options.alone
        print(json.dumps(measure_here(case, int(size))))
        return
    found: dict[str, list[tuple[int, Found]]] = {}
    for case, (first, _) in CASES.items():
        for times in (1, 10) if options.quick else (1, 10, 100):
            size = first * times // (100 if options.quick and first >= 100 else 1)
            found.setdefault(case, []).append((size, _in_a_child(case, size)))
            for what, value in found[case][-1][1].items():
                print(f"{size:>12,} {case:10} {what:50} {value:12.3f}", flush=True)
            if not options.quick:
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(found, indent=1))


def _in_a_child(case: str, size: int) -> Found:
    command = [sys.executable, "-m", "bench.growth", "--alone", case, str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Found = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
