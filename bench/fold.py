"""Measures a re-base beside polars and DuckDB: `python -m bench.fold --help`.

An archive of one base and many diffs is folded into a new base: by the snapshot writer on local
Spark, one task per bucket, and by polars and DuckDB, each in one process that reads the same files
and writes one Parquet file. Each is a process of its own; memory is that of all its processes
together, shared pages counted once. Starting Spark and its Python workers is not part of the time: a
writer has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from bench.store import processor_times, stolen_share
from streamfold.archive import ArchiveWriter, Destination, Manifest, Mirrors, TableSchema
from streamfold.archive.formats import format_of
from streamfold.archive.parts import write_part
from streamfold.archive.positions import SEQ_NUM
from streamfold.spark.writer.buckets import bucket_numbers

MIB = 1 << 20
BUCKETS = 16
#: Changes of one diff: what a writer has at most in one batch.
DIFF_CHANGES = 1_000_000
#: Rows in a batch as they are made.
ARRIVING = 50_000
#: Seconds between two looks at the memory of a subject.
LOOK = 0.1
SCHEMA = TableSchema.of(
    pa.schema([("key", pa.string()), ("seq", pa.int64()), ("payload", pa.string())]), ["key"]
)
SUBJECTS = ("spark", "polars", "duckdb")


def rows(keys: Any, seq: int) -> pa.RecordBatch:
    """Rows of about 200 bytes, by key."""
    numbers = pa.array(np.char.add("user-", np.char.zfill(keys.astype("U10"), 10)))
    words = np.array(
        [f'{{"name":"{"abcdefgh"[n % 8] * 20}","city":"{n:060d}"}}' for n in range(997)]
    )
    payload = np.char.add(words[(keys + seq) % 997], np.char.zfill(keys.astype("U10"), 90))
    seqs = pa.array(np.full(len(keys), seq, np.int64))
    return pa.RecordBatch.from_arrays([numbers, seqs, pa.array(payload)], schema=SCHEMA.arrow)


def changes(keys: Any, seq: int) -> pa.RecordBatch:
    """Nine updates to one delete."""
    found = rows(keys, seq)
    deleted = keys % 10 == seq % 10
    after = pa.StructArray.from_arrays(
        found.columns, fields=list(SCHEMA.arrow), mask=pa.array(deleted)
    )
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.where(deleted, "DELETE", "UPDATE")),
            pa.StructArray.from_arrays(
                [found["key"]], fields=list(SCHEMA.changes.field("key").type)
            ),
            pa.nulls(len(keys), SCHEMA.changes.field("before").type),
            after,
        ],
        schema=SCHEMA.changes,
    )


def in_batches(make: Callable[[Any, int], pa.RecordBatch], keys: Any, seq: int) -> list[Any]:
    return [make(keys[n : n + ARRIVING], seq) for n in range(0, len(keys), ARRIVING)]


async def write_archive(folder: Path, keys: int, count: int) -> int:
    """A base of all keys and diffs that change so many of them in all; returns the diffs."""
    place = Destination.open(folder.as_uri())
    form = format_of("parquet")
    writer = await ArchiveWriter.open(
        "bench", SCHEMA, [place], formats=[form], diff_formats=[form], writer_id="bench"
    )
    every = np.arange(keys)
    named = [bucket_numbers([batch["key"]], BUCKETS) for batch in in_batches(rows, every, 0)]
    numbers = np.concatenate(named)
    base = {b: in_batches(rows, every[numbers == b], 0) for b in range(BUCKETS)}
    await writer.write_base(base, "0", reason="first")
    chance, mirrors = np.random.default_rng(7), Mirrors([place], SEQ_NUM)
    diffs = -(-count // min(DIFF_CHANGES, keys))
    for seq in range(1, diffs + 1):
        chosen = np.sort(chance.choice(keys, min(count // diffs, keys), replace=False))
        plan = writer.plan_diff(str(seq - 1), str(seq))
        parts = [
            await write_part(plan, in_batches(changes, own, seq), mirrors, bucket=b)
            for b in range(BUCKETS)
            if len(own := chosen[numbers[chosen] == b])
        ]
        await writer.commit_diff(plan, parts)
    return diffs


def files_of(folder: Path) -> tuple[list[str], list[list[str]]]:
    """The files of the base, and of each diff in order."""
    manifest: Manifest = asyncio.run(_manifest(folder))
    base = [str(folder / part.path) for part in manifest.base.parts()]
    return base, [[str(folder / part.path) for part in diff.parts()] for diff in manifest.chain]


async def _manifest(folder: Path) -> Manifest:
    stored = await Destination.open(folder.as_uri()).read(SEQ_NUM)
    assert stored is not None
    return stored.manifest


def fold_with_spark(folder: Path) -> Callable[[], int]:
    from streamfold.snapshotter.decoding import EnvelopeDecoder
    from streamfold.spark.writer import DeadLetterFolder, Place, TableJob, writer_session
    from streamfold.spark.writer.driver_loop import DriverLoop
    from streamfold.spark.writer.pipeline import TablePipeline
    from streamfold.spark.writer.published import PublishedTable

    place, form = Place(folder.as_uri()), format_of("parquet")
    job = TableJob(
        table="bench", stream="bench", source={}, decoder=EnvelopeDecoder(("key",)),
        places=(place,), formats=(form,), diff_formats=(form,),
        dead_letters=DeadLetterFolder(place, "bench", "bench"), writer_id="bench", schema=SCHEMA,
    )  # fmt: skip
    spark = writer_session()
    cores = spark.sparkContext.defaultParallelism
    spark.range(0, 64, 1, 8 * cores).mapInArrow(_loaded, "id long").count()

    def fold() -> int:
        with DriverLoop() as loop:
            published = PublishedTable(job, loop)
            published.open()
            return TablePipeline(spark, job, published).rebase("measured").base.row_count or 0

    return fold


def _loaded(batches: Any) -> Any:
    """Load in a worker what the fold needs."""
    import streamfold.spark.writer.fold  # noqa: F401

    yield from batches


def fold_with_polars(folder: Path) -> Callable[[], int]:
    import polars as pl

    def fold() -> int:
        base, diffs = files_of(folder)
        found = pl.concat(
            pl.scan_parquet(paths).select(
                pl.col("action"),
                pl.col("key").struct.field("key").alias("key"),
                pl.col("after").struct.field("seq").alias("seq"),
                pl.col("after").struct.field("payload").alias("payload"),
                pl.lit(number).alias("diff"),
            )
            for number, paths in enumerate(diffs)
        )
        last = found.unique("key", keep="last", maintain_order=True)
        alive = last.filter(pl.col("action") != "DELETE").select("key", "seq", "payload")
        kept = pl.scan_parquet(base).join(last.select("key"), on="key", how="anti")
        result = pl.concat([kept, alive]).collect()
        result.write_parquet(folder / "polars.parquet", compression="zstd")
        return len(result)

    return fold


def fold_with_duckdb(folder: Path) -> Callable[[], int]:
    import duckdb

    def fold() -> int:
        base, diffs = files_of(folder)
        parts = " UNION ALL ".join(
            f"SELECT key.key AS key, action, after.seq AS seq, after.payload AS payload, {n} AS diff "
            f"FROM read_parquet({paths})"
            for n, paths in enumerate(diffs)
        )
        target = str(folder / "duckdb.parquet")
        with duckdb.connect() as connection:
            connection.execute(
                f"COPY (WITH last AS (SELECT key, arg_max(struct_pack(action, seq, payload), diff) "
                f"AS c FROM ({parts}) GROUP BY key) "
                f"SELECT b.key, b.seq, b.payload FROM read_parquet({base}) AS b WHERE NOT EXISTS "
                f"(SELECT 1 FROM last WHERE last.key = b.key) "
                f"UNION ALL SELECT key, c.seq, c.payload FROM last WHERE c.action <> 'DELETE') "
                f"TO '{target}' (FORMAT parquet, COMPRESSION zstd)"
            )
            count = connection.execute(f"SELECT count(*) FROM '{target}'").fetchone()
        return int(count[0]) if count else 0

    return fold


FOLDS = {"spark": fold_with_spark, "polars": fold_with_polars, "duckdb": fold_with_duckdb}


def be_subject(name: str, folder: Path) -> None:
    fold = FOLDS[name](folder)
    print("ready", flush=True)
    began = time.perf_counter()
    found = fold()
    print(json.dumps({"seconds": time.perf_counter() - began, "rows": found}), flush=True)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run one subject, and look at its memory while it folds."""
    command = [sys.executable, "-m", "bench.fold", "--subject", name, "--folder", str(folder)]
    before = processor_times()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "ready":
        assert process.poll() is None, f"{name} did not start"
    peak, driver = 0, 0
    while process.poll() is None:
        parts = _memory(psutil.Process(process.pid))
        peak, driver = max(peak, sum(parts)), max(driver, parts[0] if parts else 0)
        time.sleep(LOOK)
    found: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    process.stdout.close()
    memory = {"peak_mib": round(peak / MIB), "driver_python_mib": round(driver / MIB)}
    stolen = stolen_share(before)
    return {"subject": name, **found, **memory, "stolen": round(stolen, 3)}


def _memory(process: psutil.Process) -> list[int]:
    found = []
    with suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                found.append(one.memory_full_info().pss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=lambda text: int(text.replace("_", "")), nargs="+")
    parser.add_argument("--keys", type=lambda text: int(text.replace("_", "")), default=1_000_000)
    parser.add_argument("--results", type=Path, default=Path("bench/results/fold.json"))
    parser.add_argument("--subject", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.subject:
        be_subject(given.subject, given.folder)
        return
    results = []
    for count in given.changes or [5_000_000, 20_000_000]:
        with tempfile.TemporaryDirectory() as folder:
            diffs = asyncio.run(write_archive(Path(folder), given.keys, count))
            print(f"{count:,} changes in {diffs} diffs, over {given.keys:,} keys")
            found = [measure(name, Path(folder)) for name in reversed(SUBJECTS)]
            assert len({one["rows"] for one in found}) == 1, found
        reference = next(one for one in found if one["subject"] == "polars")
        for one in found:
            ratio = one["seconds"] / reference["seconds"]
            print(
                f"  {one['subject']:<8} {one['seconds']:7.2f} s  {ratio:5.2f} x polars"
                f"  {one['peak_mib']:6} MiB at most"
            )
            results.append({"changes": count, "keys": given.keys, **one, "of_polars": ratio})
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
