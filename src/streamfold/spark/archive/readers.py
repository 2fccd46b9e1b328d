"""Readers that Spark calls on the driver and in tasks, for tables and change feeds.

Spark pickles a reader before it plans, so tasks know only their own partition of the plan.
In memory, a task holds the net changes of one part and one batch of its base.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import BinaryIO, TypeAlias, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from streamfold.archive.formats.format import BATCH_ROWS_MAX
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.decoding import ChosenFiles
from streamfold.archive.read.folding import Delta, fitted
from streamfold.archive.read.part_files import PartFiles, PartGoneError
from streamfold.archive.read.reader import Archive
from streamfold.archive.read.rebuild import in_thread
from streamfold.archive.schema import TableSchema
from streamfold.blob.local_files import finish
from streamfold.spark.archive.change_feed import FeedPart, feed_parts, read_feed
from streamfold.spark.archive.filters import Condition
from streamfold.spark.archive.options import Moment
from streamfold.spark.archive.planning import (
    WHOLE,
    TablePart,
    choose_all,
    read_row_groups,
    table_parts,
    wanted_buckets,
)
from streamfold.spark.archive.relation import ArchiveRelation, open_files, position_at
from streamfold.spark.errors import CarriesErrors, FilesGoneError

T = TypeVar("T")
#: One task's input.
Work: TypeAlias = TablePart | tuple[FeedPart, ...]


async def read_part(
    part: TablePart,
    files: PartFiles,
    schema: TableSchema,
    columns: pa.Schema,
    conditions: Sequence[Condition],
) -> AsyncGenerator[pa.Table]:
    """Yield the rows of a part. May already omit rows that fail the conditions."""
    delta = Delta(columns, schema.select(part.keys) if part.diffs else pa.schema([]))
    await _gather(part, files, delta)
    if not (delta.clears or part.clears):
        needed = {*columns.names, *(part.keys if part.diffs else ())}
        fields = pa.schema([field for field in schema.arrow if field.name in needed])
        async with aclosing(files.open_all(part.base.parts)) as opened:
            async for file, source in opened:
                rows = _rows(part, file, source, fields, conditions)
                async for piece in in_thread(delta.untouched(fitted(b, fields) for b in rows)):
                    yield piece
    if part.diffs:
        yield await finish(asyncio.to_thread(delta.rows))


async def _gather(part: TablePart, files: PartFiles, delta: Delta) -> None:
    for number, diff in enumerate(part.diffs):
        delta.begin(clears=part.clears and number == 0)
        async with aclosing(files.open_all(diff.parts)) as opened:
            async for file, source in opened:
                changes = diff.changes(file, source, part.keys)
                await finish(asyncio.to_thread(_add_all, delta, changes))


def _add_all(delta: Delta, changes: Iterable[pa.RecordBatch]) -> None:
    for batch in changes:
        delta.add(batch)


def _rows(
    part: TablePart,
    file: Part,
    source: BinaryIO,
    fields: pa.Schema,
    conditions: Sequence[Condition],
) -> Iterator[pa.RecordBatch]:
    base: ChosenFiles = part.base
    written = base.schema.arrow if base.schema else fields
    own = pa.schema([field for field in written if field.name in fields.names])
    if base.form.reads_row_groups and (conditions or part.share != WHOLE):
        return read_row_groups(file, source, own, conditions, part.share)
    return base.rows(file, source, None if own.names == written.names else own.names)


def iterate(make: Callable[[], AsyncGenerator[T]]) -> Iterator[T]:
    """Yield the items of an async generator, run on its own event loop."""
    with asyncio.Runner() as runner:
        items, nothing = make(), object()

        async def step() -> T | object:
            return await anext(items, nothing)

        try:
            while (item := runner.run(step())) is not nothing:
                yield item  # type: ignore[misc]  # not the sentinel
        finally:
            runner.run(items.aclose())


def reader_of(relation: ArchiveRelation) -> DataSourceReader:
    return TableReader(relation) if relation.since is None else FeedReader(relation)


class FilesPartition(InputPartition):
    """One task's files in a folder. `position` is where the whole query ends."""

    def __init__(self, folder: str, position: str, work: Work) -> None:
        super().__init__(None)
        self.folder = folder
        self.position = position
        self.work = work


class PartReader(CarriesErrors):
    """Base of all readers: a task reads the files of one partition."""

    def __init__(self, relation: ArchiveRelation) -> None:
        self._relation = relation

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass all conditions. Spark calls this in a task."""
        if not isinstance(partition, FilesPartition):
            return  # Spark creates an empty partition if there is nothing to read
        try:
            for batch in iterate(lambda: self._batches(partition)):
                rows = self._relation.rows(batch)
                if len(rows):
                    yield rows
        except PartGoneError as error:
            raise FilesGoneError(error.message, partition.position) from error

    @abstractmethod
    def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        """Yield one partition's rows in the archive's types."""


class _BatchReader(PartReader, DataSourceReader):
    """Base of both batch readers."""

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions.

        Spark calls this on the driver before a DataFrame's first query, and reuses the result for
        later queries.
        """
        return asyncio.run(self._planned())

    async def _planned(self) -> list[InputPartition]:
        archive = await self._relation.open()
        work = await archive.with_plans(lambda: self._cut(archive))
        return [FilesPartition(archive.uri, self._relation.position, item) for item in work]

    @abstractmethod
    async def _cut(self, archive: Archive) -> Sequence[Work]:
        """Split the read into one work item per task."""


class TableReader(_BatchReader):
    """`spark.read`: the table at one position."""

    async def _cut(self, archive: Archive) -> list[TablePart]:
        relation = self._relation
        plan = archive.plan(position=relation.position)
        base, diffs = choose_all(relation.decoding, plan)
        keys = relation.decoding.keys(plan.manifest)
        parts = await table_parts(base, diffs, keys, archive.files)
        buckets = wanted_buckets(relation.conditions, relation.table, (base, *diffs))
        return parts if buckets is None else [part for part in parts if part.bucket in buckets]

    async def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        part, relation = partition.work, self._relation
        assert isinstance(part, TablePart)  # noqa: S101 - `_cut` made it
        files = open_files(relation.storage, partition.folder)
        pieces = read_part(part, files, relation.table, relation.read, relation.conditions)
        async with aclosing(pieces):
            async for piece in pieces:
                for batch in piece.to_batches(BATCH_ROWS_MAX):
                    yield batch


class FeedPartReader(PartReader):
    """Base of batch and streaming feeds: a task reads the changes of its diff files."""

    async def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        parts, relation = partition.work, self._relation
        assert isinstance(parts, tuple)  # noqa: S101 - `_cut` made it
        files = open_files(relation.storage, partition.folder)
        batches = read_feed(parts, files, relation.table, relation.read)
        async with aclosing(batches):
            async for batch in batches:
                yield batch


class FeedReader(FeedPartReader, _BatchReader):
    """`spark.read` with `readChangeFeed`: the changes between two positions."""

    async def _cut(self, archive: Archive) -> list[tuple[FeedPart, ...]]:
        relation = self._relation
        since = position_at(archive, relation.since or Moment())
        plan = archive.plan_changes(since, until=relation.position)
        return await feed_parts(plan, relation.decoding, archive.files)
