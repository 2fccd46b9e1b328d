"""Second step of a batch, in tasks: writes the net changes of a bucket as one part.

Results of a bucket arrive in the order of the stream, so the last change of a key wins. Columns that a
source did not send because they did not change are filled from the archive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.buckets import TRUNCATES
from streamfold.archive.destinations.destination import Destination
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.read.bucket_rows import BucketRows
from streamfold.archive.read.folding import columns_of, fitted
from streamfold.archive.read.layers import OpenFiles, Stack
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenPart, write_part
from streamfold.blob.local_files import finish
from streamfold.errors import ConflictError
from streamfold.snapshotter.decoding.decoder import decoded_schema
from streamfold.snapshotter.net_changes import fill_unsent, has_unsent, net_changes
from streamfold.snapshotter.spark.destinations import DestinationSpec, open_mirrors
from streamfold.snapshotter.spark.tasks.fold import MARKS, own_attempt
from streamfold.snapshotter.spark.tasks.results import (
    Batches,
    TaskResult,
    task,
    task_results,
    unpack,
)

#: The bucket that holds a TRUNCATE: readers read the first part first.
TRUNCATE_BUCKET = 0


@dataclass(frozen=True, slots=True)
class NetStep:
    """What all tasks of the step need; pickled."""

    #: Of a diff, or of a first base, which holds the rows that the changes leave.
    plan: PartPlan
    destination_specs: tuple[DestinationSpec, ...]
    #: The last record that empties the table, -1 without one: nothing before it matters.
    truncated_at: int
    #: The table before these changes, without its chain; None if it has no base yet.
    manifest: Manifest | None

    @property
    def schema(self) -> TableSchema:
        return self.plan.schema


@task
def write_net_changes(batches: Batches, step: NetStep) -> Iterator[TaskResult]:
    """Write and yield the part of each bucket; results arrive sorted by bucket and seq_num."""
    results = (
        result._replace(payload=unpack(result.payload) if len(result.payload) else None)
        for result in task_results(batches)
    )
    yield from write_buckets(results, step)


def write_buckets(results: Iterable[TaskResult], step: NetStep) -> Iterator[TaskResult]:
    """Write and yield the part of each bucket; payloads are changes, or None."""
    with asyncio.Runner() as runner:
        for bucket, own in groupby(results, key=lambda result: result.bucket):
            changes = [result.payload for result in own if result.payload is not None]
            written = runner.run(_write_bucket(step, bucket, changes))
            yield TaskResult.of_part(bucket, written)


async def _write_bucket(step: NetStep, bucket: int, runs: list[pa.Table]) -> WrittenPart:
    mirrors, plan, empties = open_mirrors(step.destination_specs), step.plan, step.truncated_at >= 0
    net = _net(step, bucket, runs)
    if step.manifest is not None and not empties and has_unsent(net):
        stack = await _stored_table(step.manifest, mirrors.primary)
        net = await _fill(step, stack, bucket, net, mirrors)
    batches = _rows(net, step.schema) if plan.is_base else _changes(net, step.schema)
    marks = MARKS | ({TRUNCATES: True} if empties and not plan.is_base else {})
    return await write_part(own_attempt(plan), list(batches), mirrors, bucket=bucket, marks=marks)


def _net(step: NetStep, bucket: int, runs: list[pa.Table]) -> pa.Table:
    if step.truncated_at < 0:
        return net_changes(runs, step.schema)
    row = {"seq_num": step.truncated_at, "op": "truncate", "unchanged": []}
    truncate = pa.Table.from_pylist([row], schema=decoded_schema(step.schema))
    later = [run.filter(pc.greater(run["seq_num"], step.truncated_at)) for run in runs]
    net = net_changes([truncate, *later], step.schema)
    return net if bucket == TRUNCATE_BUCKET else net.slice(1)


async def _stored_table(manifest: Manifest, destination: Destination) -> Stack:
    """Return the table with its whole chain, which few batches need."""
    stored, position = await destination.read(), (manifest.epoch, manifest.head_position)
    if stored is None or (stored.manifest.epoch, stored.manifest.head_position) != position:
        raise ConflictError(
            f"the archive of table {manifest.table!r} no longer ends at {manifest.head_position} of "
            f"epoch {manifest.epoch}: another writer may have taken the table"
        )
    return Stack.of(stored.manifest)


async def _fill(
    step: NetStep, stack: Stack, bucket: int, net: pa.Table, mirrors: Mirrors
) -> pa.Table:
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
