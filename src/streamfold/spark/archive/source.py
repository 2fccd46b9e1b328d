"""`format("streamfold-archive")`: its entry points, and where Spark calls them.

Spark creates a `StreamfoldArchiveSource` on the driver, in a short-lived Python process, asks for
its schema, and pickles it with the relation that `schema` resolved. So a DataFrame's position is
fixed when it is loaded, however often it is used.
"""

# mypy: disallow-subclassing-any=False
# mypy does not follow Spark's base classes.

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from streamfold.archive.read.plan import ChangesPlan
from streamfold.archive.read.reader import Archive
from streamfold.errors import ConflictError
from streamfold.spark.archive.change_feed import feed_parts
from streamfold.spark.archive.options import Moment, parse_options, parse_streaming
from streamfold.spark.archive.readers import FeedPartReader, FilesPartition
from streamfold.spark.archive.relation import position_at
from streamfold.spark.errors import CarriesErrors

if TYPE_CHECKING:
    from streamfold.spark.archive.relation import ArchiveRelation

#: The archive id (`archive`) and the `position`.
FeedOffset: TypeAlias = dict[str, str | None]


class FeedStreamReader(FeedPartReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams the change feed: each micro-batch holds the diffs published since the previous one.

    An offset is the archive and the position up to which changes were read, always an artifact's
    end. A repeated micro-batch reads the same diffs again. Spark calls every method but `read` on
    the driver, in one process per query.
    """

    _initial: FeedOffset | None = None
    #: Where an available-now query ends.
    _target: FeedOffset | None = None
    _last_head: FeedOffset | None = None

    def initialOffset(self) -> FeedOffset:  # noqa: N802 - Spark's name
        """Return the same offset every time: Spark calls this more than once."""
        if self._initial is None:
            self._initial = asyncio.run(self._start())
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    def latestOffset(self, start: FeedOffset, limit: ReadLimit) -> FeedOffset:  # noqa: N802 - Spark's name
        return asyncio.run(self._latest(start))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the query's end at the current head, leaving later diffs to the next run."""
        self._target = asyncio.run(self._head())

    def reportLatestOffset(self) -> FeedOffset | None:  # noqa: N802 - Spark's name
        """Return the last head read. Spark asks on every trigger, and each read costs a request."""
        return self._last_head

    def partitions(self, start: FeedOffset, end: FeedOffset) -> Sequence[InputPartition]:
        return asyncio.run(self._planned(start, end))

    def commit(self, end: FeedOffset) -> None:
        """Do nothing: Spark's checkpoint stores the position."""

    async def _start(self) -> FeedOffset:
        archive = await self._relation.open()
        since = position_at(archive, self._relation.since or Moment())
        archive.plan_changes(
            since
        )  # raises before any batch if the start is gone or lies within a diff
        return _offset(archive, since)

    async def _head(self) -> FeedOffset:
        archive = await self._relation.open()
        return _offset(archive, archive.head)

    async def _latest(self, start: FeedOffset) -> FeedOffset:
        archive = await self._open(start)
        self._last_head = _offset(archive, archive.head)
        end = self._target or self._last_head
        rank = archive.order.rank
        # A copy of the archive elsewhere may lag behind the copy read earlier.
        return end if rank(str(end["position"])) > rank(str(start["position"])) else start

    async def _planned(self, start: FeedOffset, end: FeedOffset) -> list[InputPartition]:
        archive = await self._open(start)

        async def cut() -> list[InputPartition]:
            plan = archive.plan_changes(str(start["position"]), until=str(end["position"]))
            self._check_columns(archive, plan)
            parts = await feed_parts(plan, self._relation.decoding, archive.files)
            return [FilesPartition(archive.uri, str(end["position"]), part) for part in parts]

        return await archive.with_plans(cut)

    async def _open(self, start: FeedOffset) -> Archive:
        """Open the archive that the query has read so far.

        Raises ConflictError if another archive has taken its place.
        """
        return await replace(self._relation, archive_id=start["archive"]).open()

    def _check_columns(self, archive: Archive, plan: ChangesPlan) -> None:
        """Reject diffs with a newer schema than the query's, which would lose their new columns."""
        relation, rank = self._relation, archive.order.rank
        for diff in plan.diffs:
            newer = rank(diff.to_position) > rank(relation.position)
            if newer and relation.decoding.schema_of(plan.manifest, diff) != relation.table:
                raise ConflictError(
                    f"the columns of table {plan.manifest.table!r} changed in the diff that ends at "
                    f"{diff.to_position!r}: start the query again, which continues there with the new "
                    "columns",
                    code="archive_columns_changed",
                )


def _offset(archive: Archive, position: str) -> FeedOffset:
    return {"archive": archive.manifest.archive_id, "position": position}


class StreamfoldArchiveSource(CarriesErrors, DataSource):
    """Reads archived tables: the rows at a position, or changes in batches or as a stream."""

    @classmethod
    def name(cls) -> str:
        return "streamfold-archive"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._raw = dict(options)
        self._relation: ArchiveRelation | None = None

    def schema(self) -> StructType:
        """Resolve the read. Called once, on the driver, unless the user gives a schema."""
        self._relation = self._resolved(None)
        return self._relation.spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the batch reader. Spark calls this on the driver, once per query."""
        from streamfold.spark.archive.readers import reader_of

        return reader_of(self._relation or self._resolved(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the streaming reader. Spark calls this on the driver, once per query."""
        parse_streaming(self._raw)
        from streamfold.spark.archive.source import FeedStreamReader

        return FeedStreamReader(self._relation or self._resolved(schema))

    def _resolved(self, schema: StructType | None) -> ArchiveRelation:
        # Imported here because every stream read starts processes that also import this module.
        from streamfold.spark.archive.relation import resolve

        return resolve(parse_options(self._raw), schema)
