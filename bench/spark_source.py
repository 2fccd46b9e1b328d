"""Measures reading streams into Spark: `python -m bench.spark_source --help`.

The same records are read from a server by `format("streamfold")`, from Parquet by Spark itself, and
from the server by a Python loop with the official client, one after the other in one run: these
machines are shared, and only ratios travel. Spark's own count of Parquet reads no records, so both
are read with all columns to nowhere as well.
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
from pathlib import Path
from typing import Any

import s2_sdk
from pyspark.sql import DataFrame, SparkSession

from bench.serving import serving
from bench.store import BASIN, plain_python, processor_times, stolen_share
from streamfold.model.records import Record
from streamfold.records.columns import encode_append
from streamfold.spark import local_session
from streamfold.spark.connection import Connection
from streamfold.spark.endpoint import Endpoint
from streamfold.spark.streams import Streams

STREAM = "records"
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
    with Connection(Endpoint(url, BASIN)) as connection:
        streams = Streams(connection)
        for _ in range(records // APPEND):
            streams.append(STREAM, raw)
    return records / (time.perf_counter() - began)


def rate(records: int, work: Callable[[], object]) -> dict[str, Any]:
    """Records per second: median and all of them, the first one after a warm-up."""
    work()
    rates = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        rates.append(records / (time.perf_counter() - began))
    return {"per_second": statistics.median(rates), "all": rates}


async def sdk_loop(url: str, records: int) -> float:
    """Records per second of a loop that looks at every record."""
    endpoints = s2_sdk.Endpoints(account=url, basin=url)
    found = size = 0
    async with s2_sdk.S2("none", endpoints=endpoints) as client:
        stream = client.basin(BASIN).stream(STREAM)
        began = time.perf_counter()
        limit = s2_sdk.ReadLimit(count=records)
        async for batch in stream.read_session(start=s2_sdk.SeqNum(0), limit=limit):
            for record in batch.records:
                found += 1
                size += len(record.body)
    if found != records or size != records * SIZE:
        raise RuntimeError(f"the client read {found} records of {size} bytes, not {records}")
    return found / (time.perf_counter() - began)


def measure(spark: SparkSession, url: str, folder: Path, records: int) -> dict[str, Any]:
    """All figures, by name."""
    options = {"endpoint": url, "basin": BASIN, "stream": STREAM}

    def source(**more: str) -> DataFrame:
        return spark.read.format("streamfold").options(**options, **more).load()

    def count() -> None:
        found = source().count()
        if found != records:
            raise RuntimeError(f"Spark counted {found} records, not {records}")

    def to_parquet(frame: DataFrame, name: str) -> None:
        frame.write.mode("overwrite").parquet(str(folder / name))

    def all_columns(frame: DataFrame) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def one_record() -> None:
        source(endingOffsets=json.dumps({STREAM: 1})).count()

    figures = {
        "source, queries for one record": rate(1, one_record),
        "source, count": rate(records, count),
        "source, all columns to nowhere": rate(records, lambda: all_columns(source())),
        "source, to Parquet": rate(records, lambda: to_parquet(source(), "from-source")),
    }
    parquet = spark.read.parquet(str(folder / "from-source"))
    figures["Spark's Parquet, all columns to nowhere"] = rate(records, lambda: all_columns(parquet))
    figures["Spark's Parquet, to Parquet"] = rate(records, lambda: to_parquet(parquet, "copy"))
    loops = [asyncio.run(sdk_loop(url, min(records, SDK_RECORDS))) for _ in range(2)]
    figures["loop with the S2 client"] = {"per_second": max(loops), "all": loops}
    return figures


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    def of(name: str) -> float:
        return float(figures[name]["per_second"])

    parquet = "Spark's Parquet"
    return {
        "count / loop": of("source, count") / of("loop with the S2 client"),
        "to Parquet / loop": of("source, to Parquet") / of("loop with the S2 client"),
        "all columns / Spark's Parquet": of("source, all columns to nowhere")
        / of(f"{parquet}, all columns to nowhere"),
        "to Parquet / Spark's Parquet": of("source, to Parquet") / of(f"{parquet}, to Parquet"),
    }


def run(records: int, backend: str, folder: Path) -> dict[str, Any]:
    since = processor_times()
    spark = local_session("bench", settings={"spark.ui.showConsoleProgress": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    with serving(backend, [STREAM], folder) as server:
        url = f"http://127.0.0.1:{server.port}"
        filled = fill(url, records)
        figures = measure(spark, url, folder, records)
    spark.stop()
    return {
        "records": records,
        "backend": backend,
        "appended_per_second": filled,
        "figures": figures,
        "ratios": ratios(figures),
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
        "load": os.getloadavg()[1],
    }


def report(results: dict[str, Any]) -> None:
    print("| measure | records/s |\n|---|---|")
    for name, figure in results["figures"].items():
        print(f"| {name} | {figure['per_second']:,.2f} |")
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
    parser.add_argument("--backend", choices=("memory", "local"), default="local")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        results = run(QUICK if options.quick else FULL, options.backend, folder)
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
