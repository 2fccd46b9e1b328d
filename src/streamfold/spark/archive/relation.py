"""One read of an archive with everything fixed: its files, positions, columns, and types for Spark.

Made when a DataFrame is loaded, and pickled with it. Its first query plans that position from the
manifest as it is then, and Spark keeps the plan for later ones: all of them see the same rows.

If Spark lacks a type, the next one that holds all values is used: unsigned integers become the next
wider type, 64-bit ones a decimal; nanoseconds and times of day a bigint in their own unit; decimals
of more than 38 digits text, and so do columns that have held no value yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.formats.conforming import cast_batch
from streamfold.archive.read.decoding import Decoding
from streamfold.archive.read.part_files import Cache, PartFiles
from streamfold.archive.read.reader import Archive, open_archive
from streamfold.archive.schema import TableSchema, is_decimal
from streamfold.blob import BlobStore, open_blob_store
from streamfold.errors import InvalidError
from streamfold.spark.archive.change_feed import feed_columns
from streamfold.spark.archive.filters import Condition, matching, parse_conditions
from streamfold.spark.archive.options import CREDENTIALS, ArchiveOptions, Moment, Storage
from streamfold.spark.archive.planning import DECIMAL_DIGITS
from streamfold.spark.errors import ArchiveReplacedError

#: Name of a read's only profile.
_PROFILE = "archive"
_PLAIN: dict[pa.DataType, spark.DataType] = {
    # Spark's files have no type for columns without values.
    pa.null(): spark.StringType(),
    pa.bool_(): spark.BooleanType(),
    pa.int8(): spark.ByteType(),
    pa.int16(): spark.ShortType(),
    pa.int32(): spark.IntegerType(),
    pa.int64(): spark.LongType(),
    pa.uint8(): spark.ShortType(),
    pa.uint16(): spark.IntegerType(),
    pa.uint32(): spark.LongType(),
    pa.uint64(): spark.DecimalType(20, 0),
    pa.float32(): spark.FloatType(),
    pa.float64(): spark.DoubleType(),
    pa.string(): spark.StringType(),
    pa.binary(): spark.BinaryType(),
    pa.date32(): spark.DateType(),
    # Spark has times of day only if a setting enables them.
    pa.time64("us"): spark.LongType(),
    pa.time64("ns"): spark.LongType(),
}


async def open_table(storage: Storage) -> Archive:
    """Open the archive; credentials are fetched when needed, and renewed."""
    access = _access(storage)
    provider = access.pop("credential_provider", None)
    return await open_archive(
        storage.uri, cache=storage.cache, options=access, credential_provider=provider
    )


def open_files(storage: Storage, folder: str) -> PartFiles:
    """Open the files in an archive's folder, without reading its manifest."""
    access = _access(storage)

    def open_folder(url: str) -> BlobStore:
        return open_blob_store(url, **access)

    cache = None if storage.cache is None else Cache(Path(storage.cache))
    return PartFiles(Destination(open_folder(folder.rstrip("/")), folder), cache, open_folder)


def _access(storage: Storage) -> dict[str, Any]:
    """Return the storage's options; given ones win over those of the profile."""
    if not storage.credentials:
        return dict(storage.options)
    raw: Mapping[str, object] = {_PROFILE: dict(storage.credentials)}
    profiles = Profiles.parse(raw, path=CREDENTIALS.rstrip("."))
    found = profiles.access(_PROFILE, path=CREDENTIALS).blob_options()
    return {**found, **storage.options}


def spark_schema(fields: Iterable[pa.Field]) -> spark.StructType:
    """Return the columns in Spark's types."""
    return spark.StructType(
        [spark.StructField(f.name, spark_type(f.type), f.nullable) for f in fields]
    )


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """Return the Arrow columns that Spark takes without conversion."""
    return to_arrow_schema(schema, timezone="UTC")


def spark_type(kind: pa.DataType) -> spark.DataType:
    """Return the type that holds every value of an archive's type."""
    types = pa.types
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_timestamp(kind):
        if kind.unit != "us":
            return spark.LongType()
        return spark.TimestampType() if kind.tz else spark.TimestampNTZType()
    if is_decimal(kind):
        fits = kind.precision <= DECIMAL_DIGITS
        return spark.DecimalType(kind.precision, kind.scale) if fits else spark.StringType()
    if types.is_struct(kind):
        return spark_schema(kind)
    if types.is_map(kind):
        item = kind.item_field
        return spark.MapType(spark.StringType(), spark_type(item.type), item.nullable)
    item = kind.value_field
    return spark.ArrayType(spark_type(item.type), item.nullable)


def loosened(kind: spark.DataType) -> spark.DataType:
    """Return the type with everything in it nullable, as in types written as text."""
    if isinstance(kind, spark.StructType):
        return spark.StructType(
            [spark.StructField(f.name, loosened(f.dataType)) for f in kind.fields]
        )
    if isinstance(kind, spark.MapType):
        return spark.MapType(kind.keyType, loosened(kind.valueType))
    return (
        spark.ArrayType(loosened(kind.elementType)) if isinstance(kind, spark.ArrayType) else kind
    )


@dataclass(frozen=True, slots=True)
class Relation:
    """What to read, and its types; `since` is where a change feed starts, None for the table.

    A start is looked up when it is needed: a streaming query that resumes from its checkpoint does not
    need it, and the archive may no longer go back so far.
    """

    storage: Storage
    archive_id: str | None
    decoding: Decoding
    table: TableSchema
    #: Columns of the rows, or of the images of changes.
    columns: tuple[str, ...]
    #: The end of what is read; of a streaming query, the head when it was loaded.
    position: str
    since: Moment | None
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
    decoding = Decoding(options.formats, None, options.key_fields)
    since = options.since
    position = position_at(archive, options.at)
    last = archive.plan(position=position).last
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


def position_at(archive: Archive, moment: Moment) -> str:
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
