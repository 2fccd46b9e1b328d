"""Measures the store in its own process: `make bench`, or `python -m bench.store --help`.

Every backend runs in a child process, so that memory is its own. Figures are compared with a bare
write-and-sync loop of the same run: these machines are shared, and only ratios travel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

import psutil

from bench.bodies import noise
from streamfold.model.records import Record
from streamfold.records.batch import RecordBatch
from streamfold.server.main import loop_factory, tune_allocator, tune_collector
from streamfold.store import ReadRequest, StoreSettings, StreamStore, from_seq_num, open_store

BASIN = "bench-basin"
BACKENDS = ("memory", "local", "local+fsync")
MIB = 1 << 20


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def bare_sync_loop(folder: Path, count: int = 300) -> dict[str, float]:
    """What a durable write costs without us: a new file of 300 bytes, synced, and its folder."""
    handle = os.open(folder, os.O_RDONLY)
    times = []
    for number in range(count):
        began = time.perf_counter()
        file = os.open(folder / f"bare-{number}", os.O_CREAT | os.O_WRONLY)
        os.write(file, b"x" * 300)
        os.fsync(file)
        os.close(file)
        os.fsync(handle)
        times.append(time.perf_counter() - began)
    os.close(handle)
    return {"p50_ms": percentile(times, 0.5) * 1000, "p99_ms": percentile(times, 0.99) * 1000}


def plain_python() -> float:
    """Microseconds for a fixed piece of Python: how fast this machine is just now."""
    return min(timeit.repeat("sum(range(1000))", number=2000, repeat=5)) / 2000 * 1e6


def stolen_share(since: tuple[float, float]) -> float:
    """Part of the processors' time that the host gave to others since `since`."""
    total, stolen = processor_times()
    return (stolen - since[1]) / max(1e-9, total - since[0])


def processor_times() -> tuple[float, float]:
    times = psutil.cpu_times()
    return sum(times), getattr(times, "steal", 0.0)


async def measure_acks(
    store: StreamStore, writers: int, streams: int, seconds: float
) -> dict[str, float]:
    """Concurrent single-record appends of 256 bytes: acks per second, and their latency."""
    names = [f"acks-{index}" for index in range(streams)]
    await asyncio.gather(*(store.ensure_stream(BASIN, name) for name in names))
    record = [Record(b"x" * 256)]
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def write(index: int) -> None:
        turn = index
        while (began := time.perf_counter()) < end:
            await store.append(BASIN, names[turn % streams], RecordBatch.of(record))
            latencies.append(time.perf_counter() - began)
            turn += writers

    began = time.perf_counter()
    await asyncio.gather(*(write(index) for index in range(writers)))
    spent = time.perf_counter() - began
    return {
        "acks_per_s": len(latencies) / spent,
        "p50_ms": percentile(latencies, 0.5) * 1000,
        "p99_ms": percentile(latencies, 0.99) * 1000,
    }


async def measure_throughput(
    store: StreamStore, mebibytes: int, stream: str = "bulk"
) -> dict[str, float]:
    """Full batches of 1 KiB records by 8 writers to one stream; then a catch-up read of them all."""
    await store.ensure_stream(BASIN, stream)
    batch = RecordBatch.of([Record(noise(1000, number)) for number in range(1000)])
    rounds = mebibytes * MIB // (8 * batch.metered)

    async def write() -> None:
        for _ in range(rounds):
            await store.append(BASIN, stream, batch)

    began = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(8)))
    written = rounds * 8 * batch.metered / MIB
    appended = time.perf_counter() - began
    began = time.perf_counter()
    read = await catch_up(store, stream)
    return {
        "append_mib_per_s": written / appended,
        "catch_up_mib_per_s": read / MIB / (time.perf_counter() - began),
    }


async def catch_up(store: StreamStore, stream: str) -> int:
    """Read a stream to its tail, in the bytes that a protobuf response has; return how many."""
    size = 0
    tail = (await store.check_tail(BASIN, stream)).seq_num
    request = ReadRequest(from_seq_num(0), count=int(tail))
    async with store.follow(BASIN, stream, request) as session:
        async for batch in session:
            size += sum(map(len, batch.parts))
    return size


async def measure_restart(url: str, settings: StoreSettings) -> dict[str, float]:
    """Open a store of a million records that was killed, to the first answer."""
    began = time.perf_counter()
    async with open_store(url, settings) as store:
        tail = await store.check_tail(BASIN, "bulk")
        spent = time.perf_counter() - began
    return {"restart_s": spent, "restart_records": float(tail.seq_num)}


class PathNotTakenError(RuntimeError):
    """What was measured is not what the benchmark names."""


async def run_backend(backend: str, folder: Path, quick: bool) -> dict[str, Any]:
    settings = StoreSettings(fsync=backend == "local+fsync")
    url = "memory:" if backend == "memory" else (folder / "store").as_uri()
    process = psutil.Process()
    seconds = 1.0 if quick else 4.0
    since = processor_times()
    results: dict[str, Any] = {"backend": backend, "bare": bare_sync_loop(folder)}
    results["plain_python_us"] = plain_python()
    async with open_store(url, settings) as store:
        await store.create_basin(BASIN)
        results["acks"] = {}
        for writers in (1, 64, 512):
            for streams in (1, 500):
                measured = await measure_acks(store, writers, streams, seconds)
                results["acks"][f"{writers} writers, {streams} streams"] = measured
        results["rss_after_acks_mib"] = process.memory_info().rss / MIB
        results |= await measure_throughput(store, 128 if quick else 1024)
        results["rss_after_bulk_mib"] = process.memory_info().rss / MIB
    if backend != "memory":
        results |= await measure_restart(url, settings)
    results["stolen"] = stolen_share(since)
    return results


async def run_soak(folder: Path, seconds: float) -> None:
    """Full speed for long, with memory printed as it goes: it must stay flat."""
    process = psutil.Process()
    batch = RecordBatch.of([Record(b"x" * 1000)] * 100)
    async with open_store((folder / "store").as_uri()) as store:
        await store.create_basin(BASIN)
        names = [f"soak-{index}" for index in range(50)]
        for name in names:
            await store.ensure_stream(BASIN, name)
        end = time.perf_counter() + seconds
        written = 0

        async def write(index: int) -> None:
            nonlocal written
            while time.perf_counter() < end:
                await store.append(BASIN, names[index % 50], batch)
                written += batch.metered

        async def report() -> None:
            began = time.perf_counter()
            while time.perf_counter() < end:
                await asyncio.sleep(seconds / 10)
                spent = time.perf_counter() - began
                rss = process.memory_info().rss / MIB
                print(f"{spent:6.0f} s {written / MIB / spent:8.1f} MiB/s {rss:8.0f} MiB resident")

        await asyncio.gather(report(), *(write(index) for index in range(64)))


def print_table(results: list[dict[str, Any]]) -> None:
    columns = [result["backend"] for result in results]
    rows: list[tuple[str, list[str]]] = []
    for case in results[0]["acks"]:
        cells = [
            "{acks_per_s:.0f}/s  p50 {p50_ms:.2f}  p99 {p99_ms:.2f} ms".format(**r["acks"][case])
            for r in results
        ]
        rows.append((f"acks of 256 B, {case}", cells))
    for key, label in (
        ("append_mib_per_s", "append MiB/s, 1 KiB records in full batches"),
        ("catch_up_mib_per_s", "catch-up read MiB/s, protobuf form"),
        ("restart_s", "restart, s"),
        ("restart_records", "  records in that store"),
        ("rss_after_acks_mib", "resident MiB after the acks"),
        ("rss_after_bulk_mib", "resident MiB after the bulk append and read"),
        (
            "plain_python_us",
            "sum(range(1000)) in plain Python, us: the speed of the machine just then",
        ),
        ("stolen", "part of the processors' time that the host gave to others"),
    ):
        rows.append((label, [f"{r[key]:.2f}" if key in r else "-" for r in results]))
    rows.append(
        (
            "bare write + fsync + folder fsync, p50 ms",
            [f"{r['bare']['p50_ms']:.2f}" for r in results],
        )
    )
    rows.append(
        (
            "single-writer ack / bare write+fsync",
            [
                f"{r['acks']['1 writers, 1 streams']['p50_ms'] / r['bare']['p50_ms']:.2f}"
                for r in results
            ],
        )
    )
    print("| measure | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for label, cells in rows:
        print(f"| {label} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=BACKENDS, help="measure one, print JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds per backend")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="full speed, memory printed")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="streamfold-bench-", dir=options.folder))
    try:
        if options.soak:
            asyncio.run(run_soak(folder, options.soak))
        elif options.backend:
            print(json.dumps(run_as_a_server_would(options.backend, folder, options.quick)))
        else:
            run_all(options.quick, options.folder)
    finally:
        shutil.rmtree(folder)


def run_as_a_server_would(backend: str, folder: Path, quick: bool) -> dict[str, Any]:
    """With the event loop and the memory management that `streamfold serve` has."""
    tune_collector()
    tune_allocator()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_backend(backend, folder, quick))


def run_all(quick: bool, folder: Path) -> None:
    results = []
    for backend in BACKENDS:
        command = [
            sys.executable,
            "-m",
            "bench.store",
            "--backend",
            backend,
            "--folder",
            str(folder),
        ]
        done = subprocess.run(
            command + ["--quick"] * quick, check=True, stdout=subprocess.PIPE, text=True
        )
        results.append(json.loads(done.stdout))
    target = Path(__file__).parent / "results"
    target.mkdir(exist_ok=True)
    (target / "store.json").write_text(json.dumps(results, indent=2))
    print_table(results)
    spread = statistics.mean(result["bare"]["p50_ms"] for result in results)
    print(f"\n{os.cpu_count()} cores; a bare write+fsync took {spread:.2f} ms on average")


if __name__ == "__main__":
    main()
