"""Writes a new base in tasks, each of which folds the files of its buckets; no shuffle.

A task holds the keys of one bucket that changed since the last base; rows are streamed. If the number
of buckets grows, a task splits its bucket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from streamfold.archive.buckets import BUCKETING, SPLITMIX64, bucket_numbers
from streamfold.archive.read.bucket_rows import BucketRows
from streamfold.archive.read.layers import OpenFiles, Stack
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.write.artifacts import PartPlan, write_part
from streamfold.snapshotter.spark.destinations import DestinationSpec, open_mirrors
from streamfold.snapshotter.spark.tasks.results import Batches, TaskResult, return_memory, task

#: Marks parts as bucketed by our hash; a fold reads others whole.
MARKS = {BUCKETING: SPLITMIX64}


@dataclass(frozen=True, slots=True)
class FoldStep:
    """What all tasks of a fold need; pickled."""

    stack: Stack
    plan: PartPlan
    destination_specs: tuple[DestinationSpec, ...]
    #: The buckets to fold, of the stack's; each task gets indices of this list.
    buckets: tuple[int, ...]
    #: Buckets of the new base: as many as the stack has, or a multiple.
    new_count: int


@task
def fold(batches: Batches, step: FoldStep) -> Iterator[TaskResult]:
    """Write and yield the parts of buckets; `id` of a row is an index of `step.buckets`."""
    for batch in batches:
        for index in batch.column("id").to_pylist():
            yield from asyncio.run(_fold_bucket(step, step.buckets[index]))


async def _fold_bucket(step: FoldStep, bucket: int) -> list[TaskResult]:
    mirrors, plan = open_mirrors(step.destination_specs), own_attempt(step.plan)
    results = []
    for target in range(bucket, step.new_count, step.stack.buckets):
        async with OpenFiles(PartFiles(mirrors.primary)) as files:
            rows: Iterable[pa.RecordBatch] = BucketRows(step.stack, bucket, plan.schema, files)
            if step.new_count > step.stack.buckets:
                rows = _of_bucket(rows, target, step)
            written = await write_part(plan, rows, mirrors, bucket=target, marks=MARKS)
        results.append(TaskResult.of_part(target, written))
    return_memory()
    return results


def _of_bucket(
    rows: Iterable[pa.RecordBatch], bucket: int, step: FoldStep
) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        keys = [batch.column(name) for name in step.plan.schema.key_fields]
        own = batch.filter(pa.array(bucket_numbers(keys, step.new_count) == bucket))
        if len(own):
            yield own


def own_attempt(plan: PartPlan) -> PartPlan:
    """Return the plan with file names of this attempt alone: another one may still be running."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return replace(plan, attempt=f"{plan.attempt}t{context.taskAttemptId() if context else 0}")
