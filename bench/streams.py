"""Measures a store with many streams: `python -m bench.streams --help`.

For each number of streams: create each by its first append, append to each in turn, list them,
restart, and append to each in turn again. Every rate is compared with the same appends to 500 streams
in the same run, and the disk with a bare write and sync: these machines are shared, and only ratios
travel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.store import BASIN, MIB, bare_sync_loop
from streamfold.model.configs import BasinConfig
from streamfold.model.records import Record
from streamfold.records.batch import RecordBatch
from streamfold.server.main import loop_factory, tune_allocator, tune_collector
from streamfold.store import StoreSettings, StreamStore, open_store

#: Appends under way at once, as h2load sends them with 100 connections of 5 streams.
WRITERS = 500
#: Streams that any cache holds: the reference for the others.
FEW = 500
#: Appends of the reference.
FEW_APPENDS = 20_000
#: Names in a page of a listing.
PAGE = 1000
NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
RESULTS = Path(__file__).parent / "results" / "streams.json"


def name(number: int) -> str:
    return f"agents/agent-{number:07d}"


async def append_each(store: StreamStore, names: Iterator[str]) -> int:
    """Append one record of 256 bytes to each of `names`; returns how many."""
    record = [Record(b"x" * 256)]
    done = 0

    async def write() -> None:
        nonlocal done
        for stream in names:
            await store.append(BASIN, stream, RecordBatch.of(record))
            done += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(write())
    return done


async def list_all(store: StreamStore, names: Iterator[str]) -> int:
    """List all streams, page by page; returns how many."""
    found, after = 0, ""
    while True:
        page = await store.list_streams(BASIN, start_after=after, limit=PAGE)
        found += len(page.items)
        if not page.has_more:
            return found
        after = page.items[-1].name


async def upkeep(store: StreamStore) -> float:
    """Processor seconds of a pass of the background work that finds nothing due."""
    await store.upkeep()  # does what is left to do
    before = time.process_time()
    await store.upkeep()
    return time.process_time() - before


Work = Callable[[StreamStore, Iterator[str]], Coroutine[Any, Any, int]]


async def measure(work: Work, store: StreamStore, names: Iterator[str]) -> dict[str, float]:
    """Operations per second of `work`, and their processor time."""
    began, cpu = time.perf_counter(), time.process_time()
    count = await work(store, names)
    spent, used = time.perf_counter() - began, time.process_time() - cpu
    resident = psutil.Process().memory_info().rss / MIB
    return {
        "per_s": count / spent,
        "cpu_us": used / count * 1e6,
        "count": count,
        "rss_mib": resident,
    }


def touched(streams: int, most: int | None) -> Iterator[str]:
    """Names of all streams, or of `most` of them, spread evenly."""
    step = 1 if most is None else max(1, streams // most)
    return map(name, range(0, streams, step))


async def run(
    streams: int, folder: Path, settings: StoreSettings, most: int | None
) -> dict[str, Any]:
    url = (folder / "store").as_uri()
    results: dict[str, Any] = {"streams": streams, "bare": bare_sync_loop(folder)}
    few = [f"few-{index}" for index in range(FEW)]
    turns = FEW_APPENDS // FEW
    async with open_store(url, settings) as store:
        await store.create_basin(BASIN, BasinConfig(create_stream_on_append=True))
        await append_each(store, iter(few))
        results["rss_before_mib"] = psutil.Process().memory_info().rss / MIB
        results["few"] = await measure(append_each, store, iter(few * turns))
        results["create"] = await measure(append_each, store, map(name, range(streams)))
        results["append"] = await measure(append_each, store, touched(streams, most))
        results["upkeep_s"] = await upkeep(store)
        results["list"] = await measure(list_all, store, iter(()))
        began = time.perf_counter()
    results["close_s"] = time.perf_counter() - began
    began = time.perf_counter()
    async with open_store(url, settings) as store:
        await store.check_tail(BASIN, name(0))
        results["restart_s"] = time.perf_counter() - began
        results["append again"] = await measure(append_each, store, touched(streams, most))
        results["few again"] = await measure(append_each, store, iter(few * turns))
        tail = await store.check_tail(BASIN, name(0))
        assert tail.seq_num == 3, tail
        results["rss_after_mib"] = psutil.Process().memory_info().rss / MIB
    return results


def print_table(results: list[dict[str, Any]]) -> None:
    for result in results:
        few = result["few"]
        print(
            f"\n{result['streams']} streams, {WRITERS} writers (bare write + fsync "
            f"{result['bare']['p50_ms']:.2f} ms)\n"
        )
        print("| what | per second | of 500 streams | CPU us | of 500 streams | resident MiB |")
        print("|---|---|---|---|---|---|")
        for what in ("few", "create", "append", "list", "append again", "few again"):
            row = result[what]
            rate, cpu = row["per_s"] / few["per_s"], row["cpu_us"] / few["cpu_us"]
            print(
                f"| {what} | {row['per_s']:.0f} | {rate:.2f} | {row['cpu_us']:.1f} | {cpu:.2f} | "
                f"{row['rss_mib']:.0f} |"
            )
        print(
            f"\nrestart {result['restart_s']:.2f} s, close {result['close_s']:.2f} s, resident "
            f"{result['rss_before_mib']:.0f} MiB before, {result['rss_after_mib']:.0f} MiB after; "
            f"a pass of upkeep with nothing due {result['upkeep_s'] * 1000:.0f} ms of processor"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=NUMBERS, metavar="N")
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--most", type=int, help="append in turn to so many streams, not to all")
    parser.add_argument("--cold", action="store_true", help="keep no unused stream in memory")
    parser.add_argument("--alone", action="store_true", help="one number, in this process; JSON")
    options = parser.parse_args()
    if options.alone:
        folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=options.folder))
        tune_collector()
        tune_allocator()
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                settings = StoreSettings(fsync=not options.no_fsync)
                if options.cold:
                    settings = replace(settings, idle_streams=WRITERS)
                work = run(options.streams[0], folder, settings, options.most)
                print(json.dumps(runner.run(work)))
        finally:
            shutil.rmtree(folder)
        return
    found = [_in_a_child(number, options) for number in options.streams]
    print_table(found)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1))


def _in_a_child(streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, so that memory is that of one store."""
    command = [sys.executable, "-m", "bench.streams", "--alone", "--streams", str(streams)]
    command += ["--folder", str(options.folder)] + ["--no-fsync"] * options.no_fsync
    command += ["--cold"] * options.cold
    command += ["--most", str(options.most)] if options.most else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
