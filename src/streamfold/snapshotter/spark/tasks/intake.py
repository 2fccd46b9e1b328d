"""Takes records into an archive: (records, state of the table) in, durable and uncommitted parts out.

    records ─ decode ─ where the last whole transaction ends, which columns there are
            ─ by bucket ─ net changes, parts of a diff or of a first base

A small range runs in a task; for a backlog this runs on the driver, and tasks read, decode and write.
It needs no Spark, and gets the driver's clock as a number: the same input gives the same parts.

Records of an unfinished transaction are not stored, but read again when its end arrives. So a
transaction is decoded at most twice, if a batch cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from uuid import uuid4

from streamfold.archive.buckets import bucket_count
from streamfold.archive.errors import ChainGapError
from streamfold.archive.manifest.model import Manifest, SourceRange
from streamfold.archive.read.layers import Layer
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenDiff, WrittenPart
from streamfold.snapshotter.errors import StreamTrimmedError
from streamfold.snapshotter.source_positions import SourceSpan, joined
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.arrivals import Arrivals, DecodedChanges, PartsOrder
from streamfold.snapshotter.spark.tasks.decode import DecodeReport, DecodeStep
from streamfold.snapshotter.spark.tasks.net import NetStep
from streamfold.snapshotter.transactions import OpenTransaction, TransactionWait

#: Records without a change of the table after which a diff without changes moves the archive's head.
HEAD_RECORDS = 100_000
#: Reason of an archive's first base.
FIRST = "first"
#: Buckets that the first records are sorted into, before the size of the table is known.
FIRST_BUCKETS = 16


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a table without an archive starts in its stream."""

    seq_num: int
    #: The tail of the stream at that time.
    tail: int
    #: Whether earlier records are gone or left out: rows may be missing, unless later records hold all.
    lacks_records: bool
    #: Whether the configuration asks for such a table.
    is_accepted: bool

    @property
    def is_refused(self) -> bool:
        return self.lacks_records and not self.is_accepted


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """How far the stream was read beyond the archive's head; lost with the process, and read again."""

    wait: TransactionWait
    #: The last record that was read: it may be held back, or hold no change.
    seen: int | None = None
    #: The last record that does not matter, because a later one empties the table.
    skipped: int = -1
    #: Dead letters up to this record are already written.
    lettered: int = -1

    @property
    def held_from(self) -> int | None:
        """The first record of a transaction that waits for its end."""
        return self.wait.transaction.since if self.wait.transaction else None


@dataclass(frozen=True)
class TableState:
    """A table before its next records; pickled with the task that takes them in."""

    job: TableJob
    schema: TableSchema
    read: ReadPosition
    #: The driver's monotonic clock.
    now: float
    #: What is committed, without the diffs before the last; None before the first base.
    manifest: Manifest | None = None
    #: Set without a manifest.
    start: StreamStart | None = None
    #: Whether the records are those of a held transaction, which waits no longer.
    releases: bool = False
    #: Whether that transaction is cut: it is not known to be complete.
    cuts: bool = False

    @property
    def head(self) -> int | None:
        """The last record in the archive."""
        manifest = self.manifest
        return self.job.layout.seq_num(manifest.head_position) if manifest else None

    @property
    def source_range(self) -> SourceRange | None:
        """The source commits in the last artifact."""
        return self.manifest.artifacts[-1].source_range if self.manifest else None

    @cached_property
    def buckets(self) -> int:
        """The buckets that changes are sorted into."""
        if self.manifest is None:
            return max(FIRST_BUCKETS, self.job.buckets or 1)
        return Layer.of(self.manifest, self.manifest.base).buckets

    def incomplete_before(self) -> str | None:
        """Return before which position changes are missing from a table that begins now.

        None if none are; raises StreamTrimmedError unless the configuration accepts that some are.
        """
        start, job = self.start, self.job
        if start is None or not start.lacks_records:
            return None
        if start.is_refused:
            raise StreamTrimmedError(job.table, job.stream, start.seq_num)
        return job.layout.position(start.seq_num)

    def plan(
        self, schema: TableSchema, last: int, source: SourceRange | None, incomplete: str | None
    ) -> PartPlan:
        """Return the plan of the next diff, or of the first base."""
        manifest, job = self.manifest, self.job
        bases, diffs = job.layout.formats(job.formats, job.diff_formats)
        return PartPlan(
            epoch=manifest.epoch if manifest else 1,
            from_position=manifest.head_position if manifest else None,
            to_position=job.layout.position(last),
            attempt=uuid4().hex,
            schema=schema,
            formats=diffs if manifest else bases,
            order=job.layout.order,
            source_range=source,
            incomplete_before=incomplete,
            layout=job.layout,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Records that may go into the archive now, summed up, and how far the stream was read."""

    last: int
    records: int
    changes: int
    ignored: int
    dead: int
    size_bytes: int
    truncated_at: int
    #: Milliseconds and number of the last record that was read: it may be held back.
    timestamp: int
    seen: int
    #: Milliseconds of the last record that may go into the archive; None without any.
    last_timestamp: int | None = None
    #: The transaction that was cut before its end.
    cut: OpenTransaction | None = None
    #: The first dead letter: its record, and the reason.
    letter: tuple[int, str] | None = None
    #: Whether they hold the whole table whatever was before: it is emptied, or its first copy begins.
    begins_table: bool = False
    #: The source commits of these records, and of all that were read.
    source: SourceSpan | None = None
    source_seen: SourceSpan | None = None

    @classmethod
    def of(
        cls,
        chosen: Sequence[DecodeReport],
        read: Sequence[DecodeReport],
        cut: OpenTransaction | None,
    ) -> Batch:
        """Sum up the chosen reports, possibly none, of all that were read."""
        seen = read[-1]
        source = joined([report.source for report in chosen])
        truncated_at = max((report.truncated_at for report in chosen), default=-1)
        return cls(
            last=max((report.last for report in chosen), default=seen.last),
            records=sum(report.records for report in chosen),
            changes=sum(report.changes for report in chosen),
            ignored=sum(report.ignored for report in chosen),
            dead=sum(report.dead for report in chosen),
            size_bytes=sum(report.size_bytes for report in chosen),
            truncated_at=truncated_at,
            timestamp=seen.timestamp,
            seen=seen.last,
            last_timestamp=(chosen[-1].timestamp or None) if chosen else None,
            cut=cut,
            letter=next((report.letter for report in chosen if report.letter), None),
            begins_table=truncated_at >= 0 or (source is not None and source.begins),
            source=source,
            source_seen=joined([report.source for report in read]),
        )


@dataclass(frozen=True, slots=True)
class BaseParts:
    """A base that is durable and not committed, with the diff that leads to it."""

    plan: PartPlan
    parts: Sequence[WrittenPart]
    reason: str
    #: Buckets of the last base whose files are reused.
    reuse: Sequence[int] = ()
    closing: WrittenDiff | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """The outcome for some records."""

    read: ReadPosition
    #: None if the archive has all of them, or the table begins after them.
    batch: Batch | None = None
    #: The table's columns with theirs.
    schema: TableSchema | None = None
    #: None if no artifact is due for them.
    written: WrittenDiff | BaseParts | None = None
    #: Seconds that a task took, and bytes of the records that it read, as Arrow data.
    seconds: float = field(default=0.0, compare=False)
    size_bytes: int = field(default=0, compare=False)


def take_in(arrivals: Arrivals, state: TableState) -> Intake:
    """Write the records that may go into the archive, up to the last complete transaction."""
    with ExitStack() as stack:
        step = _decode_step(arrivals, state)
        decoded, reports, step = _decoded_alike(stack, arrivals, step)
        if not reports:
            return Intake(state.read)
        _check_no_gap(reports, state)
        edge, cut, wait = _edge(reports, state)
        first, last, held_from = reports[0].first, reports[-1].last, state.read.held_from
        if held_from is not None and held_from < min(first, edge):
            earlier = arrivals.earlier(held_from, first)
            waiting, waiting_reports, declared = _decoded_alike(stack, earlier, step)
            if declared is not step:
                step = declared
                decoded = stack.enter_context(arrivals.decoded(step))
                reports = decoded.reports()
            decoded, reports = decoded.after(waiting), [*waiting_reports, *reports]
        read = replace(state.read, wait=wait, seen=last, lettered=max(last, state.read.lettered))
        # Runs end at the edge, so whole task results are in or out.
        chosen = [report for report in reports if report.first < edge]
        batch, schema = Batch.of(chosen, reports, cut), _merged(step.schema, chosen)
        if not batch.records:  # all records are held
            return Intake(read, batch)
        if _is_passed_over(batch, state):
            return Intake(read)
        return Intake(read, batch, schema, _write(decoded, batch, edge, schema, state))


def _decode_step(arrivals: Arrivals, state: TableState) -> DecodeStep:
    step = DecodeStep(
        decoder=state.job.decoder,
        schema=state.schema,
        buckets=state.buckets,
        head=max(state.read.skipped, -1 if state.head is None else state.head),
        dead_letters=state.job.dead_letters,
        lettered=state.read.lettered,
        skipped=state.job.skipped,
    )
    # Until the key is known, each part would learn its own: one from whole numbers, another from
    # fractions.
    return replace(step, schema=arrivals.learned(step)) if state.schema.has_untyped_key else step


def _decoded_alike(
    stack: ExitStack, arrivals: Arrivals, step: DecodeStep
) -> tuple[DecodedChanges, list[DecodeReport], DecodeStep]:
    """Decode all records with the columns that some of them declare.

    A declaration reaches only the records of its own part; other parts would derive a new column's type
    from its values. So all records are then decoded again. Returns the step that was used.
    """
    decoded: DecodedChanges = stack.enter_context(arrivals.decoded(step))
    reports = decoded.reports()
    declared = _merged(step.schema, [report for report in reports if report.declares])
    if declared == step.schema:
        return decoded, reports, step
    step = replace(step, schema=declared)
    decoded = stack.enter_context(arrivals.decoded(step))
    return decoded, decoded.reports(), step


def _check_no_gap(reports: Sequence[DecodeReport], state: TableState) -> None:
    """Raise if the batch has a gap: streams have none, so records were lost."""
    first, last = reports[0].first, max(report.last for report in reports)
    count = sum(report.records for report in reports)
    ends = [at for at in (state.read.seen, state.head) if at is not None]
    expected = max(ends) + 1 if ends else first
    if first > expected or last - first + 1 != count:
        raise ChainGapError(
            f"the batch holds {count} records from {first} to {last}, and must start at {expected} "
            f"without gaps: read stream {state.job.stream!r} again from there"
        )


def _edge(
    reports: Sequence[DecodeReport], state: TableState
) -> tuple[int, OpenTransaction | None, TransactionWait]:
    """Return the first record that has to wait, or the next one; the cut transaction; the new wait."""
    wait, last = copy(state.read.wait), reports[-1].last
    wait.read((report.tail for report in reports), state.now)
    cut = None
    if wait.is_cut(last, state.now) or state.releases:
        cut = wait.transaction if state.cuts or not state.releases else None
        wait.forget()
    return (last + 1 if wait.transaction is None else wait.transaction.since), cut, wait


def _merged(schema: TableSchema, reports: Sequence[DecodeReport]) -> TableSchema:
    """Return the columns of the schema, with those that the records show."""
    for report in reports:
        shown = report.table_schema()
        schema = schema.merged(shown) if shown is not None else schema
    return schema


def _is_passed_over(batch: Batch, state: TableState) -> bool:
    """Return whether a stream without its beginning may still hold the whole table later on."""
    start = state.start
    if state.manifest is not None or start is None or not start.is_refused:
        return False
    return not batch.begins_table and batch.last + 1 < start.tail


def _write(
    decoded: DecodedChanges, batch: Batch, edge: int, schema: TableSchema, state: TableState
) -> WrittenDiff | BaseParts | None:
    manifest, empties = state.manifest, batch.truncated_at >= 0
    if manifest is None:
        # At most the buckets that the changes are sorted into: others would hold foreign keys.
        count = min(buckets_for(state.job, batch.size_bytes, 1), state.buckets)
        source, needed = batch.source.range_after(None).of_base() if batch.source else None, count
        incomplete = None if batch.begins_table else state.incomplete_before()
    elif batch.changes or batch.dead or _ends_copy(batch, state) or _is_far_behind(batch, state):
        count, source = state.buckets, _diff_range(batch, state)
        needed = int(empties or not batch.changes)
        incomplete = None if empties else manifest.incomplete_before
    else:
        return None
    plan = state.plan(schema, batch.last, source, incomplete)
    step = NetStep(plan, state.job.destination_specs, batch.truncated_at, manifest)
    parts = decoded.write(PartsOrder(step, count, range(needed), edge, batch.changes))
    if manifest is None:
        return BaseParts(plan, parts, FIRST)
    return WrittenDiff(plan, parts, batch.records)


def _ends_copy(batch: Batch, state: TableState) -> bool:
    """Return whether the records only complete a first copy: a diff without changes says so."""
    before = state.source_range
    copying = before is not None and before.copying
    return copying and batch.source is not None and not batch.source.copying


def _is_far_behind(batch: Batch, state: TableState) -> bool:
    """Return whether many records were read without a change: a restart would read them again."""
    return state.head is not None and batch.last - state.head >= HEAD_RECORDS


def _diff_range(batch: Batch, state: TableState) -> SourceRange | None:
    """Return the source commits in the diff of a batch."""
    before = state.source_range
    if batch.source is not None:
        return batch.source.range_after(before)
    # Without changes the table is what it was.
    return None if batch.changes or before is None else before.of_no_change()


def buckets_for(job: TableJob, size_bytes: int, least: int) -> int:
    """Return the buckets of a base of this size; the published layout has one."""
    if job.layout.is_published:
        return 1
    return bucket_count(size_bytes, max(least, job.buckets or 1), job.bucket_bytes)
