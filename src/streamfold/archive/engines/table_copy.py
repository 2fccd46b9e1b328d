"""Copies an archived table for other engines: Delta Lake, Iceberg and DuckDB databases.

Bases and diffs are folded along the way, batch by batch, so memory does not grow with the table.
The copy appears under its name all at once or not at all, and is not updated afterwards.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from streamfold.archive.engines.column_types import (
    DELTA,
    DUCKDB_FILE,
    ICEBERG,
    EngineColumns,
    EngineTypes,
)
from streamfold.archive.engines.sql import make_schema, text_literal
from streamfold.archive.read.reader import Archive
from streamfold.archive.read.rebuild import in_batches
from streamfold.blob.local_files import finish
from streamfold.errors import InvalidError, StorageError, StreamfoldError
from streamfold.extras import check_installed

T = TypeVar("T")

#: Bytes that DuckDB may hold while it writes a database.
DUCKDB_MEMORY = 512 << 20
#: Bytes after which the next Iceberg data file begins: large enough to scan, small enough to share
#: between workers.
FILE_BYTES = 256 << 20
#: Where a copy records the position of its table.
POSITION_KEY = "streamfold.position"


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Everything that a copy's writer needs besides the rows."""

    #: A path that does not exist yet. It becomes the copy when the writer returns.
    draft: Path
    table: str
    position: str
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class CopyKind:
    """One kind of copy: its requirements, its types, and how it is written."""

    package: str
    extra: str
    types: EngineTypes
    write: Callable[[CopyPlan, pa.RecordBatchReader], None]
    #: Whether its files refer to each other by full path, so that it cannot be moved.
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class TableCopy:
    """The position of a copy, and its number of rows."""

    position: str
    rows: int


async def copy_table(
    archive: Archive,
    kind: str,
    target: Path,
    *,
    position: str | None = None,
    time: datetime | None = None,
    columns: Sequence[str] | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> TableCopy:
    """Write the table at the head, at a position or at a time as one of `KINDS`.

    `target` must not exist: it becomes a folder, or a file for DuckDB. Every value is exact. A
    column whose type the engine lacks is rejected by name before anything is written.
    """
    chosen = KINDS[kind]
    check_installed(chosen.package, chosen.extra)
    await asyncio.to_thread(_check_absent, target)

    async def copy() -> TableCopy:
        # One plan for both, so that the copy names the position of exactly these rows.
        plan = archive.plan(position=position, time=time)
        batches = in_batches(archive.read(plan, columns=columns))
        async with aclosing(batches):
            rows = await _write_copy(
                chosen, target, archive.manifest.table, plan.position, batches, on_rows
            )
        return TableCopy(plan.position, rows)

    return await archive.with_plans(copy)


def _check_absent(target: Path) -> None:
    if target.exists():
        raise InvalidError(f"{target} exists already: name a path that does not")


async def _write_copy(
    kind: CopyKind,
    target: Path,
    table: str,
    position: str,
    batches: AsyncGenerator[pa.RecordBatch],
    on_rows: Callable[[int], None] | None,
) -> int:
    rows = 0

    def write(schema: pa.Schema, rows_of_table: Iterator[pa.RecordBatch]) -> None:
        columns = EngineColumns.of(schema, kind.types)

        def fitting() -> Iterator[pa.RecordBatch]:
            nonlocal rows
            for batch in rows_of_table:
                yield columns.cast(batch)
                rows += len(batch)
                if on_rows:
                    on_rows(len(batch))

        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            draft = target if kind.is_fixed else Path(folder) / target.name
            plan = CopyPlan(draft, table, position, columns.target)
            if draft == target:
                _check_absent(target)  # again: it may have appeared while files were fetched
                target.mkdir()  # from here on it is ours
            try:
                kind.write(plan, pa.RecordBatchReader.from_batches(columns.target, fitting()))
                if draft != target:
                    _check_absent(target)
                    draft.rename(target)
            except BaseException:
                if draft == target:
                    shutil.rmtree(target, ignore_errors=True)
                raise

    try:
        await in_thread(batches, write)
    except (StreamfoldError, asyncio.CancelledError):
        raise
    except Exception as error:  # each library has errors of its own, without a common class
        raise StorageError(f"{target} was not written: {error}") from error
    return rows


async def in_thread(
    batches: AsyncGenerator[pa.RecordBatch],
    work: Callable[[pa.Schema, Iterator[pa.RecordBatch]], T],
) -> T:
    """Run `work` in a thread with the schema and the batches, which are read as it requests them.

    Read errors are raised unchanged, whatever `work` makes of them.
    """
    loop, stopped = asyncio.get_running_loop(), threading.Event()
    first = await anext(batches)
    failed: list[BaseException] = []

    def pull() -> Iterator[pa.RecordBatch]:
        batch: pa.RecordBatch | None = first
        while batch is not None and not stopped.is_set():
            yield batch
            try:
                batch = asyncio.run_coroutine_threadsafe(_next(batches), loop).result()
            except BaseException as error:
                failed.append(error)
                raise

    task = asyncio.ensure_future(asyncio.to_thread(work, first.schema, pull()))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stopped.set()
        await finish(asyncio.wait({task}))
        raise
    except Exception:
        if failed:
            raise failed[0] from None
        raise


async def _next(batches: AsyncGenerator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return await anext(batches, None)


def _write_delta(plan: CopyPlan, rows: pa.RecordBatchReader) -> None:
    from deltalake import CommitProperties, write_deltalake

    made_at: dict[str, Any] = {POSITION_KEY: plan.position}
    # deltalake cannot write bounds of dates outside the years 1 to 9999, nor read some of them.
    # Since rows are in no order, bounds of whole files would exclude few of them anyway.
    bare = (
        {"delta.dataSkippingNumIndexedCols": "0"} if any(map(_has_date, plan.schema.types)) else {}
    )
    write_deltalake(
        str(plan.draft), rows, mode="error", name=plan.table, configuration=bare,
        commit_properties=CommitProperties(custom_metadata=made_at),
    )  # fmt: skip


def _has_date(kind: pa.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return pa.types.is_date(kind) or any(map(_has_date, inner))


def _write_iceberg(plan: CopyPlan, rows: pa.RecordBatchReader) -> None:
    """Write a table that is found by its folder: one metadata file, and a hint that names it.

    Writes the data files itself, because pyiceberg's `append` reads the whole table ahead.
    """
    from pyiceberg.catalog.sql import SqlCatalog

    paths = _write_parquet(plan.draft.absolute() / "data", rows)
    files = [f"file://{path}" for path in paths]
    # pyiceberg converts all bounds to Python values, so a year that Python lacks would fail the
    # copy.
    countable = {} if all(map(_has_bounds, paths)) else {"write.metadata.metrics.default": "counts"}
    with tempfile.TemporaryDirectory() as folder:
        catalog = SqlCatalog("export", uri=f"sqlite:///{folder}/catalog.db")
        try:
            catalog.create_namespace("export")
            creation = catalog.create_table_transaction(
                ("export", plan.table),
                schema=plan.schema,
                location=f"file://{plan.draft.absolute()}",
                properties=countable,
            )
            with creation as transaction:
                transaction.add_files(files, snapshot_properties={POSITION_KEY: plan.position})
        finally:
            catalog.close()
    metadata = plan.draft / "metadata"
    [newest] = metadata.glob("*.metadata.json")
    newest.rename(metadata / "v1.metadata.json")
    (metadata / "version-hint.text").write_text("1")


def _has_bounds(file: Path) -> bool:
    """Return whether Python can represent all bounds of the columns: it has the years 1 to 9999."""
    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = (group.column(number) for group in groups for number in range(group.num_columns))
    try:
        for column in columns:
            if column.statistics is not None and column.statistics.has_min_max:
                _ = column.statistics.min, column.statistics.max
    except OverflowError:
        return False
    return True


def _write_parquet(folder: Path, rows: pa.RecordBatchReader) -> list[Path]:
    """Write files of about `FILE_BYTES`, with one batch in memory. Without rows, writes no file."""
    folder.mkdir(parents=True)
    files: list[Path] = []
    writer: pq.ParquetWriter | None = None
    try:
        for batch in rows:
            if not len(batch):
                continue
            if writer is None:
                files.append(folder / f"{len(files):05d}.parquet")
                writer = pq.ParquetWriter(files[-1], rows.schema, compression="zstd")
            writer.write_batch(batch)
            if files[-1].stat().st_size >= FILE_BYTES:
                writer.close()
                writer = None
    finally:
        if writer is not None:
            writer.close()
    return files


def _write_duckdb(plan: CopyPlan, rows: pa.RecordBatchReader) -> None:
    import duckdb

    with duckdb.connect(str(plan.draft)) as connection:
        connection.execute(f"SET memory_limit = '{DUCKDB_MEMORY}B'")
        # Rows are in no particular order, and preserving theirs would take memory.
        connection.execute("SET preserve_insertion_order = false")
        _, name = make_schema(connection, plan.table)
        connection.register("_streamfold_rows", rows)
        connection.execute(f"CREATE TABLE {name} AS FROM _streamfold_rows")
        comment = text_literal(f"{POSITION_KEY}: {plan.position}")
        connection.execute(f"COMMENT ON TABLE {name} IS {comment}")
        connection.unregister("_streamfold_rows")


KINDS: Final[Mapping[str, CopyKind]] = {
    "delta": CopyKind("deltalake", "delta", DELTA, _write_delta),
    "iceberg": CopyKind("pyiceberg", "iceberg", ICEBERG, _write_iceberg, is_fixed=True),
    "duckdb": CopyKind("duckdb", "duckdb", DUCKDB_FILE, _write_duckdb),
}
