"""One read of an archive with everything fixed: positions, columns, types for Spark.

Made when a DataFrame is loaded, and pickled with it. Its first query plans that position from the
manifest as it is then, and Spark keeps the plan for later ones: all of them see the same rows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from streamfold.archive.formats.conforming import cast_batch
from streamfold.archive.read.decoding import BEST_FIRST, Decoding
from streamfold.archive.read.reader import Archive
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.spark.archive.change_feed import feed_columns
from streamfold.spark.archive.errors import ArchiveReplacedError
from streamfold.spark.archive.filters import Condition, matching, parse_conditions
from streamfold.spark.archive.open import open_table
from streamfold.spark.archive.options import ArchiveOptions, Moment, Storage
from streamfold.spark.archive.types import arrow_schema, loosened, spark_schema


@dataclass(frozen=True, slots=True)
class Relation:
    """What to read, and its types; `since` is where a change feed starts, None for the table."""

    storage: Storage
    archive_id: str | None
    decoding: Decoding
    table: TableSchema
    #: Columns of the rows, or of the images of changes.
    columns: tuple[str, ...]
    position: str
    since: str | None
    spark_schema: StructType
    #: On Spark's columns, of which some may be read only for this.
    conditions: tuple[Condition, ...] = ()

    @property
    def read(self) -> pa.Schema:
        """The columns to read, in the archive's types."""
        if self.since is not None:
            return feed_columns(self.table, self.columns)
        tested = (c.column for c in self.conditions)
        return self.table.select(list(dict.fromkeys([*self.columns, *tested])))

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that pass, in Spark's types."""
        wanted = arrow_schema(self.spark_schema)
        tested = [f for f in arrow_schema(spark_schema(batch.schema)) if f.name not in wanted.names]
        found = matching(cast_batch(batch, pa.schema([*wanted, *tested])), self.conditions)
        return found.select(wanted.names) if tested else found

    async def open(self) -> Archive:
        """Open the archive as it is now; ArchiveReplacedError if it is not the one that was loaded."""
        archive = await open_table(self.storage)
        if archive.manifest.archive_id != self.archive_id:
            raise ArchiveReplacedError(archive.uri)
        return archive


def resolve(options: ArchiveOptions, given: StructType | None = None) -> Relation:
    """Read the manifest and fix the read; `given` is the user's schema."""
    return asyncio.run(_resolve(options, given))


async def _resolve(options: ArchiveOptions, given: StructType | None) -> Relation:
    archive = await open_table(options.storage)
    decoding = Decoding(options.formats or BEST_FIRST, None, options.key_fields)
    since = None if options.since is None else _position(archive, options.since)
    position = _position(archive, options.at)
    last = archive.plan(position=position).last
    if since is not None:
        # The feed must end at an artifact's end: report an error now, not in a task.
        last = next(reversed(archive.plan_changes(since, until=position).diffs), last)
    table = decoding.schema_of(archive.manifest, last)
    if table is None:
        table = _declared(archive, decoding, given, feed=since is not None)
        decoding = Decoding(decoding.formats, table, table.key_fields)
    columns = _columns(options, table, given, feed=since is not None)
    fields = table.select(columns) if since is None else feed_columns(table, columns)
    schema = spark_schema(fields)
    tested = arrow_schema(spark_schema(table.arrow if since is None else fields))
    conditions = () if options.filters is None else parse_conditions(options.filters, tested)
    return Relation(
        storage=options.storage,
        archive_id=archive.manifest.archive_id,
        decoding=decoding,
        table=table,
        columns=columns,
        position=position if since is not None else last.to_position,
        since=since,
        spark_schema=schema if given is None else _accepted(given, schema),
        conditions=conditions,
    )


def _position(archive: Archive, moment: Moment) -> str:
    """Return the position, or the last one that was published at the time."""
    if moment.position is not None:
        return moment.position
    return archive.plan(time=moment.time).position


def _declared(
    archive: Archive, decoding: Decoding, given: StructType | None, *, feed: bool
) -> TableSchema:
    """Return the user's schema for a table whose manifest has none."""
    if given is None or feed:
        raise InvalidError(
            f"the manifest in {archive.uri} has no schema: "
            + ("its changes cannot be read" if feed else "declare the columns with schema(...)")
        )
    return TableSchema.of(arrow_schema(given), decoding.keys(archive.manifest))


def _columns(
    options: ArchiveOptions, table: TableSchema, given: StructType | None, *, feed: bool
) -> tuple[str, ...]:
    """Return the wanted columns: from the option, or from the names of a schema."""
    if given is not None and not feed:
        if options.columns not in (None, tuple(given.names)):
            raise InvalidError(
                f"option 'columns' names {list(options.columns or ())}, and the schema "
                f"{given.names}: give one of them"
            )
        return tuple(given.names)
    return options.columns or tuple(table.names)


def _accepted(given: StructType, found: StructType) -> StructType:
    """Return the user's schema if it holds what is read, and raise otherwise."""
    if given.names != found.names or not all(map(_holds, given.fields, found.fields)):
        raise InvalidError(
            f"the schema {given.simpleString()} does not hold what is read, which is "
            f"{found.simpleString()}: give none, or the same types and nullability"
        )
    return given


def _holds(given: StructField, found: StructField) -> bool:
    same = given.dataType in (found.dataType, loosened(found.dataType))
    return same and (given.nullable or not found.nullable)
