"""First step of a batch, in tasks: decodes records to changes, by the buckets of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.buckets import bucket_numbers
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.decoder import DEAD_LETTERS, ChangeDecoder, Decoded
from streamfold.snapshotter.source_positions import SourceSpan
from streamfold.snapshotter.spark.destinations import DeadLetters
from streamfold.snapshotter.spark.tasks.results import REPORT, Batches, TaskResult, pack, task
from streamfold.snapshotter.transactions import CLOSED, SILENT, Tail

#: Reason of the dead letter of a record that is to be skipped.
_SKIPPED = "dead_letters.records names it"


class DecodeReport(msgspec.Struct, frozen=True):
    """What one task found in a run of records; small, whatever the run.

    A batch of records is one run; or two, if it ends in a transaction that starts in it.
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
    #: Timestamp of the last record, in milliseconds.
    timestamp: int
    #: The columns that these records show.
    schema: bytes | None = None
    #: The transaction that they end in.
    tail: Tail = SILENT
    #: The commits of the source that they are from.
    source: SourceSpan | None = None
    #: The first dead letter: its record, and the reason.
    letter: tuple[int, str] | None = None
    #: Whether some of the columns are declared: all records must be read with their types.
    declares: bool = False

    def table_schema(self) -> TableSchema | None:
        return TableSchema.from_json(msgspec.json.decode(self.schema)) if self.schema else None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What every task of the step needs; pickled with it."""

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
    """Yield a report for each run of records, and its changes by bucket.

    Results carry the first record of their run, so those of an open transaction can be left out.
    """
    for batch in batches:
        fresh = batch.filter(pc.greater(batch.column("seq_num"), step.head))
        if len(fresh):
            yield from _decode(fresh, step)


def without(records: pa.Table, skipped: Sequence[int]) -> pa.Table:
    """Return the records that are not to be skipped."""
    return records.filter(pc.invert(_chosen(records, skipped))) if skipped else records


def _chosen(records: pa.RecordBatch | pa.Table, skipped: Sequence[int]) -> Any:
    seq_nums = records.column("seq_num").cast(pa.int64())
    return pc.is_in(seq_nums, value_set=pa.array(skipped, pa.int64()))


def _decoded(records: pa.RecordBatch, step: DecodeStep) -> Decoded:
    """Decode the records; those that are to be skipped become dead letters."""
    chosen = _chosen(records, step.skipped)
    if not (step.skipped and pc.any(chosen).as_py()):
        return step.decoder.decode(records, step.schema)
    decoded = step.decoder.decode(records.filter(pc.invert(chosen)), step.schema)
    gone = records.filter(chosen)
    columns = [gone["seq_num"], pa.array([_SKIPPED] * len(gone)), gone["body"]]
    letters = pa.table(columns, names=DEAD_LETTERS.names).cast(DEAD_LETTERS)
    positions = decoded.positions
    if positions is not None:
        positions = positions.at(np.flatnonzero(~chosen.to_numpy(zero_copy_only=False)))
    merged = pa.concat_tables([decoded.dead_letters, letters]).sort_by("seq_num")
    return replace(decoded, dead_letters=merged, positions=positions)


def _decode(records: pa.RecordBatch, step: DecodeStep) -> Iterator[TaskResult]:
    decoded = _decoded(records, step)
    letters = decoded.dead_letters.filter(
        pc.greater(decoded.dead_letters["seq_num"], step.lettered)
    )
    if len(letters):
        step.dead_letters.write(letters)
    start = 0
    for run, found in _runs(records, decoded):
        changes, truncated_at = _after_truncate(found.changes)
        report = _report(run, found, changes, truncated_at)
        if decoded.positions is not None:
            span = decoded.positions.span(start, start + len(run), report.timestamp)
            report = msgspec.structs.replace(report, source=span)
        if decoded.declares:
            report = msgspec.structs.replace(report, declares=True)
        start += len(run)
        yield TaskResult(REPORT, report.first, msgspec.json.encode(report))
        if found.schema is not None:
            for bucket, part in _by_bucket(changes, found.schema, step.buckets):
                yield TaskResult(bucket, report.first, pack(part))


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
    telling = len(pc.unique(changes["seq_num"].slice(0, at)))
    ignored = edge - telling - dead
    before = SILENT if tail.joins else CLOSED
    yield (
        records.slice(0, edge),
        Decoded(changes.slice(0, at), letters.slice(0, dead), decoded.schema, ignored, before),
    )
    yield (
        records.slice(edge),
        replace(
            decoded,
            changes=changes.slice(at),
            dead_letters=letters.slice(dead),
            ignored=decoded.ignored - ignored,
        ),
    )


def _report(
    records: pa.RecordBatch, decoded: Decoded, changes: pa.Table, truncated_at: int
) -> DecodeReport:
    seq_nums = records.column("seq_num")
    times = records.column("timestamp")
    moment = times[len(times) - 1].cast(pa.int64()).as_py()
    return DecodeReport(
        first=seq_nums[0].as_py(),
        last=seq_nums[len(seq_nums) - 1].as_py(),
        records=len(records),
        changes=len(decoded.changes),
        ignored=decoded.ignored,
        dead=len(decoded.dead_letters),
        size_bytes=changes.nbytes,
        truncated_at=truncated_at,
        timestamp=(moment or 0) // 1000,
        schema=decoded.schema.canonical_json if decoded.schema else None,
        tail=decoded.tail,
        letter=_first_letter(decoded.dead_letters),
    )


def _first_letter(letters: pa.Table) -> tuple[int, str] | None:
    if not len(letters):
        return None
    return letters["seq_num"][0].as_py(), letters["reason"][0].as_py()


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
