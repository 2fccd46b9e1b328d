"""Reads archives as Spark does, with and without Spark, and returns plain values."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader

import streamfold.archive
from streamfold.archive.formats.conforming import cast_batch
from streamfold.spark.archive import StreamfoldArchiveSource
from streamfold.spark.archive.relation import arrow_schema, spark_schema

from .tables import Row, rows


def load(spark: SparkSession, uri: object, **options: object) -> DataFrame:
    given = {name: str(value) for name, value in options.items()}
    return spark.read.format("streamfold-archive").options(**given).load(str(uri))


class PlainRead:
    """What Spark does with the source, in this process: each object goes through a pickle."""

    def __init__(self, uri: object, **options: object) -> None:
        given = {"path": str(uri), **{name: str(value) for name, value in options.items()}}
        source = StreamfoldArchiveSource(given)
        schema = source.schema()
        reader: DataSourceReader = pickle.loads(pickle.dumps(source)).reader(schema)
        # Spark pickles a reader before it plans.
        self._reader: DataSourceReader = pickle.loads(pickle.dumps(reader))
        self.partitions = pickle.loads(pickle.dumps(reader.partitions()))
        self._schema = arrow_schema(schema)

    def table(self) -> pa.Table:
        batches = [b for part in self.partitions for b in self._reader.read(part)]
        assert all(len(batch) and batch.schema.equals(self._schema) for batch in batches)
        return pa.Table.from_batches(batches, schema=self._schema)

    def ids(self) -> list[int]:
        return sorted(self.table()["id"].to_pylist())


def rebuilt(uri: str | Path, position: str | None = None) -> pa.Table:
    """The table as the archive's own reader has it."""

    async def read() -> pa.Table:
        return await (await streamfold.archive.open(uri)).table(position=position)

    return asyncio.run(read())


def as_spark(table: pa.Table) -> pa.Table:
    """A table of the archive in the types that Spark gets."""
    schema = arrow_schema(spark_schema(table.schema))
    batches = [cast_batch(batch, schema) for batch in table.to_batches()]
    return pa.Table.from_batches(batches, schema=schema)


def comparable(rows: Sequence[Row]) -> list[Any]:
    """Rows in the order of their ids, as text, in which NaN equals itself and zero has a sign."""
    return [repr(row) for row in sorted(rows, key=lambda row: row["id"])]


def values(table: pa.Table) -> list[Any]:
    """What is in a table of Spark; instants are moments in UTC."""
    return comparable([{n: _instant(v) for n, v in row.items()} for row in table.to_pylist()])


def _instant(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


def expected(state: dict[int, Row]) -> list[Any]:
    """What Spark must show of a state."""
    return values(as_spark(pa.Table.from_batches(rows(state.values()))))
