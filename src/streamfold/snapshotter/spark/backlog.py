"""Jobs that spread one table over tasks: backlogs and folds.

The driver sees reports and file names, never rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import WrittenPart
from streamfold.snapshotter.spark.plans import TASK_RESULTS
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.arrivals import (
    TASK_BYTES,
    PartsOrder,
    decode_reports,
    record_batches,
)
from streamfold.snapshotter.spark.tasks.decode import (
    DecodeReport,
    DecodeStep,
    decode,
    find_truncate,
    learn,
)
from streamfold.snapshotter.spark.tasks.fold import FoldStep, fold
from streamfold.snapshotter.spark.tasks.net import write_net_changes
from streamfold.snapshotter.spark.tasks.results import (
    REPORT,
    Batches,
    raise_task_errors,
    written_parts,
)
from streamfold.spark.stream.client import Endpoint
from streamfold.spark.stream.range_reads import Range

#: Records, and changes, from which on another task pays off.
TASK_RECORDS, TASK_CHANGES = 50_000, 20_000
#: The most records of one task: seconds of work, repeated if it fails.
TASK_RECORDS_MAX = 1_000_000
#: The most records that are decoded together: larger batches decode to fewer results.
BATCH_RECORDS = 65_536

Work = Callable[[Batches], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class SparkRecords:
    """Records of a table that tasks read and decode."""

    spark: SparkSession
    job: TableJob
    records: Range
    #: The most tasks at once.
    tasks: int

    def learned(self, step: DecodeStep) -> TableSchema:
        (row,) = self._by_tasks(partial(learn, step=step), 1).collect()
        raise_task_errors([row])
        return TableSchema.from_json(msgspec.json.decode(row.payload))

    def earlier(self, start: int, end: int) -> SparkRecords:
        return replace(self, records=Range(self.job.stream, start, end))

    @contextmanager
    def decoded(self, step: DecodeStep) -> Iterator[SparkChanges]:
        frame = self._by_tasks(partial(decode, step=step))
        frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield SparkChanges(frame, self.tasks)
        finally:
            frame.unpersist()

    def first_truncate(self) -> int | None:
        """Return the first record that empties the table; None if none does."""
        rows = self._by_tasks(partial(find_truncate, decoder=self.job.decoder)).collect()
        raise_task_errors(rows)
        return min((int(row.seq_num) for row in rows), default=None)

    def _by_tasks(self, work: Work, count: int | None = None) -> DataFrame:
        """Return the results of `work`, which each of `count` tasks does with a part of the records."""
        least, useful = -(-len(self.records) // TASK_RECORDS_MAX), len(self.records) // TASK_RECORDS
        count = count or max(1, least, min(self.tasks, useful))
        read = partial(
            _read_part, endpoint=self.job.endpoint, records=self.records, count=count, work=work
        )
        return self.spark.range(0, count, 1, count).mapInArrow(read, TASK_RESULTS)


def _read_part(
    numbers: Batches, endpoint: Endpoint, records: Range, count: int, work: Work
) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow` over part numbers: do the work with the records of each part."""
    for number in (number for batch in numbers for number in batch["id"].to_pylist()):
        start, end = (records.start + len(records) * n // count for n in (number, number + 1))
        yield from work(_joined(record_batches(endpoint, Range(records.stream, start, end))))


def _joined(batches: Batches) -> Iterator[pa.RecordBatch]:
    """Yield the same records in batches of `BATCH_RECORDS`, or fewer if these are large."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(map(len, group)) >= BATCH_RECORDS or sum(b.nbytes for b in group) >= TASK_BYTES:
            yield from pa.Table.from_batches(group).combine_chunks().to_batches()
            group = []
    if group:
        yield from pa.Table.from_batches(group).combine_chunks().to_batches()


@dataclass(frozen=True, slots=True)
class SparkChanges:
    """Decoded changes in Spark's storage."""

    frame: DataFrame
    tasks: int

    def reports(self) -> list[DecodeReport]:
        return decode_reports(self.frame.where(f"bucket <= {REPORT}").collect())

    def after(self, earlier: SparkChanges) -> SparkChanges:
        return SparkChanges(earlier.frame.union(self.frame), self.tasks)

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        results = self.frame.where(f"bucket >= 0 AND seq_num < {order.edge}").selectExpr(
            f"bucket % {order.count} AS bucket", "seq_num", "payload"
        )
        if order.needed:
            numbers = results.sparkSession.range(order.needed.start, order.needed.stop, 1, 1)
            results = results.union(numbers.selectExpr("int(id)", "-1L", "X''"))
        tasks = max(1, min(self.tasks, order.count, order.changes // TASK_CHANGES + 1))
        # One task needs no shuffle; each of several gets whole buckets.
        spread = results.coalesce(1) if tasks == 1 else results.repartition(tasks, "bucket")
        ordered = spread.sortWithinPartitions("bucket", "seq_num")
        work = partial(write_net_changes, step=order.step)
        return written_parts(ordered.mapInArrow(work, TASK_RESULTS).collect())


def fold_buckets(spark: SparkSession, step: FoldStep, tasks: int) -> list[WrittenPart]:
    """Fold the buckets of the step, at most `tasks` at once."""
    count = len(step.buckets)
    if not count:
        return []
    frame = spark.range(0, count, 1, min(count, tasks))
    return written_parts(frame.mapInArrow(partial(fold, step=step), TASK_RESULTS).collect())
