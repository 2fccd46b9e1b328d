"""Writes a new base in tasks: each folds the files of one bucket and writes its parts; no shuffle.

A task holds in memory the keys of its bucket that changed since the last base; rows are streamed. If
the count of buckets grows, a task splits its bucket into several parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa

from streamfold.archive.buckets import BUCKETING, SPLITMIX64, bucket_numbers
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.artifacts import PartPlan, WrittenPart, write_part
from streamfold.snapshotter.spark.destinations import DestinationSpec, open_mirrors
from streamfold.snapshotter.spark.tasks.bucket_rows import BucketRows
from streamfold.snapshotter.spark.tasks.layers import OpenFiles, Stack
from streamfold.snapshotter.spark.tasks.results import Batches, TaskResult, task


@dataclass(frozen=True, slots=True)
class FoldStep:
    """What every task of the step needs; pickled with it."""

    stack: Stack
    plan: PartPlan
    destination_specs: tuple[DestinationSpec, ...]
    #: The buckets to fold, of the stack's count; each task gets indices of this list.
    buckets: tuple[int, ...]
    #: Buckets of the new base: the stack's count or a multiple of it.
    new_count: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the files to fold."""
        layers = [*([self.stack.base] if self.stack.base else []), *self.stack.diffs]
        return sum(
            part.size_bytes
            for layer in layers
            for bucket in self.buckets
            for part in layer.of_bucket(bucket)
        )

    def targets(self, bucket: int) -> range:
        """Return the new buckets that hold the keys of an old one."""
        return range(bucket, self.new_count, self.stack.buckets)


@task
def fold(batches: Batches, step: FoldStep) -> Iterator[TaskResult]:
    """Yield a report for every part that was written; `id` of a row is an index of `step.buckets`."""
    for batch in batches:
        for index in batch.column("id").to_pylist():
            yield from asyncio.run(_fold_bucket(step, step.buckets[index]))


async def _fold_bucket(step: FoldStep, bucket: int) -> list[TaskResult]:
    mirrors = open_mirrors(step.destination_specs)
    schema, plan = step.plan.schema, own_attempt(step.plan)
    found = []
    for target in step.targets(bucket):
        async with OpenFiles(PartFiles(mirrors.primary)) as files:
            rows = BucketRows(step.stack, bucket, schema, files)
            own = _of_bucket(rows, schema, target, step)
            written = await write_part(plan, own, mirrors, bucket=target)
        found.append(part_result(target, written))
    # Tasks of several tables share a worker, so memory goes back after each one.
    pa.default_memory_pool().release_unused()
    return found


def _of_bucket(
    rows: Iterable[pa.RecordBatch], schema: TableSchema, target: int, step: FoldStep
) -> Iterable[pa.RecordBatch]:
    if step.new_count == step.stack.buckets:
        return rows
    return (row for batch in rows if len(row := _matching(batch, schema, target, step.new_count)))


def _matching(
    batch: pa.RecordBatch, schema: TableSchema, target: int, count: int
) -> pa.RecordBatch:
    numbers = bucket_numbers([batch.column(name) for name in schema.key_fields], count)
    return batch.filter(pa.array(numbers == target))


def own_attempt(plan: PartPlan) -> PartPlan:
    """Return the plan with names unique to this attempt: another one may still be running."""
    from pyspark import TaskContext

    context = TaskContext.get()
    number = context.taskAttemptId() if context else 0
    return replace(plan, attempt=f"{plan.attempt}t{number}")


def part_result(bucket: int, written: WrittenPart) -> TaskResult:
    """Make the report of a part."""
    rows = next(iter(written.files.values())).rows or 0
    return TaskResult(bucket, rows, msgspec.json.encode(mark_bucketing(written)))


def mark_bucketing(written: WrittenPart) -> WrittenPart:
    """Return the part marked as bucketed by our hash; without the mark, a fold reads it whole."""
    return replace(written, files={name: _marked(part) for name, part in written.files.items()})


def _marked(part: Part) -> Part:
    return msgspec.structs.replace(part, extra={**part.extra, BUCKETING: SPLITMIX64})


def written_parts(rows: Sequence[TaskResult]) -> list[WrittenPart]:
    """Return the parts that tasks reported, in the order of their buckets."""
    ordered = sorted(rows, key=lambda row: row.bucket)
    return [msgspec.json.decode(row.payload, type=WrittenPart) for row in ordered]
