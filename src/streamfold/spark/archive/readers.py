"""What Spark calls on the driver and in tasks, for tables and for change feeds.

A reader is pickled before it plans, so tasks know only their partition of the plan.

In a task, memory holds the net changes of one part, and a batch of its base.
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
from streamfold.spark.archive.relation import Relation, open_files, position_at
from streamfold.spark.errors import CarriesErrors, FilesGoneError

T = TypeVar("T")
#: What one task reads.
Work: TypeAlias = TablePart | tuple[FeedPart, ...]


async def read_part(
    part: TablePart,
    files: PartFiles,
    schema: TableSchema,
    wanted: pa.Schema,
    conditions: Sequence[Condition],
) -> AsyncGenerator[pa.Table]:
    """Yield the rows of a part; of those that do not pass the conditions, some may be left out."""
    delta = Delta(wanted, schema.select(part.keys) if part.diffs else pa.schema([]))
    await _gather(part, files, delta)
    if not (delta.clears or part.clears):
        needed = {*wanted.names, *(part.keys if part.diffs else ())}
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
    """What an asynchronous generator yields, one by one, on an event loop of its own."""
    with asyncio.Runner() as runner:
        items, nothing = make(), object()

        async def step() -> T | object:
            return await anext(items, nothing)

        try:
            while (item := runner.run(step())) is not nothing:
                yield item  # type: ignore[misc]  # not the object that says that there is none
        finally:
            runner.run(items.aclose())


def reader_of(relation: Relation) -> DataSourceReader:
    return TableReader(relation) if relation.since is None else FeedReader(relation)


class FilesPartition(InputPartition):
    """One task's files, in a folder; `position` is the end of what the query reads."""

    def __init__(self, folder: str, position: str, work: Work) -> None:
        super().__init__(None)
        self.folder = folder
        self.position = position
        self.work = work


class PartReader(CarriesErrors):
    """Shared by all reads: a task reads the files of one partition."""

    def __init__(self, relation: Relation) -> None:
        self._relation = relation

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: the rows of its files that pass all conditions."""
        if not isinstance(partition, FilesPartition):
            return  # Spark makes an empty partition if there is nothing to read
        try:
            for batch in iterate(lambda: self._batches(partition)):
                rows = self._relation.rows(batch)
                if len(rows):
                    yield rows
        except PartGoneError as error:
            raise FilesGoneError(error.message, partition.position) from error

    @abstractmethod
    def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the rows of one partition, in the archive's types."""


class _BatchReader(PartReader, DataSourceReader):
    """Shared by both kinds of batch."""

    def partitions(self) -> list[InputPartition]:
        """On the driver, before the first query of a DataFrame; Spark keeps them for later ones."""
        return asyncio.run(self._planned())

    async def _planned(self) -> list[InputPartition]:
        archive = await self._relation.open()
        work = await archive.with_plans(lambda: self._cut(archive))
        return [FilesPartition(archive.uri, self._relation.position, item) for item in work]

    @abstractmethod
    async def _cut(self, archive: Archive) -> Sequence[Work]:
        """Cut the read into work for tasks."""


class TableReader(_BatchReader):
    """`spark.read`: the table at one position."""

    async def _cut(self, archive: Archive) -> list[TablePart]:
        relation = self._relation
        plan = archive.plan(position=relation.position)
        base, diffs = choose_all(relation.decoding, plan)
        keys = relation.decoding.keys(plan.manifest)
        parts = await table_parts(base, diffs, keys, archive.files)
        wanted = wanted_buckets(relation.conditions, relation.table, (base, *diffs))
        return parts if wanted is None else [part for part in parts if part.bucket in wanted]

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
    """Shared by feeds in batches and in streaming: a task reads the changes in some diff files."""

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
