"""Measures a re-base beside polars and DuckDB: `python -m bench.fold --help`.

An archive of one base and many diffs is folded into a new base: by the snapshotter on local
Spark, one task per bucket, and by polars and DuckDB, each in one process that reads the same files
and writes one Parquet file. Each diff changes a part of the keys, so that no single one of them has
the whole result. Each subject is a process of its own, on a copy of the archive. Starting Spark and
its Python workers is not part of the time: a writer has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.folding import FOLDS
from bench.subjects import be_subject, measure
from bench.table_archives import copied, write_archive

BUCKETS = 16
#: Net changes of one diff at most.
DIFF_CHANGES = 500_000
#: Of the keys that each diff changes.
SEED = 7


def changed_keys(keys: int, count: int) -> Iterator[Any]:
    """So many keys in all, chosen anew for each diff."""
    chance = np.random.default_rng(SEED)
    diffs = -(-count // min(DIFF_CHANGES, keys // 2))
    for _ in range(diffs):
        yield np.sort(chance.choice(keys, count // diffs, replace=False))


def archive_of(folder: Path, keys: int, count: int) -> Path:
    """The archive to fold, which may be there from an earlier run."""
    target = folder / f"{keys}-{count}"
    if not (target / "whole").exists():
        target.mkdir(parents=True)
        asyncio.run(write_archive(target, keys, changed_keys(keys, count), buckets=BUCKETS))
        (target / "whole").touch()
    return target


def compare(folder: Path, keys: int, count: int, subjects: list[str]) -> list[dict[str, Any]]:
    """What each subject took for the same archive."""
    archive, found = archive_of(folder, keys, count), []
    for subject in subjects:
        own = copied(archive, folder / "copy")
        figures = measure("bench.fold", "--subject", subject, "--folder", str(own))
        shutil.rmtree(own)
        found.append({"changes": count, "keys": keys, "subject": subject, **figures})
    if len({one["rows"] for one in found}) > 1:
        raise RuntimeError(f"the subjects found different tables: {found}")
    reference = next((one for one in found if one["subject"] == "polars"), found[0])
    for one in found:
        for name in ("seconds", "cpu_seconds", "peak_mib"):
            one[f"{name}_of_polars"] = round(one[name] / reference[name], 2)
    return found


def report(found: list[dict[str, Any]]) -> None:
    first = found[0]
    print(
        f"\n{first['changes']:,} changes of {first['keys']:,} keys: {first['rows']:,} rows are left"
    )
    print("| subject | s | of polars | CPU s | of polars | MiB | of polars | driver MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one['subject']} | {one['seconds']:.1f} | {one['seconds_of_polars']:.2f} "
            f"| {one['cpu_seconds']:.1f} | {one['cpu_seconds_of_polars']:.2f} "
            f"| {one['peak_mib']} | {one['peak_mib_of_polars']:.2f} | {one['driver_mib']} |"
        )
    print(f"load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores", flush=True)


def _count(text: str) -> int:
    return int(text.replace("_", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--changes", type=_count, nargs="+", default=[5_000_000, 20_000_000])
    parser.add_argument("--keys", type=_count, default=1_000_000)
    parser.add_argument("--subjects", nargs="+", choices=list(FOLDS), default=list(FOLDS))
    parser.add_argument("--archives", type=Path, help="keep the archives here for the next run")
    parser.add_argument("--results", type=Path, default=Path("bench/results/fold.json"))
    parser.add_argument("--subject", choices=list(FOLDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.subject:
        be_subject(FOLDS[given.subject](given.folder))
        return
    results = []
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-fold-") as folder:
        for count in given.changes:
            found = compare(given.archives or Path(folder), given.keys, count, given.subjects)
            report(found)
            results += found
            given.results.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
