"""Records on their way into an archive, and the changes that they decode to.

One task holds the records of a small range; a backlog is spread over tasks, see `backlog`. Both decode
and write with the same functions, so the archive does not depend on which of them did the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import pyarrow as pa

from streamfold.archive.manifest.model import Manifest
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import WrittenPart
from streamfold.archive.write.layout import Layout
from streamfold.errors import NotFoundError, StreamfoldError
from streamfold.snapshotter.spark.errors_from_spark import StreamMissingError
from streamfold.snapshotter.spark.tasks.decode import (
    DecodeReport,
    DecodeStep,
    decode_records,
    learned_schema,
)
from streamfold.snapshotter.spark.tasks.net import NetStep, write_buckets
from streamfold.snapshotter.spark.tasks.results import (
    REPORT,
    TaskResult,
    raise_task_errors,
    written_parts,
)
from streamfold.spark.errors import StreamReplacedError
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls, answer_timeout
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch

T = TypeVar("T")

#: Bytes of records that one task holds for one table; decoded changes take several times as much.
TASK_BYTES = 32 << 20
#: What decoders get.
_SCHEMA = arrow_schema(("seq_num", "timestamp", "headers", "body"))


class RangeTooLargeError(StreamfoldError):
    """One task cannot hold the records: they have to be spread over several."""

    code = "range_too_large"


class LastRecord(NamedTuple):
    """The last record in an archive, and its timestamp."""

    seq_num: int
    timestamp: int

    @classmethod
    def of(cls, manifest: Manifest | None, layout: Layout) -> LastRecord | None:
        """Return the record; None if it or its timestamp is unknown."""
        source = manifest.source if manifest else None
        if manifest is None or source is None or source.timestamp is None:
            return None
        head = layout.seq_num(manifest.head_position)
        is_known = head >= 0 and str(head + 1) in source.offsets.values()
        return cls(head, source.timestamp) if is_known else None

    def check(self, stream: str, shown: int | None) -> None:
        """Raise if the record now has another timestamp: its stream was created anew.

        That includes a stream of another name, unless it is a copy with the same records. A trimmed
        record proves nothing; then only the length of the stream is checked.
        """
        if shown not in (None, self.timestamp):
            raise StreamReplacedError(stream, self.seq_num, self.timestamp, shown)


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


class DecodedChanges(Protocol):
    """Task results of decoded records."""

    def reports(self) -> list[DecodeReport]:
        """Return the reports in the order of the stream; raises the error of a failed task."""
        ...

    def after(self, earlier: Any) -> DecodedChanges:
        """Return these results with those of earlier records, decoded in the same way."""
        ...

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        """Write the net changes of each bucket as one part."""
        ...


class Arrivals(Protocol):
    """Records of a stream without gaps."""

    def learned(self, step: DecodeStep) -> TableSchema:
        """Return the columns of the step with those that the first records show."""
        ...

    def earlier(self, start: int, end: int) -> Arrivals:
        """Return records before these; RangeTooLargeError if they do not fit."""
        ...

    def decoded(self, step: DecodeStep) -> AbstractContextManager[Any]:
        """Return a context manager that yields `DecodedChanges`, valid inside its block."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRecords:
    """Records that a task holds."""

    endpoint: Endpoint
    stream: str
    batches: Sequence[pa.RecordBatch]

    def learned(self, step: DecodeStep) -> TableSchema:
        return learned_schema(self.batches, step)

    def earlier(self, start: int, end: int) -> TaskRecords:
        return replace(self, batches=read_whole(self.endpoint, Range(self.stream, start, end)))

    @contextmanager
    def decoded(self, step: DecodeStep) -> Iterator[TaskChanges]:
        yield TaskChanges(tuple(decode_records(self.batches, step)))


@dataclass(frozen=True, slots=True)
class TaskChanges:
    """Decoded changes that a task holds."""

    results: tuple[TaskResult, ...]

    def reports(self) -> list[DecodeReport]:
        return decode_reports([result for result in self.results if result.bucket == REPORT])

    def after(self, earlier: TaskChanges) -> TaskChanges:
        return TaskChanges((*earlier.results, *self.results))

    def write(self, order: PartsOrder) -> list[WrittenPart]:
        results = [
            result._replace(bucket=result.bucket % order.count)
            for result in self.results
            if result.bucket >= 0 and result.seq_num < order.edge
        ]
        results += [TaskResult(bucket, -1, None) for bucket in order.needed]
        results.sort(key=lambda result: (result.bucket, result.seq_num))
        return written_parts(list(write_buckets(results, order.step)))


def record_batches(endpoint: Endpoint, records: Range) -> Iterator[pa.RecordBatch]:
    """Read the whole range, a few megabytes at a time."""
    try:
        for columns in read_range(endpoint, records, Wanted(), io_timeout=answer_timeout(endpoint)):
            yield record_batch(records.stream, columns, _SCHEMA)
    except NotFoundError:
        # It was just deleted: the next look at its tail tells whether the table waits or stops.
        raise StreamMissingError(records.stream, endpoint.basin, endpoint.origin) from None


def ask_stream(endpoint: Endpoint, stream: str, question: Callable[[StreamCalls], T]) -> T:
    """Ask a question about a stream over a connection of its own; StreamMissingError without it."""
    try:
        with ServerConnection(endpoint, answer_timeout(endpoint)) as connection:
            return question(StreamCalls(connection))
    except NotFoundError:
        raise StreamMissingError(stream, endpoint.basin, endpoint.origin) from None


def read_records(
    endpoint: Endpoint,
    records: Range,
    most_bytes: int = TASK_BYTES,
    after: LastRecord | None = None,
) -> list[pa.RecordBatch]:
    """Read the beginning of the range, up to about `most_bytes`.

    `after` is the record before the range: StreamReplacedError if the stream has another one there,
    DataLossError if it has none.
    """
    batches, size = [], 0
    for batch in _batches_after(endpoint, records, after):
        batches.append(batch)
        size += batch.nbytes
        if size > most_bytes:
            break
    return batches


def _batches_after(
    endpoint: Endpoint, records: Range, last: LastRecord | None
) -> Iterator[pa.RecordBatch]:
    start = records.start if last is None else last.seq_num
    for batch in record_batches(endpoint, replace(records, start=start)):
        if last is not None and batch["seq_num"][0].as_py() == last.seq_num:
            last.check(
                records.stream, (batch["timestamp"][0].cast(pa.int64()).as_py() or 0) // 1000
            )
            batch = batch.slice(1)
        if len(batch):
            yield batch


def read_whole(
    endpoint: Endpoint, records: Range, after: LastRecord | None = None
) -> list[pa.RecordBatch]:
    """Read the whole range; RangeTooLargeError if one task cannot hold it."""
    batches = read_records(endpoint, records, after=after)
    if sum(map(len, batches)) < len(records):
        raise RangeTooLargeError(
            f"records {records.start} to {records.end - 1} of stream {records.stream!r} exceed "
            f"{TASK_BYTES} bytes"
        )
    return batches


def decode_reports(rows: Sequence[Any]) -> list[DecodeReport]:
    """Return the reports of tasks in order; raises the error of a failed task."""
    raise_task_errors(rows)
    reports = [msgspec.json.decode(bytes(row.payload), type=DecodeReport) for row in rows]
    return sorted(reports, key=lambda report: report.first)
