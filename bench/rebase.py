"""Measures what a re-base writes, and how large a table may be: `python -m bench.rebase --help`.

Few changes to a large table: the new base rewrites the buckets that they touch, and names the files of
the others again. How much that is depends on how many keys the changes are of, since keys are spread
over the buckets by a hash; bytes are reported beside those of the whole base. Then a table that is
larger than the heap of the driver is folded, in a process with that heap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.folding import fold_with_spark
from bench.store import MIB, PathNotTakenError
from bench.subjects import be_subject, measure
from bench.table_archives import manifest_of, rows, write_archive

CHANGES = 10_000
BUCKETS = 64
#: Keys that the changes are of: a diff has each of them once, however often it changed.
SPREADS = (10, 100, CHANGES)
#: Bytes of a small heap, as Spark writes them and in numbers.
HEAP, HEAP_BYTES = "512m", 512 * MIB
#: Rows that are looked at to tell the size of a table in memory.
SAMPLE = 10_000
SEED = 11


def changed_keys(keys: int, distinct: int) -> list[Any]:
    """The keys of each of up to ten diffs, which are what a writer makes of so many changes."""
    chosen = np.sort(np.random.default_rng(SEED).choice(keys, distinct, replace=False))
    return [chosen] * min(CHANGES // distinct, 10)


def after_few_changes(folder: Path, keys: int, distinct: int) -> dict[str, Any]:
    """A re-base of a table of which so many keys changed."""
    asyncio.run(write_archive(folder, keys, changed_keys(keys, distinct), buckets=BUCKETS))
    before = {part.path for part in manifest_of(folder).base.parts()}
    figures = measure("bench.rebase", "--subject", str(folder))
    parts = list(manifest_of(folder).base.parts())
    written = [part for part in parts if part.path not in before]
    if len(parts) != BUCKETS or len(written) > distinct:
        raise PathNotTakenError(
            f"{len(written)} of {len(parts)} buckets were written for {distinct} changed keys"
        )
    return {
        "keys_changed": distinct,
        "buckets": len(parts),
        "buckets_written": len(written),
        "bytes_written": sum(part.size_bytes for part in written),
        "bytes_of_a_full_rewrite": sum(part.size_bytes for part in parts),
        **figures,
    }


def larger_than_the_heap(folder: Path) -> dict[str, Any]:
    """A re-base of a table of twice the heap, every bucket of which has changed."""
    keys = 2 * HEAP_BYTES // (rows(np.arange(SAMPLE), 0).nbytes // SAMPLE)
    asyncio.run(write_archive(folder, keys, [np.arange(0, keys, 10)], buckets=BUCKETS))
    figures = measure("bench.rebase", "--subject", str(folder), "--heap", HEAP)
    return {
        "keys": keys,
        "heap_mib": HEAP_BYTES // MIB,
        "table_mib": 2 * HEAP_BYTES // MIB,
        **figures,
    }


def report(results: dict[str, Any]) -> None:
    print("| keys changed | buckets written | bytes written | of a full rewrite | s | CPU s |")
    print("|---|---|---|---|---|---|")
    for one in results["few_changes"]:
        share = one["bytes_written"] / one["bytes_of_a_full_rewrite"]
        print(
            f"| {one['keys_changed']:,} | {one['buckets_written']} of {one['buckets']} "
            f"| {one['bytes_written']:,} | {share:.0%} "
            f"| {one['seconds']:.1f} | {one['cpu_seconds']:.1f} |"
        )
    large = results["larger_than_the_heap"]
    print(
        f"\n{large['keys']:,} rows of {large['table_mib']} MiB with a heap of {large['heap_mib']} MiB: "
        f"{large['rows']:,} rows in {large['seconds']:.1f} s; at most {large['driver_mib']} MiB in the "
        f"driver and its Java, {large['peak_mib']} MiB in all processes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000, help="rows of the large table")
    parser.add_argument("--results", type=Path, default=Path("bench/results/rebase.json"))
    parser.add_argument("--subject", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--heap", default="2g", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.subject:
        be_subject(fold_with_spark(given.subject, {"spark.driver.memory": given.heap}))
        return
    few = []
    for distinct in SPREADS:
        with tempfile.TemporaryDirectory(prefix="bench-rebase-") as folder:
            few.append(after_few_changes(Path(folder), given.keys, distinct))
    with tempfile.TemporaryDirectory(prefix="bench-rebase-") as folder:
        results = {"few_changes": few, "larger_than_the_heap": larger_than_the_heap(Path(folder))}
    report(results)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
