"""What Spark calls on the driver and in tasks, for tables and for change feeds.

A reader is pickled before it plans, so tasks know only their partition of the plan.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from streamfold.archive.formats.format import BATCH_ROWS_MAX
from streamfold.archive.read.part_files import PartGoneError
from streamfold.archive.read.reader import Archive
from streamfold.spark.archive.change_feed import FeedPart, feed_parts, read_feed
from streamfold.spark.archive.part_reads import iterate, read_part
from streamfold.spark.archive.planning import TablePart, choose_all, table_parts
from streamfold.spark.archive.pruning import wanted_buckets
from streamfold.spark.archive.relation import Relation, open_files
from streamfold.spark.carried_errors import CarriesErrors
from streamfold.spark.errors import FilesGoneError

#: What one task reads.
Work: TypeAlias = TablePart | tuple[FeedPart, ...]


def reader_of(relation: Relation) -> DataSourceReader:
    return TableReader(relation) if relation.since is None else FeedReader(relation)


class FilesPartition(InputPartition):
    """One task's files, in a folder."""

    def __init__(self, folder: str, work: Work) -> None:
        super().__init__(None)
        self.folder = folder
        self.work = work


class _ArchiveReader(CarriesErrors, DataSourceReader):
    """Shared by both kinds of read."""

    def __init__(self, relation: Relation) -> None:
        self._relation = relation

    def partitions(self) -> list[InputPartition]:
        """On the driver, before the first query of a DataFrame; Spark keeps them for later ones."""
        return asyncio.run(self._planned())

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
            raise FilesGoneError(error.message, self._relation.position) from error

    async def _planned(self) -> list[InputPartition]:
        archive = await self._relation.open()
        work = await archive.with_plans(lambda: self._cut(archive))
        return [FilesPartition(archive.uri, item) for item in work]

    @abstractmethod
    async def _cut(self, archive: Archive) -> Sequence[Work]:
        """Cut the read into work for tasks."""

    @abstractmethod
    def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        """Yield the rows of one partition, in the archive's types."""


class TableReader(_ArchiveReader):
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


class FeedReader(_ArchiveReader):
    """`spark.read` with `readChangeFeed`: the changes between two positions."""

    async def _cut(self, archive: Archive) -> list[tuple[FeedPart, ...]]:
        relation = self._relation
        plan = archive.plan_changes(str(relation.since), until=relation.position)
        return await feed_parts(plan, relation.decoding, archive.files)

    async def _batches(self, partition: FilesPartition) -> AsyncGenerator[pa.RecordBatch]:
        parts, relation = partition.work, self._relation
        assert isinstance(parts, tuple)  # noqa: S101 - `_cut` made it
        files = open_files(relation.storage, partition.folder)
        batches = read_feed(parts, files, relation.table, relation.read)
        async with aclosing(batches):
            async for batch in batches:
                yield batch
