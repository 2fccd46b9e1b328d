"""First step of a batch, in tasks: decodes records to changes, by the buckets of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.buckets import bucket_numbers
from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.decoder import DEAD_LETTERS, ChangeDecoder, Decoded
from streamfold.snapshotter.source_positions import SourceSpan
from streamfold.snapshotter.spark.destinations import DeadLetters
from streamfold.snapshotter.spark.tasks.results import REPORT, Batches, TaskResult, pack, task
from streamfold.snapshotter.transactions import CLOSED, SILENT, Tail

#: Reason of the dead letter of a record that is to be skipped.
_SKIPPED = "dead_letters.records names it"
#: Records from which a table's columns are learned.
SAMPLE = 10_000


class DecodeReport(msgspec.Struct, frozen=True):
    """What a run of records holds; small, however long the run.

    A batch of records is one run, or two if it ends in a transaction that starts in it.
    """

    first: int
    last: int
    records: int
    changes: int
    ignored: int
    dead: int
    #: Bytes of the changes in memory.
    size_bytes: int
    #: The last record that empties the table, -1 without one.
    truncated_at: int
    #: Milliseconds of the last record.
    timestamp: int
    #: The columns that these records show.
    schema: bytes | None = None
    #: The transaction that they end in.
    tail: Tail = SILENT
    #: The source commits that they are from.
    source: SourceSpan | None = None
    #: The first dead letter: its record, and the reason.
    letter: tuple[int, str] | None = None
    #: Whether some of the columns are declared: all records must be read with their types.
    declares: bool = False

    def table_schema(self) -> TableSchema | None:
        return TableSchema.from_json(msgspec.json.decode(self.schema)) if self.schema else None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What all tasks of the step need; pickled."""

    decoder: ChangeDecoder
    schema: TableSchema
    buckets: int
    #: Records up to here are already in the archive.
    head: int
    dead_letters: DeadLetters
    #: Dead letters up to this record are already written: records may be read twice.
    lettered: int = -1
    #: Records that become dead letters, whatever they hold.
    skipped: tuple[int, ...] = ()


@task
def decode(batches: Batches, step: DecodeStep) -> Iterator[TaskResult]:
    """Yield a report for each run of records, and its changes by bucket, as bytes."""
    for result in decode_records(batches, step):
        is_report = result.bucket == REPORT
        yield result if is_report else result._replace(payload=pack(result.payload))


def decode_records(batches: Batches, step: DecodeStep) -> Iterator[TaskResult]:
    """Yield a report for each run of records, and its changes by bucket, as tables.

    Results carry the first record of their run, so that those of an open transaction can be left out.
    """
    for batch in batches:
        fresh = batch.filter(pc.greater(batch.column("seq_num"), step.head))
        if len(fresh):
            yield from _decode(fresh, step)


@task
def learn(batches: Batches, step: DecodeStep) -> Iterator[TaskResult]:
    """Yield one result, the columns of the step with those that the first records show, as JSON."""
    yield TaskResult(REPORT, 0, learned_schema(batches, step).canonical_json)


def learned_schema(batches: Batches, step: DecodeStep) -> TableSchema:
    """Return the columns of the step with those that the first records show."""
    sample, count = [], 0
    for batch in batches:
        used = pc.greater(batch["seq_num"].cast(pa.int64()), step.head)
        sample.append(batch.filter(pc.and_not(used, _is_skipped(batch, step))))
        count += len(sample[-1])
        if count >= SAMPLE:
            break
    if not count:
        return step.schema
    records = pa.Table.from_batches(sample).slice(0, SAMPLE)
    return step.decoder.decode(records, step.schema).schema or step.schema


@task
def find_truncate(batches: Batches, decoder: ChangeDecoder) -> Iterator[TaskResult]:
    """Yield one result, the first record that empties the table; none if none does."""
    for records in batches:
        for decoded in _decoded_alone(records, decoder):
            changes = decoded.changes
            truncates = changes["seq_num"].filter(pc.equal(changes["op"], "truncate"))
            if len(truncates):
                yield TaskResult(REPORT, truncates[0].as_py(), b"")
                return


def _decoded_alone(records: pa.RecordBatch, decoder: ChangeDecoder) -> Iterator[Decoded]:
    """Decode records that need not fit the table so far."""
    try:
        yield decoder.decode(records, None)
    except SchemaIncompatibleError:
        # Each record fits the columns that it shows.
        for row in range(len(records)):
            yield decoder.decode(records.slice(row, 1), None)


def _is_skipped(records: pa.RecordBatch, step: DecodeStep) -> Any:
    seq_nums = records.column("seq_num").cast(pa.int64())
    return pc.is_in(seq_nums, value_set=pa.array(step.skipped, pa.int64()))


def _decoded(records: pa.RecordBatch, step: DecodeStep) -> Decoded:
    """Decode the records; those to be skipped become dead letters."""
    skipped = _is_skipped(records, step)
    if not (step.skipped and pc.any(skipped).as_py()):
        return step.decoder.decode(records, step.schema)
    decoded = step.decoder.decode(records.filter(pc.invert(skipped)), step.schema)
    gone = records.filter(skipped)
    columns = [gone["seq_num"], pa.array([_SKIPPED] * len(gone)), gone["body"]]
    letters = pa.table(columns, names=DEAD_LETTERS.names).cast(DEAD_LETTERS)
    positions = decoded.positions
    if positions is not None:
        positions = positions.at(np.flatnonzero(~skipped.to_numpy(zero_copy_only=False)))
    merged = pa.concat_tables([decoded.dead_letters, letters]).sort_by("seq_num")
    return replace(decoded, dead_letters=merged, positions=positions)


def _decode(records: pa.RecordBatch, step: DecodeStep) -> Iterator[TaskResult]:
    decoded = _decoded(records, step)
    letters = decoded.dead_letters
    if len(fresh := letters.filter(pc.greater(letters["seq_num"], step.lettered))):
        step.dead_letters.write(fresh)
    start = 0
    for run, content in _runs(records, decoded):
        changes, truncated_at = _after_truncate(content.changes)
        report = _report(run, content, changes, truncated_at)
        if decoded.positions is not None:
            span = decoded.positions.span(start, start + len(run), report.timestamp)
            report = msgspec.structs.replace(report, source=span)
        start += len(run)
        yield TaskResult(REPORT, report.first, msgspec.json.encode(report))
        if content.schema is not None:
            for bucket, part in _by_bucket(changes, content.schema, step.buckets):
                yield TaskResult(bucket, report.first, part)


def _runs(records: pa.RecordBatch, decoded: Decoded) -> Iterator[tuple[pa.RecordBatch, Decoded]]:
    """Yield the records before the transaction that they end in, and those of the transaction."""
    tail, seq_nums = decoded.tail, records.column("seq_num").to_numpy()
    edge = int(np.searchsorted(seq_nums, tail.since)) if tail.id is not None else 0
    if not edge:
        yield records, decoded
        return
    changes, letters = decoded.changes, decoded.dead_letters
    at = int(np.searchsorted(changes["seq_num"].to_numpy(), tail.since))
    dead = int(np.searchsorted(letters["seq_num"].to_numpy(), tail.since))
    ignored = edge - len(pc.unique(changes["seq_num"].slice(0, at))) - dead
    before = replace(
        decoded,
        changes=changes.slice(0, at),
        dead_letters=letters.slice(0, dead),
        ignored=ignored,
        tail=SILENT if tail.joins else CLOSED,
    )
    after = replace(
        decoded,
        changes=changes.slice(at),
        dead_letters=letters.slice(dead),
        ignored=decoded.ignored - ignored,
    )
    yield records.slice(0, edge), before
    yield records.slice(edge), after


def _report(
    records: pa.RecordBatch, decoded: Decoded, changes: pa.Table, truncated_at: int
) -> DecodeReport:
    seq_nums, letters = records.column("seq_num"), decoded.dead_letters
    time = records.column("timestamp")[-1].cast(pa.int64()).as_py()
    return DecodeReport(
        first=seq_nums[0].as_py(),
        last=seq_nums[-1].as_py(),
        records=len(records),
        changes=len(decoded.changes),
        ignored=decoded.ignored,
        dead=len(letters),
        size_bytes=changes.nbytes,
        truncated_at=truncated_at,
        timestamp=(time or 0) // 1000,
        schema=decoded.schema.canonical_json if decoded.schema else None,
        tail=decoded.tail,
        letter=(letters["seq_num"][0].as_py(), letters["reason"][0].as_py())
        if len(letters)
        else None,
        declares=decoded.declares,
    )


def _after_truncate(changes: pa.Table) -> tuple[pa.Table, int]:
    """Return the changes after the last one that empties the table, and the index of that one."""
    indices = np.flatnonzero(pc.equal(changes["op"], "truncate").to_numpy())
    if not len(indices):
        return changes, -1
    last = int(indices[-1])
    return changes.slice(last + 1), changes["seq_num"][last].as_py()


def _by_bucket(
    changes: pa.Table, schema: TableSchema, buckets: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the changes of each bucket that has any, in order."""
    if not len(changes):
        return
    keys = pa.Table.from_struct_array(changes["key"].combine_chunks())
    numbers = bucket_numbers([keys[name].combine_chunks() for name in schema.key_fields], buckets)
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(buckets + 1))
    ordered = changes.take(pa.array(order)) if buckets > 1 else changes
    for bucket in np.flatnonzero(np.diff(edges)):
        start, end = int(edges[bucket]), int(edges[bucket + 1])
        yield int(bucket), ordered.slice(start, end - start)
