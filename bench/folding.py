"""The subjects of `bench.fold`: one archive folded into a new base by Spark, polars and DuckDB."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.store import PathNotTakenError
from bench.table_archives import SCHEMA, TABLE, manifest_of, write_archive
from streamfold.archive.formats import format_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Fold = Callable[[], dict[str, Any]]

#: Rows and buckets of the table that a writer has folded before: enough for each worker to have one.
SMALL, SMALL_BUCKETS = 10_000, 16


def fold_with_spark(folder: Path, settings: Mapping[str, str] | None = None) -> Fold:
    """A re-base by a warm snapshotter, which has folded a small table before.

    Fails unless Spark's tasks folded every bucket that changed.
    """
    from streamfold.snapshotter.spark import snapshotter_session

    spark = snapshotter_session(settings)
    with tempfile.TemporaryDirectory() as small:
        keys = np.arange(SMALL)
        asyncio.run(write_archive(Path(small), SMALL, [keys, keys], buckets=SMALL_BUCKETS))
        rebase_with(spark, Path(small))

    return lambda: {"rows": rebase_with(spark, folder)}


def rebase_with(spark: SparkSession, folder: Path) -> int:
    from streamfold.snapshotter.spark.lanes import JobLanes
    from streamfold.snapshotter.spark.table.archive import TableArchive

    job = table_job(folder)
    touched = {part.bucket for diff in manifest_of(folder).chain for part in diff.parts()}
    lanes = JobLanes(spark)
    published = TableArchive(job)

    async def rebase() -> int:
        await published.open()
        await published.rebase("measured", lambda step: lanes.fold(job, step))
        return (published.manifest.base.row_count or 0) if published.manifest else 0

    rows = asyncio.run(rebase())
    if not lanes.total.tasks or None in touched:
        raise PathNotTakenError(f"{lanes.total.tasks} tasks folded the buckets {touched}")
    return rows


def table_job(folder: Path) -> Any:
    """The snapshotter's job for the table in the folder."""
    from streamfold.snapshotter.decoding import EnvelopeDecoder
    from streamfold.snapshotter.spark import DeadLetterFolder, DestinationSpec, TableJob

    spec, form = DestinationSpec(folder.as_uri()), format_of("parquet")
    return TableJob(
        table=TABLE,
        stream=TABLE,
        # Nobody asks it: a fold reads files alone.
        source={"endpoint": "http://127.0.0.1:9", "basin": TABLE},
        decoder=EnvelopeDecoder(SCHEMA.key_fields),
        destination_specs=(spec,),
        formats=(form,),
        diff_formats=(form,),
        dead_letters=DeadLetterFolder(spec, TABLE, TABLE),
        writer_id="bench",
        schema=SCHEMA,
    )


def files_of(folder: Path) -> tuple[list[str], list[list[str]]]:
    """The files of the base, and of each diff in order."""
    manifest = manifest_of(folder)
    base = [str(folder / part.path) for part in manifest.base.parts()]
    return base, [[str(folder / part.path) for part in diff.parts()] for diff in manifest.chain]


def fold_with_polars(folder: Path) -> Fold:
    import polars as pl

    def fold() -> dict[str, Any]:
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
        return {"rows": len(result)}

    return fold


def fold_with_duckdb(folder: Path) -> Fold:
    import duckdb

    def fold() -> dict[str, Any]:
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
        return {"rows": int(count[0]) if count else 0}

    return fold


FOLDS: dict[str, Callable[[Path], Fold]] = {
    "polars": fold_with_polars,
    "duckdb": fold_with_duckdb,
    "spark": fold_with_spark,
}
