"""`format("streamfold-archive")`: what Spark calls, and where.

Spark makes a `StreamfoldArchiveSource` on the driver, in a short-lived Python process, asks it for the
schema and pickles it with what `schema` found: the position of a DataFrame is fixed when it is loaded,
however often it is used.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from streamfold.spark.archive.options import parse_options, parse_streaming
from streamfold.spark.errors import CarriesErrors

if TYPE_CHECKING:
    from streamfold.spark.archive.relation import Relation


class StreamfoldArchiveSource(CarriesErrors, DataSource):
    """Reads tables published as archives: the rows at a position, or changes, also as they come."""

    @classmethod
    def name(cls) -> str:
        return "streamfold-archive"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)
        self._relation: Relation | None = None

    def schema(self) -> StructType:
        """On the driver, once; not called if the user gives a schema."""
        self._relation = self._resolved(None)
        return self._relation.spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """On the driver, once per query."""
        from streamfold.spark.archive.readers import reader_of

        return reader_of(self._relation or self._resolved(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """On the driver, once per query."""
        parse_streaming(self._given)
        from streamfold.spark.archive.feed_stream import FeedStreamReader

        return FeedStreamReader(self._relation or self._resolved(schema))

    def _resolved(self, schema: StructType | None) -> Relation:
        # Here, because every read of a stream starts processes that also import this module.
        from streamfold.spark.archive.relation import resolve

        return resolve(parse_options(self._given), schema)
