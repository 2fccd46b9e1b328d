"""One batch of records on its way into the archive, as the driver leads it.

    records ─ decode (tasks) ─ reports to the driver: columns, range, truncates
            ─ shuffle by bucket ─ settle (tasks): net changes, parts of a diff
            ─ thresholds ─ commit the diff, or fold a new base (tasks) and commit both

The driver sees reports and names of files, never rows. Files are durable before the manifest names
them; the position is in the manifest alone, so a batch that comes again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from streamfold.archive.failures import ChainGapError
from streamfold.archive.manifest import Manifest
from streamfold.archive.schema import TableSchema
from streamfold.archive.thresholds import Action, Decision, Pending, chain_state, decide
from streamfold.spark.writer.buckets import bucket_count
from streamfold.spark.writer.decode import DecodeReport, DecodeStep, decode
from streamfold.spark.writer.fold import FoldStep, fold, written_parts
from streamfold.spark.writer.job import TableJob
from streamfold.spark.writer.layers import Layer, Stack
from streamfold.spark.writer.parcels import PARCELS, REPORT, raise_failures
from streamfold.spark.writer.published import PublishedTable, Written
from streamfold.spark.writer.settle import SettleStep, empty_parcel, settle

#: Reason of the base that begins an archive.
FIRST = "first"
#: Buckets that the first records are sorted into, before the size of the table is known.
FIRST_BUCKETS = 16
#: Records that the columns are learned from, on the driver.
SAMPLE = 10_000
#: Changes from which on another task pays.
TASK_CHANGES = 20_000
_COLUMNS = ("seq_num", "timestamp", "headers", "body")


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Batch:
    """What the tasks said about one batch of records."""

    first: int
    last: int
    records: int
    changes: int
    ignored: int
    dead: int
    size_bytes: int
    truncated_at: int
    timestamp: int

    @classmethod
    def of(cls, reports: Sequence[DecodeReport]) -> Batch:
        return cls(
            first=min(report.first for report in reports),
            last=max(report.last for report in reports),
            records=sum(report.records for report in reports),
            changes=sum(report.changes for report in reports),
            ignored=sum(report.ignored for report in reports),
            dead=sum(report.dead for report in reports),
            size_bytes=sum(report.size_bytes for report in reports),
            truncated_at=max(report.truncated_at for report in reports),
            timestamp=max(report.timestamp for report in reports),
        )


class TablePipeline:
    """Batches of one table, one after the other; whoever calls holds the table's lock."""

    def __init__(
        self,
        spark: SparkSession,
        job: TableJob,
        published: PublishedTable,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._spark = spark
        self._job = job
        self._published = published
        self._now = now
        #: The last record that was looked at: it may have no change, and so be in no artifact.
        self.consumed: int | None = None

    def process(self, records: DataFrame, *, force: str | None = None) -> Batch | None:
        """Take a batch into the archive; None when all of it is there already.

        `force` is the reason of a base that is wanted whatever the thresholds say.
        """
        self._use_pool()
        schema = self._published.schema or self._learn(records)
        head = self._published.head
        step = DecodeStep(
            decoder=self._job.decoder,
            schema=schema,
            buckets=self._stack().buckets if head is not None else self._first_buckets(),
            head=-1 if head is None else head,
            dead_letters=self._job.dead_letters,
        )
        decoded = records.select(*_COLUMNS).mapInArrow(partial(decode, step=step), PARCELS)
        decoded.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return self._take_in(decoded, schema, force)
        finally:
            decoded.unpersist()

    def due(self) -> str | None:
        """The reason of a base that is due though nothing changes; None when none is."""
        manifest = self._published.manifest
        if manifest is None:
            return None
        return self._decide(manifest, Pending(0, 0, manifest.base.row_count or 0)).trigger

    def rebase(self, reason: str, closing: Written | None = None) -> Manifest:
        """Fold the archive, and the diff that closes it, into a new base.

        Buckets without a change keep their files, as long as nothing else asks for new ones.
        """
        self._use_pool()
        published, stack = self._published, self._stack()
        manifest = published.writer.manifest
        to_position = closing.plan.to_position if closing else str(published.head)
        if closing is not None:
            stack = stack.with_diff(Layer.pending(closing.plan, closing.parts))
        plan = published.writer.plan_base(to_position)
        count = self._new_count(manifest, stack)
        everything = set(range(stack.buckets))
        keeps = count == stack.buckets and stack.is_bucketed and published.reusable(plan)
        touched = stack.touched() if keeps else everything
        step = FoldStep(stack, plan, self._job.places, tuple(sorted(touched)), count)
        parts = self._fold(step)
        reuse = sorted(everything - touched)
        return published.commit_base(plan, parts, reason=reason, reuse=reuse, closing=closing)

    def _use_pool(self) -> None:
        """Have the jobs of this thread share the cores with other tables, where Spark is fair."""
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._job.table)

    def _take_in(
        self, decoded: DataFrame, known: TableSchema | None, force: str | None
    ) -> Batch | None:
        reports = self._reports(decoded)
        if not reports:
            return None
        batch = Batch.of(reports)
        self._check_no_gap(batch)
        schema = _merged(known, reports)
        if schema is None:  # no record has shown a column yet
            self.consumed = batch.last
            return batch
        self._published.begin(schema)
        if self._published.manifest is None:
            self._write_first(decoded, batch)
        elif batch.changes:
            self._write_diff(decoded, batch, force)
        self.consumed = batch.last
        return batch

    def _learn(self, records: DataFrame) -> TableSchema | None:
        sample = records.select(*_COLUMNS).orderBy("seq_num").limit(SAMPLE).toArrow()
        return self._job.decoder.decode(sample, None).schema if len(sample) else None

    def _reports(self, decoded: DataFrame) -> list[DecodeReport]:
        rows = decoded.where(f"bucket <= {REPORT}").collect()
        raise_failures(rows)
        reports = [msgspec.json.decode(bytes(row.payload), type=DecodeReport) for row in rows]
        return sorted(reports, key=lambda report: report.first)

    def _check_no_gap(self, batch: Batch) -> None:
        """Streams have no gaps, so a batch with one lost records on its way here."""
        known = [at for at in (self.consumed, self._published.head) if at is not None]
        expected = max(known) + 1 if known else batch.first
        if batch.first > expected or batch.last - batch.first + 1 != batch.records:
            raise ChainGapError(
                f"records {batch.first} to {batch.last} are {batch.records}, and {expected} should "
                f"be the first: read stream {self._job.stream!r} again from there"
            )

    def _write_first(self, decoded: DataFrame, batch: Batch) -> None:
        count = bucket_count(batch.size_bytes, self._job.buckets or 1, self._job.bucket_bytes)
        plan = self._published.writer.plan_base(str(batch.last))
        step = SettleStep(plan, self._job.places, batch.truncated_at, None)
        parts = self._settle(decoded, step, count, range(count), batch)
        self._published.commit_base(plan, parts, reason=FIRST)

    def _write_diff(self, decoded: DataFrame, batch: Batch, force: str | None) -> None:
        manifest = self._published.writer.manifest
        assert manifest is not None  # noqa: S101 - the first base is there
        stack = self._stack()
        plan = self._published.writer.plan_diff(manifest.head_position, str(batch.last))
        step = SettleStep(plan, self._job.places, batch.truncated_at, stack)
        needed = range(1) if batch.truncated_at >= 0 else range(0)
        parts = self._settle(decoded, step, stack.buckets, needed, batch)
        diff = Written(plan, parts, batch.records)
        decision = self._decide(manifest, _pending(manifest, diff))
        reason = force or (decision.trigger if decision.action is Action.BASE else None)
        if reason:
            self.rebase(reason, diff)
        else:
            self._published.commit_diff(diff)

    def _settle(
        self, decoded: DataFrame, step: SettleStep, count: int, needed: range, batch: Batch
    ) -> list[Any]:
        """Parts of all buckets that have changes, and of those that are needed anyway."""
        parcels = decoded.where("bucket >= 0").selectExpr(
            f"bucket % {count} AS bucket", "seq_num", "payload"
        )
        if needed:
            empty = [empty_parcel(bucket) for bucket in needed]
            parcels = parcels.union(decoded.sparkSession.createDataFrame(empty, PARCELS))
        tasks = max(1, min(count, batch.changes // TASK_CHANGES + 1))
        # One task needs no exchange by bucket; more of them get whole buckets each.
        spread = parcels.coalesce(1) if tasks == 1 else parcels.repartition(tasks, "bucket")
        ordered = spread.sortWithinPartitions("bucket", "seq_num")
        rows = ordered.mapInArrow(partial(settle, step=step), PARCELS).collect()
        raise_failures(rows)
        return written_parts(rows)

    def _fold(self, step: FoldStep) -> list[Any]:
        count = len(step.buckets)
        if not count:
            return []
        ids = self._spark.range(0, count, 1, count)
        rows = ids.mapInArrow(partial(fold, step=step), PARCELS).collect()
        raise_failures(rows)
        return written_parts(rows)

    def _decide(self, manifest: Manifest, pending: Pending) -> Decision:
        return decide(self._job.thresholds, chain_state(manifest, self._now()), pending)

    def _stack(self) -> Stack:
        manifest = self._published.manifest
        return Stack.of(manifest) if manifest else Stack(None, (), self._first_buckets())

    def _first_buckets(self) -> int:
        return max(FIRST_BUCKETS, self._job.buckets or 1)

    def _new_count(self, manifest: Manifest | None, stack: Stack) -> int:
        """Buckets of the next base: as many as now, or more if the table has grown."""
        if manifest is None:
            return stack.buckets
        form = self._job.formats[0].id
        files = manifest.base.formats.get(form)
        size = files.size_bytes if files else 0
        least = max(stack.buckets, self._job.buckets or 1)
        return bucket_count(size, least, self._job.bucket_bytes)


def _merged(known: TableSchema | None, reports: Sequence[DecodeReport]) -> TableSchema | None:
    """The columns that hold what was known and what the records show."""
    for report in reports:
        found = report.table_schema()
        if found is not None:
            known = known.merged(found) if known is not None else found
    return known


def _pending(manifest: Manifest, diff: Written) -> Pending:
    """What the thresholds are asked about; the rows of the table are those of its base."""
    files = [next(iter(part.files.values())) for part in diff.parts]
    return Pending(
        changes=sum(file.rows or 0 for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        table_rows=manifest.base.row_count or 0,
    )
