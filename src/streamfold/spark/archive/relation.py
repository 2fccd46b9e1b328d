"""A fully resolved read of an archive: its location, positions, columns and Spark types.

It is created when a DataFrame is loaded, and pickled with it. The DataFrame's first query plans
that position from the manifest at that time. Spark reuses the plan for later queries, so they all
see the same rows.

A type that Spark lacks becomes the nearest type that holds all its values. Unsigned integers become
the next wider type, and 64-bit ones a decimal. Nanosecond timestamps and times of day become a
bigint in their own unit. Decimals of more than 38 digits become text, as do columns without any
value yet.
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
from streamfold.errors import ConflictError, InvalidError
from streamfold.spark.archive.change_feed import feed_columns
from streamfold.spark.archive.filters import Condition, matching, parse_conditions
from streamfold.spark.archive.options import CREDENTIALS, ArchiveOptions, ArchiveStorage, Moment
from streamfold.spark.archive.planning import DECIMAL_DIGITS

#: Name of the read's only credentials profile.
_PROFILE = "archive"
_PLAIN: dict[pa.DataType, spark.DataType] = {
    # Spark's file formats have no type for columns without values.
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
    # Spark has a time-of-day type only if a setting enables it.
    pa.time64("us"): spark.LongType(),
    pa.time64("ns"): spark.LongType(),
}


async def open_table(storage: ArchiveStorage) -> Archive:
    """Open the archive. Fetches credentials on demand and renews them."""
    access = _access(storage)
    provider = access.pop("credential_provider", None)
    return await open_archive(
        storage.uri, cache=storage.cache, options=access, credential_provider=provider
    )


def open_files(storage: ArchiveStorage, folder: str) -> PartFiles:
    """Open the files in an archive's folder, without reading its manifest."""
    access = _access(storage)

    def open_folder(url: str) -> BlobStore:
        return open_blob_store(url, **access)

    cache = None if storage.cache is None else Cache(Path(storage.cache))
    return PartFiles(Destination(open_folder(folder.rstrip("/")), folder), cache, open_folder)


def _access(storage: ArchiveStorage) -> dict[str, Any]:
    """Return the storage options. Explicit options override the profile's."""
    if not storage.credentials:
        return dict(storage.options)
    raw: Mapping[str, object] = {_PROFILE: dict(storage.credentials)}
    profiles = Profiles.parse(raw, path=CREDENTIALS.rstrip("."))
    options = profiles.access(_PROFILE, path=CREDENTIALS).blob_options()
    return {**options, **storage.options}


def spark_schema(fields: Iterable[pa.Field]) -> spark.StructType:
    """Return the Spark schema for these Arrow fields."""
    return spark.StructType(
        [spark.StructField(f.name, spark_type(f.type), f.nullable) for f in fields]
    )


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """Return the Arrow schema that Spark accepts without conversion."""
    return to_arrow_schema(schema, timezone="UTC")


def spark_type(kind: pa.DataType) -> spark.DataType:
    """Return a Spark type that holds every value of an archive type."""
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
    """Return the type with every nested field nullable, as Spark parses types from text."""
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
class ArchiveRelation:
    """A resolved read. `since` is where a change feed starts, or None to read the table.

    `since` is looked up only on demand: a streaming query that resumes from its checkpoint does not
    need it, and the archive may no longer reach back that far.
    """

    storage: ArchiveStorage
    archive_id: str | None
    decoding: Decoding
    table: TableSchema
    #: Columns of the rows, or of the change feed's images.
    columns: tuple[str, ...]
    #: Where the read ends. For a streaming query, the head when it was loaded.
    position: str
    since: Moment | None
    spark_schema: StructType
    #: Conditions on Spark columns, some of which may be read only for filtering.
    conditions: tuple[Condition, ...] = ()

    @property
    def read(self) -> pa.Schema:
        """The columns to read from files, in the archive's types."""
        if self.since is not None:
            return feed_columns(self.table, self.columns)
        tested = (c.column for c in self.conditions)
        return self.table.select(list(dict.fromkeys([*self.columns, *tested])))

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that pass all conditions, in Spark's types."""
        arrow = arrow_schema(self.spark_schema)
        tested = [f for f in arrow_schema(spark_schema(batch.schema)) if f.name not in arrow.names]
        rows = matching(cast_batch(batch, pa.schema([*arrow, *tested])), self.conditions)
        return rows.select(arrow.names) if tested else rows

    async def open(self) -> Archive:
        """Open the archive's current state.

        Raises ConflictError if it is not the archive that was loaded.
        """
        archive = await open_table(self.storage)
        if archive.manifest.archive_id != self.archive_id:
            raise ConflictError(
                f"{archive.uri} holds another archive than when it was loaded: load the table again",
                code="archive_replaced",
            )
        return archive


def resolve(options: ArchiveOptions, user_schema: StructType | None = None) -> ArchiveRelation:
    """Read the manifest and resolve the read. `user_schema` is the argument of `schema(...)`."""
    return asyncio.run(_resolve(options, user_schema))


async def _resolve(options: ArchiveOptions, user_schema: StructType | None) -> ArchiveRelation:
    archive = await open_table(options.storage)
    decoding = Decoding(options.formats, None, options.key_fields)
    since = options.since
    position = position_at(archive, options.at)
    last = archive.plan(position=position).last
    table = decoding.schema_of(archive.manifest, last)
    if table is None:
        table = _declared(archive, decoding, user_schema, feed=since is not None)
        decoding = Decoding(decoding.formats, table, table.key_fields)
    columns = _columns(options, table, user_schema, feed=since is not None)
    fields = table.select(columns) if since is None else feed_columns(table, columns)
    schema = spark_schema(fields)
    tested = arrow_schema(spark_schema(table.arrow if since is None else fields))
    conditions = () if options.filters is None else parse_conditions(options.filters, tested)
    return ArchiveRelation(
        storage=options.storage,
        archive_id=archive.manifest.archive_id,
        decoding=decoding,
        table=table,
        columns=columns,
        position=position if since is not None else last.to_position,
        since=since,
        spark_schema=schema if user_schema is None else _accepted(user_schema, schema),
        conditions=conditions,
    )


def position_at(archive: Archive, moment: Moment) -> str:
    """Return the moment's position, or the last position published by its time."""
    if moment.position is not None:
        return moment.position
    return archive.plan(time=moment.time).position


def _declared(
    archive: Archive, decoding: Decoding, user_schema: StructType | None, *, feed: bool
) -> TableSchema:
    """Return the table schema that the user declared for a manifest without one."""
    if user_schema is None or feed:
        raise InvalidError(
            f"the manifest in {archive.uri} has no schema: "
            + ("its changes cannot be read" if feed else "declare the columns with schema(...)")
        )
    return TableSchema.of(arrow_schema(user_schema), decoding.keys(archive.manifest))


def _columns(
    options: ArchiveOptions, table: TableSchema, user_schema: StructType | None, *, feed: bool
) -> tuple[str, ...]:
    """Return the columns to read, from the option or from the user's schema."""
    if user_schema is not None and not feed:
        if options.columns not in (None, tuple(user_schema.names)):
            raise InvalidError(
                f"option 'columns' names {list(options.columns or ())}, and the schema "
                f"{user_schema.names}: give one of them"
            )
        return tuple(user_schema.names)
    return options.columns or tuple(table.names)


def _accepted(user_schema: StructType, read_schema: StructType) -> StructType:
    """Return the user's schema. Raises InvalidError if it cannot hold the rows read."""
    if user_schema.names != read_schema.names or not all(
        map(_holds, user_schema.fields, read_schema.fields)
    ):
        raise InvalidError(
            f"the schema {user_schema.simpleString()} does not hold what is read, which is "
            f"{read_schema.simpleString()}: give none, or the same types and nullability"
        )
    return user_schema


def _holds(user_field: StructField, read_field: StructField) -> bool:
    same = user_field.dataType in (read_field.dataType, loosened(read_field.dataType))
    return same and (user_field.nullable or not read_field.nullable)
