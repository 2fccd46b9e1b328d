"""Records on their way into the archive: the driver decodes a few alone, tasks of Spark decode many.

Both run the functions of `tasks`, so the archive does not depend on which of them did the work. A
small batch costs the driver milliseconds; Spark would plan a query and keep Python workers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from streamfold.archive.write.artifacts import WrittenPart
from streamfold.errors import InvalidError
from streamfold.snapshotter.spark.tasks.decode import DecodeReport, DecodeStep, decode
from streamfold.snapshotter.spark.tasks.fold import FoldStep, fold, written_parts
from streamfold.snapshotter.spark.tasks.net import NetStep, empty_result, write_net_changes
from streamfold.snapshotter.spark.tasks.results import (
    REPORT,
    TASK_RESULTS,
    TaskResult,
    raise_task_errors,
    result_batch,
    task_results,
)
from streamfold.spark.stream.client import Endpoint, answer_timeout
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch

#: Columns that decoders get.
COLUMNS = ("seq_num", "timestamp", "headers", "body")
#: Records from which the driver learns the columns of a table.
SAMPLE = 10_000
#: Records that the driver decodes alone: about a second of work.
DRIVER_RECORDS = 200_000
#: The setting of Spark that overrides it; with 0, tasks do all work.
DRIVER_RECORDS_SETTING = "spark.streamfold.driverRecords"
#: Bytes of records that the driver holds at once, of one table and of all tables together, and what
#: every table may have at least. Decoded changes take several times as much.
DRIVER_BYTES, DRIVER_BYTES_TOTAL, DRIVER_BYTES_MIN = 32 << 20, 128 << 20, 2 << 20
#: Bytes of files that the driver folds alone, for the same reason as above.
FOLD_BYTES = 16 << 20
#: Changes from which on another task pays off.
TASK_CHANGES = 20_000


def driver_records(spark: SparkSession) -> int:
    """Return how many records the driver decodes alone; raises InvalidError for a wrong setting."""
    text = spark.conf.get(DRIVER_RECORDS_SETTING, str(DRIVER_RECORDS)) or ""
    if not text.isdecimal():
        raise InvalidError(
            f"{DRIVER_RECORDS_SETTING} is {text!r}, but must be a number of records, "
            f"such as 0 for a driver that leaves all work to tasks"
        )
    return int(text)


def driver_bytes(tables: int) -> int:
    """Return the bytes of records that each of so many tables may hold on the driver."""
    return max(DRIVER_BYTES_MIN, min(DRIVER_BYTES, DRIVER_BYTES_TOTAL // tables))


@dataclass(frozen=True, slots=True)
class PartsOrder:
    """Which parts to write of decoded changes."""

    step: NetStep
    #: Buckets of the artifact; a divisor of those that the changes were decoded into.
    count: int
    #: Buckets that get a part even without changes.
    needed: range
    #: The first record whose changes are left out.
    edge: int
    changes: int


class Decoded(Protocol):
    """Task results of decoded records."""

    def reports(self) -> list[DecodeReport]:
        """Return the reports in the order of the stream; raises the error of a task that failed."""
        ...

    def after(self, earlier: Any) -> Decoded:
        """Return these results together with those of earlier records, decoded in the same way."""
        ...

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        """Write the net changes of each bucket as one part."""
        ...


class Arrivals(Protocol):
    """Records of a stream without gaps."""

    def sample(self, after: int) -> pa.Table:
        """Return the first records after this one."""
        ...

    def earlier(self, start: int, end: int) -> Arrivals:
        """Return records before these."""
        ...

    def decoded(self, step: DecodeStep) -> Any:
        """Return a context manager that gives `Decoded`, valid in its block."""
        ...


@dataclass(frozen=True, slots=True)
class SparkArrivals:
    """Records that tasks read and decode."""

    frame: DataFrame
    #: Reads a range of the same stream.
    records: Callable[[int, int], DataFrame]

    def sample(self, after: int) -> pa.Table:
        later = self.frame.select(*COLUMNS).where(f"seq_num > {after}")
        return later.orderBy("seq_num").limit(SAMPLE).toArrow()

    def earlier(self, start: int, end: int) -> SparkArrivals:
        return SparkArrivals(self.records(start, end), self.records)

    @contextmanager
    def decoded(self, step: DecodeStep) -> Iterator[SparkDecoded]:
        frame = self.frame.select(*COLUMNS).mapInArrow(partial(decode, step=step), TASK_RESULTS)
        frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield SparkDecoded(frame)
        finally:
            frame.unpersist()


@dataclass(frozen=True, slots=True)
class SparkDecoded:
    frame: DataFrame

    def reports(self) -> list[DecodeReport]:
        return _reports(self.frame.where(f"bucket <= {REPORT}").collect())

    def after(self, earlier: SparkDecoded) -> SparkDecoded:
        return SparkDecoded(earlier.frame.union(self.frame))

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        results = self.frame.where(f"bucket >= 0 AND seq_num < {order.edge}").selectExpr(
            f"bucket % {order.count} AS bucket", "seq_num", "payload"
        )
        if order.needed:
            empty = [empty_result(bucket) for bucket in order.needed]
            results = results.union(results.sparkSession.createDataFrame(empty, TASK_RESULTS))
        tasks = max(1, min(order.count, order.changes // TASK_CHANGES + 1))
        # One task needs no shuffle; each of several gets whole buckets.
        spread = results.coalesce(1) if tasks == 1 else results.repartition(tasks, "bucket")
        ordered = spread.sortWithinPartitions("bucket", "seq_num")
        work = partial(write_net_changes, step=order.step)
        return _parts(ordered.mapInArrow(work, TASK_RESULTS).collect())


@dataclass(frozen=True, slots=True)
class DriverArrivals:
    """Records that the driver has read."""

    #: From `start` on; there may be earlier ones.
    batches: Sequence[pa.RecordBatch]
    start: int

    @classmethod
    def read(
        cls, endpoint: Endpoint, wanted: Range, start: int, most_bytes: int
    ) -> DriverArrivals | None:
        """Read the range, of which the records from `start` on are new; None if it is too large."""
        schema, found, size = arrow_schema(COLUMNS), [], 0
        timeout = answer_timeout(endpoint)
        for columns in read_range(endpoint, wanted, Wanted(), io_timeout=timeout):
            found.append(record_batch(wanted.stream, columns, schema))
            size += found[-1].nbytes
            if size > most_bytes:
                return None
        return cls(found, start)

    def sample(self, after: int) -> pa.Table:
        later = self._between(max(self.start, after + 1), None)
        return pa.Table.from_batches(later, _SCHEMA).slice(0, SAMPLE)

    def earlier(self, start: int, end: int) -> DriverArrivals:
        return DriverArrivals(self._between(start, end), start)

    @contextmanager
    def decoded(self, step: DecodeStep) -> Iterator[DriverDecoded]:
        found = task_results(decode(self._between(self.start, None), step=step))
        yield DriverDecoded(
            tuple(result._replace(payload=bytes(result.payload)) for result in found)
        )

    def _between(self, start: int, end: int | None) -> list[pa.RecordBatch]:
        found = []
        for batch in self.batches:
            mask = pc.greater_equal(batch["seq_num"], start)
            if end is not None:
                mask = pc.and_(mask, pc.less(batch["seq_num"], end))
            if len(kept := batch.filter(mask)):
                found.append(kept)
        return found


_SCHEMA = arrow_schema(COLUMNS)


@dataclass(frozen=True, slots=True)
class DriverDecoded:
    results: tuple[TaskResult, ...]

    def reports(self) -> list[DecodeReport]:
        return _reports([result for result in self.results if result.bucket <= REPORT])

    def after(self, earlier: DriverDecoded) -> DriverDecoded:
        return DriverDecoded((*earlier.results, *self.results))

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        taken = [
            result._replace(bucket=result.bucket % order.count)
            for result in self.results
            if result.bucket >= 0 and result.seq_num < order.edge
        ]
        taken += [empty_result(bucket) for bucket in order.needed]
        taken.sort(key=lambda result: (result.bucket, result.seq_num))
        return _parts(task_results(write_net_changes([result_batch(taken)], step=order.step)))


def fold_buckets(spark: SparkSession, step: FoldStep) -> list[WrittenPart]:
    """Fold the buckets of the step: on the driver if their files are small, else a task for each."""
    count = len(step.buckets)
    if not count:
        return []
    if step.size_bytes <= FOLD_BYTES and driver_records(spark):
        ids = pa.RecordBatch.from_pydict({"id": list(range(count))})
        return _parts(task_results(fold([ids], step=step)))
    frame = spark.range(0, count, 1, count)
    return _parts(frame.mapInArrow(partial(fold, step=step), TASK_RESULTS).collect())


def _reports(rows: Sequence[Any]) -> list[DecodeReport]:
    raise_task_errors(rows)
    reports = [msgspec.json.decode(bytes(row.payload), type=DecodeReport) for row in rows]
    return sorted(reports, key=lambda report: report.first)


def _parts(rows: Any) -> list[WrittenPart]:
    found = list(rows)
    raise_task_errors(found)
    return written_parts(found)
