"""Measures reading streams into Spark: `python -m bench.spark_source --help`.

The same records are read from a server by `format("streamfold")`, by the same from the server's storage
past the server, from Parquet by Spark itself, and from the server by a Python loop with the official
client, in turns in one run: these machines are shared, and only ratios travel. Spark's own count of
Parquet reads no records, so both are read with all columns to nowhere as well. Processor time is that
of the server, of Spark's Java process, and of Python: Spark's workers, or the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import s2_sdk
from pyspark.sql import DataFrame, SparkSession

from bench.serving import serving
from bench.store import BASIN, PathNotTakenError, plain_python, processor_times, stolen_share
from streamfold.model.records import Record
from streamfold.records.protobuf import encode_append
from streamfold.spark import local_session
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls
from streamfold.spark.stream.options import parse_source
from streamfold.spark.stream.range_reads import transfer
from streamfold.spark.stream.stored import StoredBasin

STREAM, LOOP = "records", "loop with the S2 client"
#: Bytes of a body, and records of one append.
SIZE, APPEND = 200, 1000
FULL, QUICK = 5_000_000, 500_000
#: Records that the client's loop reads at most: its rate does not depend on their number.
SDK_RECORDS = 500_000
REPEATS = 3


def fill(url: str, records: int) -> float:
    """Append the records; returns how many went in per second."""
    body = os.urandom(SIZE // 2).hex().encode()
    raw = encode_append(Record(body)) * APPEND
    began = time.perf_counter()
    with ServerConnection(Endpoint(url, BASIN)) as connection:
        streams = StreamCalls(connection)
        for _ in range(records // APPEND):
            streams.append(STREAM, raw)
    return records / (time.perf_counter() - began)


def check_sessions(url: str) -> None:
    """Fail if reads would fall back from sessions, which are measured, to pages."""
    with ServerConnection(Endpoint(url, BASIN)) as connection:
        if not any(len(piece) for piece in transfer(connection, STREAM, 0, 1, sessions=True)):
            raise PathNotTakenError("the session of a read returned nothing")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one piece of work took."""

    per_second: float
    #: Microseconds of processor per record, by kind of process.
    cpu_us: dict[str, float]


def processors(server: int) -> dict[str, float]:
    """Processor seconds so far, by kind of process."""
    spent = {"server": 0.0, "java": 0.0, "python": time.process_time()}
    for process in psutil.Process().children(recursive=True):
        kind = "java" if process.name() == "java" else "python"
        spent["server" if process.pid == server else kind] += sum(process.cpu_times()[:2])
    return spent


def turn(server: int, records: int, work: Callable[[], object]) -> Turn:
    spent, began = processors(server), time.perf_counter()
    work()
    seconds, now = time.perf_counter() - began, processors(server)
    each = {kind: (now[kind] - spent[kind]) * 1e6 / records for kind in now}
    return Turn(records / seconds, each)


def figure(turns: list[Turn]) -> dict[str, Any]:
    """Medians, and all rates: what is odd about them is the machine's."""
    rates = [turn.per_second for turn in turns]
    cpu = {kind: statistics.median(t.cpu_us[kind] for t in turns) for kind in turns[0].cpu_us}
    return {"per_second": statistics.median(rates), "cpu_us": cpu, "all": rates}


async def sdk_loop(url: str, records: int) -> None:
    """Look at every record."""
    endpoints = s2_sdk.Endpoints(account=url, basin=url)
    found = size = 0
    async with s2_sdk.S2("none", endpoints=endpoints) as client:
        stream = client.basin(BASIN).stream(STREAM)
        limit = s2_sdk.ReadLimit(count=records)
        async for batch in stream.read_session(start=s2_sdk.SeqNum(0), limit=limit):
            for record in batch.records:
                found += 1
                size += len(record.body)
    if found != records or size != records * SIZE:
        raise RuntimeError(f"the client read {found} records of {size} bytes, not {records}")


def works(
    spark: SparkSession, url: str, folder: Path, records: int
) -> dict[str, tuple[int, Callable[[], object]]]:
    """What is measured, by name: how many records it reads, and how."""
    options = {"endpoint": url, "basin": BASIN, "stream": STREAM}

    def source(**more: str) -> DataFrame:
        return spark.read.format("streamfold").options(**options, **more).load()

    def count(**more: str) -> None:
        found = source(**more).count()
        if found != records:
            raise RuntimeError(f"Spark counted {found} records, not {records}")

    def parquet() -> DataFrame:
        return spark.read.parquet(str(folder / "from-source"))

    def to_parquet(frame: DataFrame, name: str) -> None:
        frame.write.mode("overwrite").parquet(str(folder / name))

    def to_nowhere(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    stored = {"store": (folder / "served").as_uri(), "basin": BASIN, "stream": STREAM}
    if not isinstance(parse_source(stored).origin, StoredBasin):
        raise PathNotTakenError(f"{stored} are not read from storage")

    def count_stored(**more: str) -> None:
        found = spark.read.format("streamfold").options(**stored, **more).load().count()
        if found != records:
            raise RuntimeError(f"Spark counted {found} records, not {records}")

    one = json.dumps({STREAM: 1})
    some = min(records, SDK_RECORDS)
    return {
        LOOP: (some, lambda: asyncio.run(sdk_loop(url, some))),
        "source, query for one record": (1, lambda: source(endingOffsets=one).count()),
        "source, count": (records, count),
        "source, count by columns=seq_num": (records, lambda: count(columns="seq_num")),
        "source, all columns to nowhere": (records, lambda: to_nowhere(source())),
        "store, count": (records, count_stored),
        "store, count by columns=seq_num": (records, lambda: count_stored(columns="seq_num")),
        "source, to Parquet": (records, lambda: to_parquet(source(), "from-source")),
        "Spark's Parquet, all columns to nowhere": (records, lambda: to_nowhere(parquet())),
        "Spark's Parquet, to Parquet": (records, lambda: to_parquet(parquet(), "copy")),
    }


def measure(
    work: dict[str, tuple[int, Callable[[], object]]], server: int, repeats: int
) -> dict[str, Any]:
    """All figures, by name; the first turn of each, which compiles and loads, does not count."""
    turns: dict[str, list[Turn]] = {name: [] for name in work}
    for _ in range(repeats + 1):
        for name, (records, run_it) in work.items():
            turns[name].append(turn(server, records, run_it))
    return {name: figure(found[1:]) for name, found in turns.items()}


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    def ratio(name: str, beside: str) -> float:
        return float(figures[name]["per_second"]) / float(figures[beside]["per_second"])

    counted, parquet = "source, count by columns=seq_num", "Spark's Parquet"
    return {
        "count / loop": ratio("source, count", LOOP),
        "count by columns=seq_num / loop": ratio(counted, LOOP),
        "count from the store / loop": ratio("store, count", LOOP),
        "count from the store by columns=seq_num / loop": ratio(
            "store, count by columns=seq_num", LOOP
        ),
        "all columns to nowhere / loop": ratio("source, all columns to nowhere", LOOP),
        "to Parquet / loop": ratio("source, to Parquet", LOOP),
        "all columns / Spark's Parquet": ratio(
            "source, all columns to nowhere", f"{parquet}, all columns to nowhere"
        ),
        "to Parquet / Spark's Parquet": ratio("source, to Parquet", f"{parquet}, to Parquet"),
    }


def run(records: int, repeats: int, folder: Path) -> dict[str, Any]:
    since = processor_times()
    spark = local_session("bench", settings={"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    # Storage that Spark can read as well.
    with serving("local", [STREAM], folder) as server:
        url = f"http://127.0.0.1:{server.port}"
        filled = fill(url, records)
        check_sessions(url)
        work = works(spark, url, folder, records)
        figures = measure(work, server.pid, repeats)
    spark.stop()
    return {
        "records": records,
        "appended_per_second": filled,
        "figures": figures,
        "ratios": ratios(figures),
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
        "load": os.getloadavg()[1],
    }


def report(results: dict[str, Any]) -> None:
    print("| measure | records/s | processor us per record: server | Java | Python |")
    print("|---|---|---|---|---|")
    for name, found in results["figures"].items():
        cpu = (f"{found['cpu_us'][kind]:,.2f}" for kind in ("server", "java", "python"))
        print(f"| {name} | {found['per_second']:,.2f} | {' | '.join(cpu)} |")
    print("\n| ratio | |\n|---|---|")
    for name, value in results["ratios"].items():
        print(f"| {name} | {value:.2f}x |")
    print(
        f"\n{results['records']} records of {SIZE} bytes; {os.cpu_count()} cores for server and Spark; "
        f"load {results['load']:.1f}, {results['stolen']:.0%} of the processors' time went to others"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} records instead of {FULL}")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="turns of each measurement")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        records = QUICK if options.quick else FULL
        results = run(records, options.repeats, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(results)
    target = Path(__file__).parent / "results" / "spark_source.json"
    target.parent.mkdir(exist_ok=True)
    kept = json.loads(target.read_text()) if target.exists() else {}
    size = "quick" if options.quick else "full"
    target.write_text(json.dumps(kept | {size: results}, indent=2))


if __name__ == "__main__":
    main()
