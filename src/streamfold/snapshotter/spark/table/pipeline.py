"""Takes one batch of records into the archive, on the driver.

    records ─ decode ─ reports to the driver: columns, range, truncates, open transaction
            ─ by bucket ─ net changes, parts of a diff
            ─ thresholds ─ commit the diff, or fold a new base and commit both

The driver does this alone for a few records and small files; otherwise tasks of Spark do it, and the
driver sees reports and names of files, never rows. Files are durable before the manifest names them;
only the manifest holds the position, so a repeated batch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from streamfold.archive.buckets import bucket_count
from streamfold.archive.maintenance.garbage_collection import Retention
from streamfold.archive.manifest.model import Manifest, SourceRange
from streamfold.archive.write.thresholds import Action, Decision, Pending, chain_state, decide
from streamfold.snapshotter.errors import StreamTrimmedError
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.archive import TableArchive, Written, WrittenBase
from streamfold.snapshotter.spark.table.arrivals import Arrivals, PartsOrder, fold_buckets
from streamfold.snapshotter.spark.table.intake import (
    ArchiveState,
    Batch,
    CompleteRecords,
    StreamStart,
    TableIntake,
    TableStream,
)
from streamfold.snapshotter.spark.tasks.fold import FoldStep
from streamfold.snapshotter.spark.tasks.layers import Layer, Stack
from streamfold.snapshotter.spark.tasks.net import NetStep

#: Records without a change of the table after which a diff without changes moves the archive's head.
HEAD_RECORDS = 100_000
#: Reason of an archive's first base.
FIRST = "first"
#: Buckets that the first records are sorted into, before the size of the table is known.
FIRST_BUCKETS = 16


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """Durable files that are not committed yet, and what remains to be done."""

    written: Written | WrittenBase
    #: The records taken in with it; None for a base of what is already committed.
    batch: Batch | None
    #: When the first of the files were written.
    written_at: datetime
    #: Reason of a base that is wanted instead of this diff.
    force: str | None = None


class TablePipeline:
    """Processes batches of one table, one after the other; the caller holds the table's lock.

    What was written and could not be committed is kept, and `resume` commits it: retries during an
    outage write no file twice.
    """

    def __init__(
        self,
        spark: SparkSession,
        job: TableJob,
        published: TableArchive,
        now: Callable[[], datetime] = _now,
        stream: TableStream | None = None,
    ) -> None:
        self._spark = spark
        self._job = job
        self._published = published
        self._now = now
        #: What was read of the stream, and what waits for the end of its transaction.
        self._stream = stream or TableStream(spark, job)
        self.intake = TableIntake(self._stream)
        self._uncommitted: Uncommitted | None = None

    def process(self, records: Arrivals, *, force: str | None = None) -> Batch | None:
        """Take a batch into the archive, up to the last complete transaction.

        Returns None if the archive has all of it already. `force` is the reason of a base that is
        written whatever the thresholds say.
        """
        self._use_pool()
        with self.intake.take(records, self._known()) as arrived:
            return self._write(arrived, force)

    def resume(self) -> Batch | None:
        """Commit what an earlier attempt has written, if the archive still ends where that starts.

        Returns the records that it takes in; None without any.
        """
        left = self._uncommitted
        if left is None:
            return None
        # Collection may have decided to delete files that are older than the grace: write them again.
        grace = (self._job.retention or Retention()).grace
        is_old = self._now() - left.written_at > grace / 2
        if is_old or not self._published.continues_with(left.written):
            self._uncommitted = None  # it is committed, or has to be written again
            return None
        self._commit(left)
        return left.batch

    def release(self) -> Batch | None:
        """Take in what is held, although its end has not arrived."""
        self._use_pool()
        with self.intake.release(self._known()) as arrived:
            return self._write(arrived, None)

    def due(self) -> str | None:
        """Return the reason of a base that is due without changes; None if none is."""
        manifest = self._published.manifest
        if manifest is None:
            return None
        return self._decide(manifest, Pending(0, 0, manifest.base.row_count or 0)).trigger

    def rebase(self, reason: str) -> None:
        """Fold the archive into a new base.

        Buckets without a change keep their files, unless something else needs new ones.
        """
        self._rebase(reason, None, None, self._now())

    def _rebase(
        self, reason: str, closing: Written | None, batch: Batch | None, written_at: datetime
    ) -> None:
        """Fold the archive and its closing diff into a new base, and commit both."""
        self._use_pool()
        published, stack = self._published, self._stack()
        manifest = published.writer.manifest
        to_position = closing.plan.to_position if closing else str(published.writer.head)
        if closing is not None:
            published.complete(closing)
            stack = stack.with_diff(Layer.pending(closing.plan, closing.parts))
        last = closing.plan.source_range if closing else published.source_range
        artifact = closing.plan if closing else published.writer.manifest
        plan = published.writer.plan_base(
            to_position,
            last.of_base() if last else None,
            artifact.incomplete_before if artifact else None,
        )
        count = self._new_count(manifest, stack)
        everything = set(range(stack.buckets))
        keeps = count == stack.buckets and stack.is_bucketed and published.reusable(plan)
        touched = stack.touched() if keeps else everything
        step = FoldStep(stack, plan, self._job.destination_specs, tuple(sorted(touched)), count)
        parts = fold_buckets(self._spark, step)
        reuse = sorted(everything - touched)
        written = WrittenBase(plan, parts, reason, reuse, closing)
        self._commit(Uncommitted(written, batch, written_at))

    def _commit(self, left: Uncommitted) -> None:
        """Commit what is written, and keep it for another attempt until that succeeds."""
        self._uncommitted = left
        if isinstance(left.written, WrittenBase):
            self._published.commit_base(left.written)
        else:
            self._commit_diff(left.written, left)
        self._uncommitted = None

    def _commit_diff(self, diff: Written, left: Uncommitted) -> None:
        """Commit a diff, or the base that the thresholds want instead."""
        manifest = self._published.writer.manifest
        assert manifest is not None  # noqa: S101 - the first base exists
        decision = self._decide(manifest, _pending(manifest, diff))
        reason = left.force or (decision.trigger if decision.action is Action.BASE else None)
        if reason:
            self._rebase(reason, diff, left.batch, left.written_at)
        else:
            self._published.commit_diff(diff)

    def _use_pool(self) -> None:
        """Let the jobs of this thread share the cores fairly with other tables."""
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._job.table)

    def _known(self) -> ArchiveState:
        published = self._published
        return ArchiveState(published.schema, self._stack().buckets, published.head)

    def _write(self, arrived: CompleteRecords | None, force: str | None) -> Batch | None:
        if arrived is None:
            return None
        batch, schema = arrived.batch, arrived.schema
        if not batch.records:  # all records are held
            return batch
        if self._published.manifest is None and self._is_passed_over(batch):
            return None
        self._published.begin(schema)
        if self._published.manifest is None:
            self._write_first(arrived)
        elif batch.changes or batch.dead or self._ends_copy(batch) or self._is_far_behind(batch):
            self._write_diff(arrived, force)
        return batch

    def incomplete_before(self, start: StreamStart) -> str | None:
        """Return before which position changes are missing from a table that begins there.

        None if none are; raises StreamTrimmedError unless the configuration accepts that some are.
        """
        if not start.lacks_records:
            return None
        if not start.is_accepted:
            raise StreamTrimmedError(self._job.table, self._job.stream, start.seq_num)
        return self._job.layout.position(start.seq_num)

    def _is_passed_over(self, batch: Batch) -> bool:
        """Return whether a stream without its beginning may still hold the whole table, later on."""
        start = self._stream.start()
        is_refused = start.lacks_records and not start.is_accepted
        return is_refused and not batch.begins_table and batch.last + 1 < start.tail

    def _source_range(self, batch: Batch) -> SourceRange | None:
        """Return the commits of the source in the diff of a batch."""
        before = self._published.source_range
        if batch.source is not None:
            return batch.source.range_after(before)
        # Without changes the table is what it was.
        return None if batch.changes or before is None else before.of_no_change()

    def _ends_copy(self, batch: Batch) -> bool:
        """Return whether the records only complete a first copy: a diff without changes says so."""
        before = self._published.source_range
        copying = before is not None and before.copying
        return copying and batch.source is not None and not batch.source.copying

    def _is_far_behind(self, batch: Batch) -> bool:
        """Return whether many records were read without a change: a restart would read them again."""
        head = self._published.head
        return head is not None and batch.last - head >= HEAD_RECORDS

    def _write_first(self, arrived: CompleteRecords) -> None:
        batch = arrived.batch
        # At most those that the changes are sorted into: more would hold other keys than their own.
        count = min(self._count_for(batch.size_bytes, 1), self._first_buckets())
        source = batch.source.range_after(None).of_base() if batch.source else None
        plan = self._published.writer.plan_base(
            self._job.layout.position(batch.last),
            source,
            None if batch.begins_table else self.incomplete_before(self._stream.start()),
        )
        step = NetStep(plan, self._job.destination_specs, batch.truncated_at, None)
        order = PartsOrder(step, count, range(count), arrived.edge, batch.changes)
        written_at = self._now()
        parts = arrived.results.write(order)
        first = WrittenBase(plan, parts, FIRST, dead=batch.dead)
        self._commit(Uncommitted(first, batch, written_at))

    def _write_diff(self, arrived: CompleteRecords, force: str | None) -> None:
        batch, manifest = arrived.batch, self._published.writer.manifest
        assert manifest is not None  # noqa: S101 - the first base exists
        stack = self._stack()
        to_position = self._job.layout.position(batch.last)
        plan = self._published.writer.plan_diff(
            manifest.head_position,
            to_position,
            self._source_range(batch),
            empties=batch.truncated_at >= 0,
        )
        step = NetStep(plan, self._job.destination_specs, batch.truncated_at, stack)
        needed = range(1) if batch.truncated_at >= 0 or not batch.changes else range(0)
        order = PartsOrder(step, stack.buckets, needed, arrived.edge, batch.changes)
        written_at = self._now()
        parts = arrived.results.write(order)
        diff = Written(plan, parts, batch.records, batch.dead)
        self._commit(Uncommitted(diff, batch, written_at, force))

    def _decide(self, manifest: Manifest, pending: Pending) -> Decision:
        return decide(self._job.thresholds, chain_state(manifest, self._now()), pending)

    def _stack(self) -> Stack:
        manifest = self._published.manifest
        return Stack.of(manifest) if manifest else Stack(None, (), self._first_buckets())

    def _first_buckets(self) -> int:
        return max(FIRST_BUCKETS, self._job.buckets or 1)

    def _new_count(self, manifest: Manifest | None, stack: Stack) -> int:
        """Return the buckets of the next base: as many as now, or more if the table has grown."""
        if manifest is None:
            return stack.buckets
        form = self._job.formats[0].id
        files = manifest.base.formats.get(form)
        size = files.size_bytes if files else 0
        return self._count_for(size, stack.buckets)

    def _count_for(self, size_bytes: int, least: int) -> int:
        """Return the buckets of a base of this size; the published layout has one."""
        if self._job.layout.is_published:
            return 1
        return bucket_count(size_bytes, max(least, self._job.buckets or 1), self._job.bucket_bytes)


def _pending(manifest: Manifest, diff: Written) -> Pending:
    """Return the input of the thresholds; the table's rows are those of its base."""
    files = [next(iter(part.files.values())) for part in diff.parts]
    return Pending(
        changes=sum(file.rows or 0 for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        table_rows=manifest.base.row_count or 0,
    )
