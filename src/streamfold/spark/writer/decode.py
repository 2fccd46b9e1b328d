"""First step of a batch, in tasks: records become changes, sorted into the buckets of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.base import ChangeDecoder, Decoded
from streamfold.spark.writer.buckets import bucket_numbers
from streamfold.spark.writer.dead_letters import DeadLetters
from streamfold.spark.writer.parcels import REPORT, Batches, Parcel, pack, task


class DecodeReport(msgspec.Struct, frozen=True):
    """What one task found in one batch of records; small, whatever the batch."""

    first: int
    last: int
    records: int
    changes: int
    ignored: int
    dead: int
    #: Bytes of the changes in memory.
    size_bytes: int
    #: The last record that empties the table, -1 for none.
    truncated_at: int
    #: Milliseconds of the last record, by its stream.
    timestamp: int
    #: The columns as far as these records show them.
    schema: bytes | None = None

    def table_schema(self) -> TableSchema | None:
        return TableSchema.from_json(msgspec.json.decode(self.schema)) if self.schema else None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What every task of the step needs; pickled with it."""

    decoder: ChangeDecoder
    #: None while no record has shown a column.
    schema: TableSchema | None
    buckets: int
    #: Records up to here are in the archive already.
    head: int
    dead_letters: DeadLetters


@task
def decode(batches: Batches, step: DecodeStep) -> Iterator[Parcel]:
    """Yield a report for each batch, and its changes by bucket."""
    for batch in batches:
        fresh = batch.filter(pc.greater(batch.column("seq_num"), step.head))
        if len(fresh):
            yield from _decode(fresh, step)


def _decode(records: pa.RecordBatch, step: DecodeStep) -> Iterator[Parcel]:
    decoded = step.decoder.decode(records, step.schema)
    if len(decoded.dead_letters):
        step.dead_letters.write(decoded.dead_letters)
    changes, truncated_at = _after_truncate(decoded.changes)
    report = _report(records, decoded, changes, truncated_at)
    yield Parcel(REPORT, report.first, msgspec.json.encode(report))
    if decoded.schema is not None:
        for bucket, part in _by_bucket(changes, decoded.schema, step.buckets):
            yield Parcel(bucket, report.first, pack(part))


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
    )


def _after_truncate(changes: pa.Table) -> tuple[pa.Table, int]:
    """The changes after the last one that empties the table, and where that one is."""
    places = np.flatnonzero(pc.equal(changes["op"], "truncate").to_numpy())
    if not len(places):
        return changes, -1
    last = int(places[-1])
    return changes.slice(last + 1), changes["seq_num"][last].as_py()


def _by_bucket(
    changes: pa.Table, schema: TableSchema, buckets: int
) -> Iterator[tuple[int, pa.Table]]:
    """The changes of each bucket that has any, in their order."""
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
