"""Records on their way in: decoded in tasks, without gaps, and up to the last complete transaction.

What is held is not kept anywhere: it is read again from the stream when the end has come, and decoded
with what came after it. So a transaction is decoded twice if it is cut by a batch, never more often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from streamfold.archive.errors import ChainGapError
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.snapshotter.pipeline.transactions import TransactionWait
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.stream import TableStream
from streamfold.snapshotter.spark.tasks.decode import DecodeReport, DecodeStep, decode
from streamfold.snapshotter.spark.tasks.results import REPORT, TASK_RESULTS, raise_task_errors

logger = logging.getLogger(__name__)

#: Records that the columns are learned from, on the driver.
SAMPLE = 10_000
_COLUMNS = ("seq_num", "timestamp", "headers", "body")


@dataclass(frozen=True, slots=True)
class Batch:
    """What the tasks said about records that may go into the archive now, in `[first, last]`."""

    first: int
    last: int
    records: int
    changes: int
    ignored: int
    dead: int
    size_bytes: int
    truncated_at: int
    #: Milliseconds of the last record that was looked at, and its number: it may be held back.
    timestamp: int
    seen: int
    #: Whether a transaction was given up that should have gone on.
    cut: bool = False

    @classmethod
    def of(cls, taken: Sequence[DecodeReport], seen: DecodeReport) -> Batch:
        """Sum up reports, of which there may be none; `seen` is the last one of all."""
        return cls(
            first=min((report.first for report in taken), default=seen.last + 1),
            last=max((report.last for report in taken), default=seen.last),
            records=sum(report.records for report in taken),
            changes=sum(report.changes for report in taken),
            ignored=sum(report.ignored for report in taken),
            dead=sum(report.dead for report in taken),
            size_bytes=sum(report.size_bytes for report in taken),
            truncated_at=max((report.truncated_at for report in taken), default=-1),
            timestamp=seen.timestamp,
            seen=seen.last,
        )


@dataclass(frozen=True, slots=True)
class CompleteRecords:
    """Records that may go into the archive: parcels of their changes, and the columns they need."""

    batch: Batch
    parcels: DataFrame
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """What the archive says before the records are read."""

    schema: TableSchema | None
    buckets: int
    #: The last record that is in it.
    head: int | None


class TableIntake:
    """The records of one table, in their order; whoever calls holds the table's lock."""

    def __init__(
        self, spark: SparkSession, job: TableJob, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job = job
        self._stream = TableStream(spark, job)
        self._clock = clock
        self._waiting = TransactionWait(job.transactions)
        #: The last record that was looked at: it may be held back, or have no change.
        self.seen: int | None = None

    @property
    def held_from(self) -> int | None:
        """The first record of a transaction whose end is waited for."""
        return self._waiting.held.since if self._waiting.held else None

    def restart(self) -> None:
        """Forget what was seen: the records after the archive's head come again."""
        self.seen = None
        self._waiting.forget()

    @contextmanager
    def take(self, records: DataFrame, known: ArchiveState) -> Iterator[CompleteRecords | None]:
        """Give what may go into the archive, as long as the block runs; None if all of it is there."""
        step = self._step(records, known)
        with _decoded(records, step) as decoded:
            reports = _reports(decoded)
            if not reports:
                yield None
                return
            self._check_no_gap(reports, known.head)
            first, held_from = reports[0].first, self.held_from
            edge, cut = self._edge(reports)
            self.seen = reports[-1].last
            if held_from is None or not held_from < min(first, edge):
                yield _complete_records(decoded, reports, edge, step, cut)
                return
            with _decoded(self._stream.records(held_from, first), step) as held:
                both = [*_reports(held), *reports]
                yield _complete_records(held.union(decoded), both, edge, step, cut)

    def is_held_enough(self) -> bool:
        """Whether what is held has to go without what comes after it."""
        now = self._clock()
        last = -1 if self.seen is None else self.seen
        return self._waiting.is_complete(now) or self._waiting.is_cut(last, now)

    @contextmanager
    def release(self, known: ArchiveState) -> Iterator[CompleteRecords | None]:
        """Give what is held though no end of it has come; None if nothing is."""
        if self.held_from is None or self.seen is None:
            yield None
            return
        edge = self.seen + 1
        records = self._stream.records(self.held_from, edge)
        cut = not self._waiting.is_complete(self._clock())
        if cut:
            self._warn(self.seen)
        self._waiting.forget()
        step = self._step(records, known)
        with _decoded(records, step) as decoded:
            yield _complete_records(decoded, _reports(decoded), edge, step, cut)

    def _edge(self, reports: Sequence[DecodeReport]) -> tuple[int, bool]:
        """The first record that has to wait, or the next one; and whether a transaction is cut."""
        now, last = self._clock(), reports[-1].last
        self._waiting.read((report.tail for report in reports), now)
        cut = self._waiting.is_cut(last, now)
        if cut:
            self._warn(last)
            self._waiting.forget()
        held_from = self.held_from
        return (last + 1 if held_from is None else held_from), cut

    def _warn(self, last: int) -> None:
        held = self._waiting.held
        if held is not None:
            logger.warning(
                "table %s: transaction %s began at record %d and has no end up to record %d: it is "
                "published in parts; raise transactions.max_wait or max_records if it is sound",
                self._job.table, held.id, held.since, last,
            )  # fmt: skip

    def _step(self, records: DataFrame, known: ArchiveState) -> DecodeStep:
        return DecodeStep(
            decoder=self._job.decoder,
            schema=self._schema(records, known.schema),
            buckets=known.buckets,
            head=-1 if known.head is None else known.head,
            dead_letters=self._job.dead_letters,
            lettered=-1 if self.seen is None else self.seen,
        )

    def _schema(self, records: DataFrame, known: TableSchema | None) -> TableSchema:
        """The table's columns, learned from the first records while nothing has shown the key.

        Without them every task would learn on its own, one of whole numbers and another of fractions.
        """
        if known is not None and not known.has_untyped_key:
            return known
        sample = records.select(*_COLUMNS).orderBy("seq_num").limit(SAMPLE).toArrow()
        found = self._job.decoder.decode(sample, known).schema if len(sample) else known
        return found or TableSchema.of_keys(self._job.decoder.key_fields)

    def _check_no_gap(self, reports: Sequence[DecodeReport], head: int | None) -> None:
        """Streams have no gaps, so a batch with one lost records on its way here."""
        first, last = reports[0].first, max(report.last for report in reports)
        count = sum(report.records for report in reports)
        known = [at for at in (self.seen, head) if at is not None]
        expected = max(known) + 1 if known else first
        if first > expected or last - first + 1 != count:
            raise ChainGapError(
                f"records {first} to {last} are {count}, and {expected} should be the first: read "
                f"stream {self._job.stream!r} again from there"
            )


@contextmanager
def _decoded(records: DataFrame, step: DecodeStep) -> Iterator[DataFrame]:
    """Parcels and reports, kept as long as the block runs."""
    decoded = records.select(*_COLUMNS).mapInArrow(partial(decode, step=step), TASK_RESULTS)
    decoded.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield decoded
    finally:
        decoded.unpersist()


def _reports(decoded: DataFrame) -> list[DecodeReport]:
    rows = decoded.where(f"bucket <= {REPORT}").collect()
    raise_task_errors(rows)
    reports = [msgspec.json.decode(bytes(row.payload), type=DecodeReport) for row in rows]
    return sorted(reports, key=lambda report: report.first)


def _complete_records(
    decoded: DataFrame, reports: Sequence[DecodeReport], edge: int, step: DecodeStep, cut: bool
) -> CompleteRecords:
    """What is before the edge: runs end there, so whole reports and parcels are in or out."""
    taken = [report for report in reports if report.first < edge]
    batch = replace(Batch.of(taken, reports[-1]), cut=cut)
    parcels = decoded.where(f"bucket >= 0 AND seq_num < {edge}")
    return CompleteRecords(batch, parcels, _merged(step.schema, taken))


def _merged(known: TableSchema, reports: Sequence[DecodeReport]) -> TableSchema:
    """The columns that hold what was known and what the records show."""
    for report in reports:
        found = report.table_schema()
        known = known.merged(found) if found is not None else known
    return known
