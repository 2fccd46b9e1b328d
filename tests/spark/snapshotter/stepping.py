"""Advances a table step by step, in this process or in Spark tasks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from datetime import datetime

import pyarrow as pa

from streamfold.archive.write.artifacts import WrittenPart
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.query import ChangeQuery
from streamfold.snapshotter.spark.table.archive import utc_now
from streamfold.snapshotter.spark.table.edges import StreamTails
from streamfold.snapshotter.spark.table.writer import TableJobs, TableWriter
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.batch import TableWork
from streamfold.snapshotter.spark.tasks.decode import find_truncate
from streamfold.snapshotter.spark.tasks.fold import FoldStep, fold
from streamfold.snapshotter.spark.tasks.intake import Intake
from streamfold.snapshotter.spark.tasks.results import task_results, written_parts
from streamfold.snapshotter.status.table_status import SparkCounts, TableStatus


class TasksInThisProcess:
    """Does what one task of Spark does, without Spark."""

    async def take_in(self, work: TableWork, tail: int) -> Intake:
        return await asyncio.to_thread(lambda: work.run())

    async def fold(self, job: TableJob, step: FoldStep) -> list[WrittenPart]:
        ids = pa.RecordBatch.from_pydict({"id": list(range(len(step.buckets)))})
        return await asyncio.to_thread(
            lambda: written_parts(list(task_results(fold([ids], step=step))))
        )

    async def first_truncate(self, work: TableWork) -> int | None:
        found = task_results(find_truncate(work.read(), decoder=work.state.job.decoder))
        return next((result.seq_num for result in found), None)

    def cancel(self, table: str) -> None:
        """There are no jobs."""

    @property
    def has_served(self) -> bool:
        return True

    def counts(self, table: str) -> SparkCounts:
        return SparkCounts()


class BacklogsOnSpark(ChangeQuery):
    """Spreads every range over tasks, however small it is."""

    async def take_in(self, work: TableWork, tail: int) -> Intake:
        return await self.take_in_backlog(work)


class Table:
    """A writer without its own coroutine: each step is a call."""

    def __init__(
        self,
        job: TableJob,
        loop: DriverLoop,
        jobs: TableJobs | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._loop = loop
        self._jobs = jobs or TasksInThisProcess()
        tails = StreamTails()
        weakref.finalize(self, tails.close)
        self.writer = TableWriter(job, tails, now=now)

    def open(self) -> TableStatus:
        self._loop.call(self.writer.open(self._jobs))
        return self.status()

    def advance(self) -> TableStatus:
        """Take in what the stream holds."""
        self._loop.call(self.writer.advance(self._jobs))
        return self.status()

    def take_in(self) -> TableStatus:
        """Open the archive, and take in what the stream holds."""
        self.open()
        return self.advance()

    def work(self, start: int, end: int) -> TableWork:
        """Records to take in, as the table is now."""
        return TableWork(self.writer._state(), start, end)

    def take(self, work: TableWork) -> Intake:
        """Take in records without a commit."""
        return self._loop.call(self._jobs.take_in(work, work.end))

    def release(self) -> TableStatus:
        self._loop.call(self.writer.release(self._jobs))
        return self.status()

    def rebase(self, reason: str) -> TableStatus:
        self._loop.call(self.writer.rebase(self._jobs, reason))
        return self.status()

    def flush(self) -> None:
        self._loop.call(self.writer.flush(self._jobs))

    def status(self) -> TableStatus:
        return self.writer.status()
