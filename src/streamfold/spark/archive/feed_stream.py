"""`spark.readStream` with `readChangeFeed`: a micro-batch has the diffs published since the last one.

An offset is the archive and the position up to which its changes were read, the end of an artifact. A
micro-batch that Spark repeats reads the same diffs again.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)

from streamfold.archive.read.plan import ChangesPlan
from streamfold.archive.read.reader import Archive
from streamfold.spark.archive.change_feed import feed_parts
from streamfold.spark.archive.options import Moment
from streamfold.spark.archive.readers import FeedPartReader, FilesPartition
from streamfold.spark.archive.relation import position_at
from streamfold.spark.errors import ColumnsChangedError

#: `archive`, the archive's id, and `position`.
FeedOffset: TypeAlias = dict[str, str | None]


class FeedStreamReader(FeedPartReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """All but `read` is called on the driver, in one process per query."""

    _initial: FeedOffset | None = None
    #: Where a query that takes what is there now ends.
    _target: FeedOffset | None = None
    _last_head: FeedOffset | None = None

    def initialOffset(self) -> FeedOffset:  # noqa: N802 - Spark's name
        """Return the same offset each time: Spark calls it more than once."""
        if self._initial is None:
            self._initial = asyncio.run(self._start())
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    def latestOffset(self, start: FeedOffset, limit: ReadLimit) -> FeedOffset:  # noqa: N802 - Spark's name
        return asyncio.run(self._latest(start))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Leave diffs that are published from now on to the next run."""
        self._target = asyncio.run(self._head())

    def reportLatestOffset(self) -> FeedOffset | None:  # noqa: N802 - Spark's name
        """Return the head as it was last read: Spark asks for each trigger, and a read is a request."""
        return self._last_head

    def partitions(self, start: FeedOffset, end: FeedOffset) -> Sequence[InputPartition]:
        return asyncio.run(self._planned(start, end))

    def commit(self, end: FeedOffset) -> None:
        """Do nothing: Spark's checkpoint has the position."""

    async def _start(self) -> FeedOffset:
        archive = await self._relation.open()
        since = position_at(archive, self._relation.since or Moment())
        archive.plan_changes(
            since
        )  # reports a start that is gone, or within a diff, before any batch
        return _offset(archive, since)

    async def _head(self) -> FeedOffset:
        archive = await self._relation.open()
        return _offset(archive, archive.head)

    async def _latest(self, start: FeedOffset) -> FeedOffset:
        archive = await self._open(start)
        self._last_head = _offset(archive, archive.head)
        end = self._target or self._last_head
        rank = archive.order.rank
        # A copy of the archive in another place may lag behind the one that was read before.
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
        """Open the archive that the query has read so far; ArchiveReplacedError if it is another."""
        return await replace(self._relation, archive_id=start["archive"]).open()

    def _check_columns(self, archive: Archive, plan: ChangesPlan) -> None:
        """Refuse diffs in a newer schema than the query's: their new columns would be dropped."""
        relation, rank = self._relation, archive.order.rank
        for diff in plan.diffs:
            newer = rank(diff.to_position) > rank(relation.position)
            if newer and relation.decoding.schema_of(plan.manifest, diff) != relation.table:
                raise ColumnsChangedError(plan.manifest.table, diff.to_position)


def _offset(archive: Archive, position: str) -> FeedOffset:
    return {"archive": archive.manifest.archive_id, "position": position}
