"""Takes in records of a stream: decoded, without gaps, up to the last whole transaction.

Held records are not stored: they are read again from the stream when the end arrives, and decoded
with what follows. So a transaction is decoded at most twice, if a batch cuts it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.archive.errors import ChainGapError
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.source_positions import SourcePositions, SourceSpan, joined
from streamfold.snapshotter.spark.errors_from_spark import ServerUnreachableError
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.arrivals import (
    DRIVER_BYTES,
    Arrivals,
    Decoded,
    DriverArrivals,
    SparkArrivals,
    driver_records,
)
from streamfold.snapshotter.spark.table.truncates import first_truncate
from streamfold.snapshotter.spark.tasks.decode import DecodeReport, DecodeStep, without
from streamfold.snapshotter.transactions import TransactionWait
from streamfold.spark.errors import EndpointUnavailableError
from streamfold.spark.stream.client import Connection, Streams, answer_timeout
from streamfold.spark.stream.options import EARLIEST, LATEST, parse_source
from streamfold.spark.stream.range_reads import Range

logger = logging.getLogger(__name__)

#: Seconds for which a short request is retried; a server that is silent for longer gets one.
RETRY_SECONDS = 1.0
#: Records before the tail to look at for the newest commit: nearly always the last one has it.
_LOOK_BACK = 10


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


@dataclass
class StreamEdges:
    """Where the stream of a job starts and ends, as its server says; needs no Spark."""

    job: TableJob
    _start: StreamStart | None = None

    def tail(self) -> int:
        """Return the position after the last record."""
        with self._streams() as streams:
            return int(streams.tail(self.job.stream).seq_num)

    def start(self) -> StreamStart:
        """Return where a table without an archive starts; fetched once, so that it stays the same."""
        if self._start is None:
            job = self.job
            with self._streams() as streams:
                tail = int(streams.tail(job.stream).seq_num)
                if job.start == LATEST:
                    self._start = StreamStart(tail, tail, tail > 0, True)
                elif job.start == EARLIEST:
                    first = streams.first(job.stream)
                    self._start = StreamStart(first, tail, first > 0, job.publish_trimmed)
                else:  # from there on the stream has the whole table, as the configuration says
                    self._start = StreamStart(int(job.start), tail, False, True)
        return self._start

    def timestamp(self, seq_num: int) -> int | None:
        """Return the timestamp of a record in milliseconds; None if it does not exist any more."""
        with self._streams() as streams:
            return streams.timestamp(self.job.stream, seq_num)

    @contextmanager
    def _streams(self) -> Iterator[Streams]:
        """Connect to the server, which has to answer soon: the caller reports failures and retries."""
        given = parse_source({**self.job.source, "stream": self.job.stream}).endpoint
        endpoint = replace(given, retry_timeout=min(given.retry_timeout, RETRY_SECONDS))
        try:
            with Connection(endpoint, answer_timeout(endpoint)) as connection:
                yield Streams(connection)
        except EndpointUnavailableError as error:
            raise ServerUnreachableError(endpoint.origin, error.cause) from error


class TableStream(StreamEdges):
    """Reads for one job; positions come from the archive, never from a checkpoint."""

    def __init__(self, spark: SparkSession, job: TableJob, most_bytes: int = DRIVER_BYTES) -> None:
        """`most_bytes`: bytes of records that the driver may hold."""
        super().__init__(job)
        self.spark = spark
        self._most_records = driver_records(spark)
        self._most_bytes = most_bytes

    def few(self, start: int, end: int, held_from: int | None = None) -> DriverArrivals | None:
        """Read the records, and those before `start` that are held, if the driver can hold them all."""
        endpoint = parse_source(self._options()).endpoint
        first = start if held_from is None else held_from
        wanted = Range(self.job.stream, first, end)
        if len(wanted) > self._most_records:
            return None
        return DriverArrivals.read(endpoint, wanted, start, self._most_bytes)

    def newest_commit(self, start: int, tail: int) -> int | None:
        """Return the LSN of the newest commit among the last records before the tail, from `start` on.

        None if they have no positions of a source.
        """
        last = self.few(max(start, tail - _LOOK_BACK), tail)
        if last is None:
            return None
        found = [SourcePositions.of(batch["headers"]) for batch in last.batches]
        spans = [p.span(0, len(b), 0) for p, b in zip(found, last.batches, strict=True) if p]
        newest = joined(spans)
        return None if newest is None else newest.last

    def first_truncate(self, start: int, give_up: Callable[[], bool]) -> int | None:
        """Return the first record from `start` on that empties the table; None if none does.

        Also None if `give_up` ends the search, which may read all of a long stream.
        """
        wanted = Range(self.job.stream, start, self.tail())
        endpoint = parse_source(self._options()).endpoint
        return first_truncate(endpoint, wanted, self.job.decoder, give_up)

    def arrivals(self, start: int, end: int, held_from: int | None = None) -> Arrivals:
        """Return the records: read by the driver if they are few, and else by tasks."""
        few = self.few(start, end, held_from)
        return self.of(self.records(start, end)) if few is None else few

    def of(self, records: DataFrame) -> SparkArrivals:
        """Return records that Spark reads."""
        return SparkArrivals(records, self.records)

    def records(self, start: int, end: int) -> DataFrame:
        """Read the records from `start` up to, not including, `end`."""
        edges = {"startingOffsets": self._offset(start), "endingOffsets": self._offset(end)}
        return self.spark.read.format("streamfold").options(**self._options(), **edges).load()

    def follow(self, start: int, on_batch: Any, *, name: str, checkpoint: Path) -> StreamingQuery:
        """Start a query that processes what the stream holds now; `checkpoint` is a new folder."""
        options = {
            **self._options(),
            "startingOffsets": self._offset(start),
            "maxRecordsPerTrigger": str(self.job.max_records),
        }
        records = self.spark.readStream.format("streamfold").options(**options).load()
        return (
            records.writeStream.foreachBatch(on_batch)
            .queryName(name)
            .option("checkpointLocation", checkpoint.resolve().as_uri())
            .trigger(availableNow=True)
            .start()
        )

    def _options(self) -> dict[str, str]:
        return {**self.job.source, "stream": self.job.stream}

    def _offset(self, position: int) -> str:
        return json.dumps({self.job.stream: position})


@dataclass(frozen=True, slots=True)
class Batch:
    """The tasks' reports of records that may go into the archive now, in `[first, last]`."""

    first: int
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
    #: Whether a transaction was cut before its end.
    cut: bool = False
    #: The first dead letter: its record, and the reason.
    letter: tuple[int, str] | None = None
    #: Whether they hold the whole table whatever was before: it is emptied, or its first copy begins.
    begins_table: bool = False
    #: The commits of the source that the records are from, and those of all that were read.
    source: SourceSpan | None = None
    source_seen: SourceSpan | None = None

    @classmethod
    def of(cls, taken: Sequence[DecodeReport], read: Sequence[DecodeReport]) -> Batch:
        """Sum up reports, possibly none, of all that were read."""
        seen = read[-1]
        source = joined([report.source for report in taken])
        truncated_at = max((report.truncated_at for report in taken), default=-1)
        return cls(
            first=min((report.first for report in taken), default=seen.last + 1),
            last=max((report.last for report in taken), default=seen.last),
            records=sum(report.records for report in taken),
            changes=sum(report.changes for report in taken),
            ignored=sum(report.ignored for report in taken),
            dead=sum(report.dead for report in taken),
            size_bytes=sum(report.size_bytes for report in taken),
            truncated_at=truncated_at,
            timestamp=seen.timestamp,
            seen=seen.last,
            letter=next((report.letter for report in taken if report.letter), None),
            begins_table=truncated_at >= 0 or (source is not None and source.begins),
            source=source,
            source_seen=joined([report.source for report in read]),
        )


@dataclass(frozen=True, slots=True)
class CompleteRecords:
    """Records that may go into the archive: changes as task results, and the columns they need."""

    batch: Batch
    results: Decoded
    #: The first record that is left out.
    edge: int
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The state of the archive before the records are read."""

    schema: TableSchema | None
    buckets: int
    #: The last record in it.
    head: int | None


class TableIntake:
    """The records of one table, in order; the caller holds the table's lock."""

    def __init__(self, stream: TableStream, clock: Callable[[], float] = time.monotonic) -> None:
        self._job = stream.job
        self._stream = stream
        self._clock = clock
        self._waiting = TransactionWait(stream.job.transactions)
        #: The last record that was read: it may be held back, or hold no change.
        self.seen: int | None = None
        #: The last record that does not matter, because a later one empties the table.
        self._skipped = -1

    @property
    def held_from(self) -> int | None:
        """The first record of a transaction that waits for its end."""
        return self._waiting.held.since if self._waiting.held else None

    def restart(self) -> None:
        """Forget what was read: the records after the archive's head come again."""
        self.seen, self._skipped = None, -1
        self._waiting.forget()

    def skip_to(self, truncate: int) -> None:
        """Continue at a record that empties the table; those before it are read no more."""
        self._skipped = self.seen = truncate - 1
        self._waiting.forget()

    @contextmanager
    def take(self, records: Arrivals, known: ArchiveState) -> Iterator[CompleteRecords | None]:
        """Yield what may go into the archive, valid in the block; None if the archive has all of it."""
        with ExitStack() as stack:
            step = self._step(records, known)
            decoded, reports, step = _decoded_alike(stack, records, step)
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
            earlier = records.earlier(held_from, first)
            held, held_reports, declared = _decoded_alike(stack, earlier, step)
            if declared is not step:
                decoded = stack.enter_context(records.decoded(declared))
                reports = decoded.reports()
            both = [*held_reports, *reports]
            yield _complete_records(decoded.after(held), both, edge, declared, cut)

    def is_held_enough(self) -> bool:
        """Return whether what is held has waited long enough."""
        now = self._clock()
        last = -1 if self.seen is None else self.seen
        return self._waiting.is_complete(now) or self._waiting.is_cut(last, now)

    @contextmanager
    def release(self, known: ArchiveState) -> Iterator[CompleteRecords | None]:
        """Yield what is held although its end has not arrived; None if nothing is."""
        if self.held_from is None or self.seen is None:
            yield None
            return
        edge = self.seen + 1
        records = self._stream.arrivals(self.held_from, edge)
        cut = not self._waiting.is_complete(self._clock())
        if cut:
            self._warn(self.seen)
        self._waiting.forget()
        with ExitStack() as stack:
            step = self._step(records, known)
            decoded, reports, step = _decoded_alike(stack, records, step)
            yield _complete_records(decoded, reports, edge, step, cut)

    def _edge(self, reports: Sequence[DecodeReport]) -> tuple[int, bool]:
        """Return the first record that has to wait, or the next; and whether a transaction is cut."""
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
                "published in parts; raise transactions.max_wait or max_records if it is to end later",
                self._job.table, held.id, held.since, last,
            )  # fmt: skip

    def _step(self, records: Arrivals, known: ArchiveState) -> DecodeStep:
        head = max(self._skipped, -1 if known.head is None else known.head)
        return DecodeStep(
            decoder=self._job.decoder,
            schema=self._schema(records, known.schema, head),
            buckets=known.buckets,
            head=head,
            dead_letters=self._job.dead_letters,
            lettered=-1 if self.seen is None else self.seen,
            skipped=self._job.skipped,
        )

    def _schema(self, records: Arrivals, known: TableSchema | None, head: int) -> TableSchema:
        """Return the table's columns, learned from the first records until the key is known.

        Otherwise every task would learn for itself, one from whole numbers and another from fractions.
        """
        if known is not None and not known.has_untyped_key:
            return known
        sample = without(records.sample(head), self._job.skipped)
        found = self._job.decoder.decode(sample, known).schema if len(sample) else known
        return found or TableSchema.of_keys(self._job.decoder.key_fields)

    def _check_no_gap(self, reports: Sequence[DecodeReport], head: int | None) -> None:
        """Raise if the batch has a gap: streams have none, so records were lost."""
        first, last = reports[0].first, max(report.last for report in reports)
        count = sum(report.records for report in reports)
        known = [at for at in (self.seen, head) if at is not None]
        expected = max(known) + 1 if known else first
        if first > expected or last - first + 1 != count:
            raise ChainGapError(
                f"the batch holds {count} records from {first} to {last}, and must start at {expected} "
                f"without gaps: read stream {self._job.stream!r} again from there"
            )


def _decoded_alike(
    stack: ExitStack, records: Arrivals, step: DecodeStep
) -> tuple[Decoded, list[DecodeReport], DecodeStep]:
    """Decode all records with the columns that some of them declare.

    A declaration reaches the records of its own part alone; the other parts would give a new column the
    type of its values. So all are then decoded again. Returns the step that was used.
    """
    decoded: Decoded = stack.enter_context(records.decoded(step))
    reports = decoded.reports()
    declared = _merged(step.schema, [report for report in reports if report.declares])
    if declared == step.schema:
        return decoded, reports, step
    step = replace(step, schema=declared)
    decoded = stack.enter_context(records.decoded(step))
    return decoded, decoded.reports(), step


def _complete_records(
    decoded: Decoded, reports: Sequence[DecodeReport], edge: int, step: DecodeStep, cut: bool
) -> CompleteRecords:
    """Return what is before the edge: runs end there, so whole task results are in or out."""
    taken = [report for report in reports if report.first < edge]
    batch = replace(Batch.of(taken, reports), cut=cut)
    return CompleteRecords(batch, decoded, edge, _merged(step.schema, taken))


def _merged(known: TableSchema, reports: Sequence[DecodeReport]) -> TableSchema:
    """Return the columns that hold what was known and what the records show."""
    for report in reports:
        found = report.table_schema()
        known = known.merged(found) if found is not None else known
    return known
