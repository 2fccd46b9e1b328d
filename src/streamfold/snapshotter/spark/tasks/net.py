"""Second step of a batch, in tasks: writes the net changes of a bucket as one part.

Results of a bucket arrive in the order of the stream, so the last change of a key wins. Columns
that a source left out because they did not change are filled from the archive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.buckets import TRUNCATES
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.read.folding import KeyIndex, columns_of, fitted
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenPart, write_part
from streamfold.blob.local_files import finish
from streamfold.snapshotter.decoding.decoder import decoded_schema
from streamfold.snapshotter.net_changes import net_changes
from streamfold.snapshotter.spark.destinations import DestinationSpec, open_mirrors
from streamfold.snapshotter.spark.tasks.bucket_rows import BucketRows
from streamfold.snapshotter.spark.tasks.fold import own_attempt, part_result
from streamfold.snapshotter.spark.tasks.layers import OpenFiles, Stack
from streamfold.snapshotter.spark.tasks.results import (
    Batches,
    TaskResult,
    task,
    task_results,
    unpack,
)

Numbers = npt.NDArray[np.int64]
#: The bucket that holds a TRUNCATE: readers read the first part first.
TRUNCATE_BUCKET = 0


def has_unsent(net: pa.Table) -> bool:
    """Return whether any change leaves a column unchanged."""
    return bool(pc.any(pc.greater(pc.list_value_length(net["unchanged"]), 0)).as_py())


def fill_unsent(net: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the net changes with every column of `after` filled; null if the table has no such row."""
    net = net.combine_chunks()
    lists, after = (net[name].chunk(0) for name in ("unchanged", "after"))
    lacking = np.flatnonzero(pc.greater(pc.list_value_length(lists), 0).to_numpy(False))
    keys = pa.Table.from_struct_array(net["key"].chunk(0).take(pa.array(lacking)))
    known = _known_rows(keys, state, schema)
    indices = np.full(len(net), -1, np.int64)
    indices[lacking] = _row_indices(keys, known, schema.key_fields)
    columns = [
        _filled(child, field.name, lists, indices, known)
        for field, child in zip(after.type, after.flatten(), strict=True)
    ]
    rows = pa.StructArray.from_arrays(columns, fields=list(after.type), mask=after.is_null())
    return net.set_column(net.schema.get_field_index("after"), net.schema.field("after"), rows)


def _known_rows(keys: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the rows of the table that the changes touch."""
    index = KeyIndex(keys.columns)
    found = [schema.arrow.empty_table()]
    for batch in state:
        rows = pa.Table.from_batches([batch])
        held = index.holds([rows[name] for name in schema.key_fields])
        found.append(rows.filter(pa.array(held)))
    return pa.concat_tables(found).combine_chunks()


def _row_indices(keys: pa.Table, known: pa.Table, key_fields: Sequence[str]) -> Numbers:
    """Return the index of each key's row in `known`; -1 without one."""
    both = [
        pa.chunked_array([*known[name].chunks, *keys[name].chunks], keys[name].type)
        for name in key_fields
    ]
    numbers = KeyIndex(both).numbers
    indices = np.full(int(numbers.max()) + 1, -1, np.int64)
    indices[numbers[: len(known)]] = np.arange(len(known))
    found: Numbers = indices[numbers[len(known) :]]
    return found


def _filled(
    column: pa.Array, name: str, lists: pa.ListArray, indices: Numbers, known: pa.Table
) -> pa.Array:
    marked = np.zeros(len(column), np.bool_)
    chosen = pc.equal(lists.flatten(), name)
    marked[pc.list_parent_indices(lists).filter(chosen).to_numpy()] = True
    if not marked.any():
        return column
    # One array of both, since no Arrow function replaces values of nested types.
    both = pa.concat_arrays([column, *(chunk.cast(column.type) for chunk in known[name].chunks)])
    takes = np.where(marked, len(column) + indices, np.arange(len(column)))
    return both.take(pa.array(takes, mask=marked & (indices < 0)))


@dataclass(frozen=True, slots=True)
class NetStep:
    """What every task of the step needs; pickled with it."""

    #: Of a diff, or of a first base, which holds the rows that the changes leave.
    plan: PartPlan
    destination_specs: tuple[DestinationSpec, ...]
    #: The last record that empties the table, -1 without one: nothing before it matters.
    truncated_at: int
    #: The table before these changes, None if it has no base yet.
    stack: Stack | None

    @property
    def schema(self) -> TableSchema:
        return self.plan.schema


def empty_result(bucket: int) -> TaskResult:
    """Make a result without changes, so that its bucket gets a part."""
    return TaskResult(bucket, -1, b"")


@task
def write_net_changes(batches: Batches, step: NetStep) -> Iterator[TaskResult]:
    """Yield a report for the part of each bucket; results arrive sorted by bucket and seq_num."""
    for bucket, results in groupby(
        task_results(batches), key=lambda task_result: task_result.bucket
    ):
        changes = [
            unpack(task_result.payload) for task_result in results if len(task_result.payload)
        ]
        yield part_result(bucket, asyncio.run(_write_bucket(step, bucket, changes)))


async def _write_bucket(step: NetStep, bucket: int, runs: list[pa.Table]) -> WrittenPart:
    mirrors = open_mirrors(step.destination_specs)
    net = _net(step, bucket, runs)
    if step.stack is not None and has_unsent(net):
        net = await _fill(step, bucket, net, mirrors)
    plan = own_attempt(step.plan)
    batches = _rows(net, step.schema) if plan.is_base else _changes(net, step.schema)
    written = await write_part(plan, list(batches), mirrors, bucket=bucket)
    return written if plan.is_base or step.truncated_at < 0 else _marked(written)


def _net(step: NetStep, bucket: int, runs: list[pa.Table]) -> pa.Table:
    if step.truncated_at < 0:
        return net_changes(runs, step.schema)
    kept = [run.filter(pc.greater(run["seq_num"], step.truncated_at)) for run in runs]
    net = net_changes([_truncate(step), *kept], step.schema)
    return net if bucket == TRUNCATE_BUCKET else net.slice(1)


def _truncate(step: NetStep) -> pa.Table:
    row = {"seq_num": step.truncated_at, "op": "truncate", "unchanged": []}
    return pa.Table.from_pylist([row], schema=decoded_schema(step.schema))


async def _fill(step: NetStep, bucket: int, net: pa.Table, mirrors: Mirrors) -> pa.Table:
    stack = step.stack
    if stack is None or step.truncated_at >= 0:
        return net
    async with OpenFiles(PartFiles(mirrors.primary)) as files:
        rows = BucketRows(stack, bucket, step.schema, files)
        return await finish(asyncio.to_thread(fill_unsent, net, rows, step.schema))


def _changes(net: pa.Table, schema: TableSchema) -> Iterable[pa.RecordBatch]:
    for batch in net.drop_columns("unchanged").to_batches():
        yield fitted(batch, schema.changes)


def _rows(net: pa.Table, schema: TableSchema) -> Iterable[pa.RecordBatch]:
    """Yield the rows after the changes, of a table that was empty before them."""
    alive = net.filter(pc.is_in(net["action"], value_set=pa.array(["INSERT", "UPDATE"])))
    for batch in alive.to_batches():
        yield columns_of(batch["after"], schema.arrow)


def _marked(written: WrittenPart) -> WrittenPart:
    extra = {TRUNCATES: True}
    files = {n: msgspec.structs.replace(part, extra=extra) for n, part in written.files.items()}
    return replace(written, files=files)
