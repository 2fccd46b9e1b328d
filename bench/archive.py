"""Measures the archive's formats beside pyarrow and DuckDB: `python -m bench.archive --help`.

The same rows go through every format, each in a process of its own, so that memory is its own: 10
columns, about 200 bytes a row. Rows come in batches and leave in batches, to and from a local file.
The machines are shared, so each figure is the best of a few rounds, and only ratios travel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.store import plain_python, processor_times, stolen_share
from streamfold.archive import ArchiveWriter, Destination
from streamfold.archive import open as open_archive
from streamfold.archive.formats import format_of
from streamfold.archive.schema import TableSchema

MIB = 1 << 20
#: Rows in a batch as they arrive from a source.
ARRIVING = 50_000
ROUNDS = 3
#: Seconds after which no further round begins.
ENOUGH = 15.0

OURS = {
    "parquet": ("parquet", "none"),
    "protobuf-typed": ("protobuf-typed", "none"),
    "jsonl": ("jsonl", "none"),
    "jsonl+zstd": ("jsonl", "zstd"),
    "jsonl+gzip": ("jsonl", "gzip"),
    "protobuf": ("protobuf", "none"),
}
#: Tables rebuilt by the reader, and the share of rows that diffs after the base changed.
REBUILT = {"rebuilt parquet": 0.0, "rebuilt parquet, 10% changed": 0.1}
#: The files of that archive read by pyarrow, base and diffs, one after the other: nothing is folded.
PLAIN_FILES = "pyarrow.parquet, base and diffs"
#: Diffs over which those changes are spread.
DIFFS = 10
#: Those that do the same stand beside each other: the machine changes while this runs.
SUBJECTS = (
    "parquet",
    "pyarrow.parquet",
    "rebuilt parquet",
    "rebuilt parquet, 10% changed",
    PLAIN_FILES,
    "duckdb parquet",
    "protobuf-typed",
    "jsonl",
    "duckdb json",
    "jsonl+zstd",
    "jsonl+gzip",
    "protobuf",
)

#: These have a second turn at the end: their ratio is what matters, and a busy minute would decide it.
COMPARED = ("parquet", "pyarrow.parquet", "duckdb parquet", *REBUILT, PLAIN_FILES)
#: What a subject's times are divided by, where it is not `pyarrow.parquet`.
PEERS = {"rebuilt parquet, 10% changed": PLAIN_FILES}

Write = Callable[[Path, list[pa.RecordBatch]], None]
Read = Callable[[Path], int]


def rows(count: int) -> list[pa.RecordBatch]:
    """The table, the same in every process."""
    chance = np.random.default_rng(7)
    numbers = np.arange(count)
    words = np.array(["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven"])
    text = words[chance.integers(0, 8, (count, 6))]
    table = pa.table(
        {
            "id": pa.array(numbers),
            "account": pa.array(chance.integers(0, 1 << 62, count)),
            "balance": pa.array(chance.integers(0, 10**9, count)).cast(pa.decimal128(21, 2)),
            "score": pa.array(chance.random(count)),
            "active": pa.array(chance.random(count) < 0.9),
            "created": pa.array(chance.integers(0, 1 << 50, count)).cast(pa.timestamp("us", "UTC")),
            "born": pa.array(chance.integers(0, 20_000, count).astype("int32")).cast(pa.date32()),
            "country": pa.array(text[:, 0]),
            "email": pa.array([f"customer.number.{n}@mail.example.com" for n in numbers]),
            "note": pa.array(
                [" ".join(line) + f" {n}, and no more to say" for n, line in enumerate(text)]
            ),
        }
    )
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches(max_chunksize=ARRIVING)
    return batches


def ours(name: str, schema: TableSchema) -> tuple[Write, Read]:
    chosen = format_of(*OURS[name])

    def write(path: Path, batches: list[pa.RecordBatch]) -> None:
        with path.open("wb") as sink:
            chosen.write_rows(sink, schema, batches)

    def read(path: Path) -> int:
        with path.open("rb") as source:
            return sum(len(batch) for batch in chosen.read_rows(source, schema))

    return write, read


def pyarrow_parquet() -> tuple[Write, Read]:
    def write(path: Path, batches: list[pa.RecordBatch]) -> None:
        pq.write_table(pa.Table.from_batches(batches), path, compression="zstd")

    def read(path: Path) -> int:
        return sum(len(batch) for batch in pq.ParquetFile(path).iter_batches())

    return write, read


def duckdb_files(options: str, function: str) -> tuple[Write, Read]:
    def write(path: Path, batches: list[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(batches)
        with duckdb.connect() as db:
            db.register("given", table)
            db.execute(f"copy given to '{path}' ({options})")

    def read(path: Path) -> int:
        with duckdb.connect() as db:
            found = db.sql(f"select * from {function}('{path}')")
            return sum(len(batch) for batch in found.to_arrow_reader())

    return write, read


def rebuilt(changed: float, schema: TableSchema) -> tuple[Write, Read]:
    """The whole way: a base and diffs committed by the writer, files checked, changes folded in."""

    async def publish(path: Path, batches: list[pa.RecordBatch]) -> None:
        destination = Destination.open(path.as_uri())
        form = format_of("parquet")
        writer = await ArchiveWriter.open(
            "t", schema, [destination], formats=[form], writer_id="bench"
        )
        await writer.write_base(batches, "0", reason="first")
        table = pa.Table.from_batches(batches)
        chosen = np.random.default_rng(3).permutation(len(table))[: int(len(table) * changed)]
        for number, rows in enumerate(np.array_split(np.sort(chosen), DIFFS) if changed else []):
            update = updates(table.take(pa.array(rows)), schema)
            await writer.write_diff([update], str(number), str(number + 1))

    async def rebuild(path: Path) -> int:
        archive = await open_archive(path)
        return sum([len(batch) async for batch in archive.batches()])

    def write(path: Path, batches: list[pa.RecordBatch]) -> None:
        shutil.rmtree(path, ignore_errors=True)
        asyncio.run(publish(path, batches))

    return write, lambda path: asyncio.run(rebuild(path))


def plain_files(path: Path) -> int:
    """Rows of the base, when all files were read."""
    found = 0
    for file in sorted(path.glob("epoch=*/*.parquet")):
        rows = sum(len(batch) for batch in pq.ParquetFile(file).iter_batches())
        found += rows if file.name.startswith("snapshot-") else 0
    return found


def updates(rows: pa.Table, schema: TableSchema) -> pa.RecordBatch:
    """Changes that give these rows to the table again."""
    [batch] = rows.combine_chunks().to_batches()
    key = pa.StructArray.from_arrays([batch["id"]], fields=[schema.arrow.field("id")])
    after = pa.StructArray.from_arrays(batch.columns, fields=list(schema.arrow))
    before = pa.nulls(len(batch), schema.changes.field("before").type)
    action = pa.array(["UPDATE"] * len(batch))
    return pa.RecordBatch.from_arrays([action, key, before, after], schema=schema.changes)


def subject(name: str, schema: TableSchema) -> tuple[Write, Read]:
    if name in REBUILT:
        return rebuilt(REBUILT[name], schema)
    if name == PLAIN_FILES:
        return rebuilt(0.1, schema)[0], plain_files
    if name == "pyarrow.parquet":
        return pyarrow_parquet()
    if name == "duckdb parquet":
        return duckdb_files("format parquet, compression zstd", "read_parquet")
    if name == "duckdb json":
        return duckdb_files("format json", "read_json")
    return ours(name, schema)


def fastest(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the quickest round, and of processor time of the cheapest."""
    times: list[tuple[float, float]] = []
    while len(times) < ROUNDS and sum(wall for wall, _ in times) < ENOUGH:
        began, used = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - began, time.process_time() - used))
    return min(wall for wall, _ in times), min(used for _, used in times)


def run_subject(name: str, count: int, folder: Path) -> dict[str, Any]:
    since = processor_times()
    batches = rows(count)
    schema = TableSchema.of(batches[0].schema, ["id"])
    write, read = subject(name, schema)
    path = folder / "rows"
    resident = forget_peak()
    written, _ = fastest(lambda: write(path, batches))

    def read_all() -> None:
        if read(path) != count:
            raise RuntimeError(f"{name} read another number of rows than were written")

    taken, used = fastest(read_all)
    return {
        "subject": name,
        "rows": count,
        "arrow_bytes_per_row": sum(batch.nbytes for batch in batches) / count,
        "bytes_per_row": stored_size(path) / count,
        "write_rows_per_s": count / written,
        "read_rows_per_s": count / taken,
        "read_rows_per_cpu_s": count / used,
        "extra_peak_mib": peak_mib() - resident,
        "plain_python_us": plain_python(),
        "stolen": stolen_share(since),
    }


def forget_peak() -> float:
    """Have the kernel begin anew to look for the most memory held; return what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def stored_size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def peak_mib() -> float:
    """The most memory that this process held since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def better(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two turns of one subject as one: the higher of each speed, and the more memory."""
    if first is None:
        return second
    speeds = ("write_rows_per_s", "read_rows_per_s", "read_rows_per_cpu_s")
    kept = (*speeds, "extra_peak_mib", "stolen")
    return second | {key: max(first[key], second[key]) for key in kept}


def print_table(results: list[dict[str, Any]]) -> None:
    peers = {r["subject"]: r for r in results}
    print(
        "| subject | write rows/s | read rows/s | bytes/row | peak MiB beyond the rows "
        "| write time / pyarrow | read time / pyarrow | read processor time / pyarrow |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for r in results:
        peer = peers.get(PEERS.get(r["subject"], "pyarrow.parquet"), results[0])
        keys = ("write_rows_per_s", "read_rows_per_s", "read_rows_per_cpu_s")
        slower = " | ".join(f"{peer[key] / r[key]:.2f}" for key in keys)
        print(
            f"| {r['subject']} | {r['write_rows_per_s']:,.0f} | {r['read_rows_per_s']:,.0f} "
            f"| {r['bytes_per_row']:.0f} | {r['extra_peak_mib']:.0f} | {slower} |"
        )
    print(f"\npyarrow: `pyarrow.parquet`; for a rebuild with diffs `{PLAIN_FILES}`")


def run_all(count: int, folder: Path) -> None:
    best: dict[str, dict[str, Any]] = {}
    for name in (*SUBJECTS, *COMPARED):
        command = [sys.executable, "-m", "bench.archive", "--subject", name, "--rows", str(count)]
        command += ["--folder", str(folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        best[name] = better(best.get(name), json.loads(done.stdout))
    results = list(best.values())
    target = Path(__file__).parent / "results"
    target.mkdir(exist_ok=True)
    (target / "archive.json").write_text(json.dumps(results, indent=2))
    print_table(results)
    stolen = max(r["stolen"] for r in results)
    print(
        f"\n{os.cpu_count()} cores; {count:,} rows of {results[0]['arrow_bytes_per_row']:.0f} bytes "
        f"in Arrow; the host took up to {stolen:.0%} of the processors' time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--subject", choices=SUBJECTS, help="measure one, print JSON")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    if not options.subject:
        run_all(options.rows, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="streamfold-bench-", dir=options.folder) as folder:
        print(json.dumps(run_subject(options.subject, options.rows, Path(folder))))


if __name__ == "__main__":
    main()
