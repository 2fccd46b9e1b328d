"""Spark jobs of tables beside the query: backlogs, folds, and ranges of tables that are slow.

| work | at once |
|---|---|
| a backlog, a fold, a search | `HEAVY` jobs, each with at most as many tasks as there are cores |
| a range of a slow table | `APART` jobs of one task |

The tables of one server and destination never have all places of a lane, if there are others.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from pyspark.sql import SparkSession

from streamfold.archive.write.artifacts import WrittenPart
from streamfold.errors import StreamfoldError
from streamfold.snapshotter.spark.backlog import SparkRecords, fold_buckets
from streamfold.snapshotter.spark.plans import TASK_RESULTS
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.batch import TableWork, intakes, take_in_alone
from streamfold.snapshotter.spark.tasks.fold import FoldStep
from streamfold.snapshotter.spark.tasks.intake import Intake, take_in
from streamfold.snapshotter.status.table_status import SparkCounts
from streamfold.spark.session import is_local

T = TypeVar("T")

#: Jobs of each kind at once.
HEAVY, APART = 2, 3
#: Maximum characters of a job's description.
_DESCRIPTION = 200


class Lane:
    """Places for jobs of one kind, each in a thread; used on the loop of the tables."""

    def __init__(self, places: int, name: str) -> None:
        self._places = places
        self._pool = ThreadPoolExecutor(places, name)
        self._users: Counter[str] = Counter()
        self._all_users: set[str] = set()
        self._free = asyncio.Condition()

    async def run(self, user: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread as soon as there is a place for this user."""
        self._all_users.add(user)
        async with self._free:
            await self._free.wait_for(lambda: self._has_place(user))
            self._users[user] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._users[user] -= 1
            async with self._free:
                self._free.notify_all()

    def _has_place(self, user: str) -> bool:
        # A user that hangs leaves a place to the others.
        most = self._places if len(self._all_users) < 2 else self._places - 1
        return self._users.total() < self._places and self._users[user] < most

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class JobLanes:
    """Runs Spark jobs of tables, and counts what Spark did; `close` it after the last one.

    Call coroutines on the loop of the tables, everything else in any thread.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._cores = _cores(spark)
        #: What Spark did in all, and by table.
        self._total = SparkCounts()
        self._counts: dict[str, SparkCounts] = {}
        self._counting = threading.Lock()
        #: By table: the tag of its job.
        self._tags: dict[str, str] = {}
        self._heavy = Lane(HEAVY, "snapshotter job")
        self._apart = Lane(APART, "snapshotter job apart")

    def close(self) -> None:
        """Start no more jobs, and lose the work of running ones."""
        self._heavy.close()
        self._apart.close()

    def cancel(self, table: str) -> None:
        """Cancel the job of a table, if it has one."""
        tag = self._tags.get(table)
        if tag is not None:
            self._spark.sparkContext.cancelJobsWithTag(tag)

    async def take_in_alone(self, work: TableWork) -> Intake:
        """Take in a range by one task."""

        def run() -> Intake:
            task = partial(take_in_alone, packed=work.pack())
            rows = self._spark.range(0, 1, 1, 1).mapInArrow(task, TASK_RESULTS)
            result = intakes(rows.collect())[work.table]
            if isinstance(result, StreamfoldError):
                raise result
            return result

        text = f"take in {work.text}"
        return await self._run(self._apart, work.state.job, text, run, intake_counts)

    async def take_in_backlog(self, work: TableWork) -> Intake:
        """Take in many records, which tasks read, decode and write."""

        def run() -> Intake:
            work.check_stream()
            return take_in(self._records(work), work.state)

        text = f"take in {work.text}"
        return await self._run(self._heavy, work.state.job, text, run, intake_counts)

    async def first_truncate(self, work: TableWork) -> int | None:
        """Return the first of the records that empties the table; None if none does."""
        find, text = self._records(work).first_truncate, f"search {work.text}"
        return await self._run(self._heavy, work.state.job, text, find, lambda _: SparkCounts())

    async def fold(self, job: TableJob, step: FoldStep) -> list[WrittenPart]:
        """Fold buckets into parts of a new base."""
        text = f"fold {job.table} to {step.plan.to_position}, {len(step.buckets)} buckets"
        work = partial(fold_buckets, self._spark, step, self._cores)
        return await self._run(self._heavy, job, text, work, _part_counts)

    def counts(self, table: str) -> SparkCounts:
        """Return what Spark did for a table; a job of several tables counts for each."""
        with self._counting:
            return self._counts.get(table, SparkCounts())

    @property
    def total(self) -> SparkCounts:
        """What Spark did in all."""
        with self._counting:
            return self._total

    def _add(self, tables: dict[str, SparkCounts], jobs: CountedJobs) -> None:
        """Count the jobs of a block, and what they did for each table."""
        done = SparkCounts(jobs=jobs.jobs, tasks=jobs.tasks)
        with self._counting:
            for table, counts in tables.items():
                self._counts[table] = self._counts.get(table, SparkCounts()).plus(counts).plus(done)
                self._total = self._total.plus(counts)
            self._total = self._total.plus(done)

    async def _run(
        self,
        lane: Lane,
        job: TableJob,
        text: str,
        work: Callable[[], T],
        count: Callable[[T], SparkCounts],
    ) -> T:
        def counted() -> T:
            jobs, counts = CountedJobs(self._spark, text, job.table), SparkCounts()
            self._tags[job.table] = jobs.tag
            try:
                with jobs:
                    result = work()
                counts = count(result)
            finally:
                self._tags.pop(job.table, None)
                self._add({job.table: counts}, jobs)
            return result

        places = {f"{parts.scheme}://{parts.netloc}" for parts in map(urlsplit, job.destinations)}
        return await lane.run(" ".join((job.source["endpoint"], *sorted(places))), counted)

    def _records(self, work: TableWork) -> SparkRecords:
        return SparkRecords(self._spark, work.state.job, work.records, self._cores)


class CountedJobs:
    """Describes the jobs of a block in Spark's UI, and counts them with their tasks."""

    def __init__(self, spark: SparkSession, text: str, pool: str) -> None:
        """`pool` shares the cores fairly with other pools."""
        self._pool = pool
        self._context = spark.sparkContext
        self._text = text if len(text) <= _DESCRIPTION else f"{text[:_DESCRIPTION]}…"
        #: Marks the jobs; their group is Spark's, which cancels a batch by it.
        self.tag = f"streamfold-{uuid4().hex}"
        self.jobs = self.tasks = 0

    def __enter__(self) -> CountedJobs:
        self._context.addJobTag(self.tag)
        self._context.setLocalProperty("spark.scheduler.pool", self._pool)
        self._context.setJobDescription(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        self._context.removeJobTag(self.tag)
        tracker = self._context.statusTracker()
        for number in self._context._jsc.sc().statusTracker().getJobIdsForTag(self.tag):
            job = tracker.getJobInfo(number)
            self.jobs += 1
            for stage in map(tracker.getStageInfo, job.stageIds if job else ()):
                self.tasks += stage.numCompletedTasks if stage else 0


def intake_counts(result: Intake | StreamfoldError | None) -> SparkCounts:
    """Return what was taken in; nothing for an error."""
    if not isinstance(result, Intake) or result.batch is None:
        return SparkCounts()
    return SparkCounts(rows=result.batch.records, bytes=result.size_bytes)


def _part_counts(parts: Sequence[WrittenPart]) -> SparkCounts:
    files = [file for part in parts for file in part.files.values()]
    return SparkCounts(
        rows=sum(file.rows or 0 for file in files), bytes=sum(file.size_bytes for file in files)
    )


def _cores(spark: SparkSession) -> int:
    """Return how many tasks can compute at once."""
    if is_local(spark.sparkContext.master):
        return os.cpu_count() or 1
    return int(spark.sparkContext.defaultParallelism)
