"""Publishes one table: a coroutine that takes in new records every interval, and does what is due.

Spark does the work, see `query`; the coroutine decides what comes next and commits the result, so
nothing else changes the table's archive. Every step starts at the manifest's head: a repeated batch
changes nothing. After a transient failure the table retries from what is committed; any other failure
stops this table only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Protocol

import msgspec

from streamfold._native import trim_memory
from streamfold.archive.write.artifacts import WrittenPart
from streamfold.backoff import UNATTENDED, Backoff
from streamfold.errors import ConflictError, StreamfoldError
from streamfold.snapshotter.errors import ValuesIncompatibleError
from streamfold.snapshotter.spark.errors_from_spark import (
    ChangesLostError,
    ServerUnreachableError,
    StreamMissingError,
)
from streamfold.snapshotter.spark.table.archive import TableArchive, utc_now, without_chain
from streamfold.snapshotter.spark.table.edges import StreamEdges, StreamTails
from streamfold.snapshotter.spark.table.events import TableEvents
from streamfold.snapshotter.spark.table.failures import TableFailures
from streamfold.snapshotter.spark.table.progress import CommitLog, TableProgress
from streamfold.snapshotter.spark.table.requests import Request, SnapshotRequests
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.spark.tasks.arrivals import LastRecord
from streamfold.snapshotter.spark.tasks.batch import TableWork
from streamfold.snapshotter.spark.tasks.fold import FoldStep
from streamfold.snapshotter.spark.tasks.intake import (
    FIRST,
    Batch,
    Intake,
    ReadPosition,
    StreamStart,
    TableState,
)
from streamfold.snapshotter.status.table_status import SparkCounts, State, TableStatus
from streamfold.snapshotter.transactions import TransactionWait

logger = logging.getLogger(__name__)

#: Reason of a requested base.
REQUESTED = "requested"
#: Seconds between two checks for other work than new records.
_LOOK = 0.25
#: Seconds between two checks of the table's owner, each a small request to the first destination.
OWNER_CHECK_SECONDS = 10.0
#: Seconds that a search for a record may take once a stop waits for it: an orchestrator often grants
#: 30 s.
STOP_SEARCH_SECONDS = 10.0
#: Records of one step of that search: seconds of work.
_SEARCH_RECORDS = 200_000


class TableJobs(Protocol):
    """Does the work of tables, see `query.ChangeQuery`."""

    async def take_in(self, work: TableWork, tail: int) -> Intake: ...

    async def fold(self, job: TableJob, step: FoldStep) -> list[WrittenPart]: ...

    async def first_truncate(self, work: TableWork) -> int | None: ...

    def cancel(self, table: str) -> None: ...

    @property
    def has_served(self) -> bool: ...

    def counts(self, table: str) -> SparkCounts: ...


class TableWriter:
    """The writer of one table, which runs on a loop and shows its status in any thread."""

    def __init__(
        self,
        job: TableJob,
        tails: StreamTails,
        *,
        backoff: Backoff = UNATTENDED,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.job = job
        self._task_job = job.for_tasks()
        self._edges = StreamEdges(job, tails)
        self._archive = TableArchive(job, now)
        self._events = TableEvents(job)
        self._progress = TableProgress(
            job.table, job.stream, job.destinations, now, job.dead_letters.location
        )
        self._log = CommitLog(job.table)
        self._failures = TableFailures(job, self._progress, backoff)
        self._requests = SnapshotRequests()
        self._jobs: TableJobs | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._read = ReadPosition(TransactionWait(job.transactions))
        #: Where the table starts; None with an archive.
        self._start: StreamStart | None = None
        #: Whether records were taken in since the archive was opened.
        self._progressed = False
        #: Whether the archive is open and ends where `_read` starts.
        self._is_open = False
        #: Whether the table follows its stream, so that `look` reports its server.
        self._is_following = False
        self._is_unreachable = False
        #: The unread records that the status describes: the first one, and the tail.
        self._noted: tuple[int, int] | None = None
        #: When the table was last known to be this writer's.
        self._owned_at = 0.0

    # For any thread

    def status(self) -> TableStatus:
        jobs = self._jobs
        spark = jobs.counts(self.job.table) if jobs else SparkCounts()
        status = self._progress.status(self._events.errors, spark)
        # An empty table is published without Spark, but not ready before Spark is.
        is_ready = status.ready and jobs is not None and jobs.has_served
        return msgspec.structs.replace(status, ready=is_ready)

    def request_snapshot(self) -> Request:
        """Request a base as soon as the table runs; ConflictError if it never will."""
        request = self._requests.add()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._woken.set)
        return request

    # For the loop

    async def check(self) -> None:
        """Check destinations and server before Spark starts; the status shows errors."""
        try:
            await self._archive.check()
            self._progress.tail = await self._edges.tail()
        except Exception as raised:
            if self._jobs is None:
                self._failures.note(self._failures.understood(raised))
            return
        if self._jobs is None:
            self._progress.recover()
            self._progress.enter(State.STARTING)

    def stop(self) -> None:
        """Have the table flush and end."""
        self._stopping.set()
        self._woken.set()

    async def run(self, jobs: TableJobs) -> None:
        """Publish until stopped, then flush; ends early only after a permanent failure."""
        self._jobs, self._loop = jobs, asyncio.get_running_loop()
        failures = 0
        while not self._stopping.is_set():
            try:
                await self.open(jobs)
                await self._follow(jobs)
            except Exception as raised:
                self._is_open = False
                failures = 1 if self._progressed else failures + 1
                if not self._failures.may_retry(error := self._failures.understood(raised)):
                    break
                await _wait(self._stopping, self._failures.pause(error, failures))
        if not self.status().state.is_final:
            await self._finish(jobs)
        self._requests.close(self._refusal())
        # The writer that has taken the table sends its events.
        await self._events.stop(deliver=self.status().state is not State.FENCED)

    async def look(self) -> None:
        """Report how far the table is behind, even if it is stuck or stopped while its stream grows."""
        try:
            tail: int | None = await self._edges.tail()
        except Exception as raised:
            tail, error = None, self._failures.understood(raised)
            if self._is_following and isinstance(error, ServerUnreachableError):
                self._is_unreachable = True
                self._failures.note(error)
            if self._stopping.is_set() and self._jobs is not None:
                # Spark would repeat a job that reads from a silent server.
                await asyncio.to_thread(self._jobs.cancel, self.job.table)
        else:
            if self._is_following and self._is_unreachable:
                self._is_unreachable = False
                self._progress.recover()
                self._progress.enter(State.RUNNING)
        await self._note_tail(tail)

    async def open(self, jobs: TableJobs) -> None:
        """Open the archive as stored, and commit what an earlier attempt has written."""
        await self._reopen(jobs)
        await self._begin_empty()
        self._adopt()
        await self._publish_delta()  # the process may have ended before it wrote the last version
        start, tail = self._next, await self._tail()
        await self._note_tail(tail)
        self._progress.caught_up = tail <= start
        if tail <= start:
            self._progress.recover()
        self._log.follows(self.job.stream, start, tail)

    async def advance(self, jobs: TableJobs, force: str | None = None) -> bool:
        """Take in what the stream holds now, up to the last complete transaction.

        Returns whether the last records became a base, whose reason is `force`.
        """
        tail, is_based = await self._tail(), False
        self._check_length(tail)
        while (start := self._next) < tail:
            end = min(tail, start + self.job.max_records)
            if end < tail:
                self._progress.caught_up = False
            epoch = self._archive.epoch
            await self._take(jobs, TableWork(self._state(), start, end), tail, force)
            is_based = self._next >= tail and self._archive.epoch > epoch
            if self._next <= start:
                break  # the rest belongs to an open transaction
        self._progress.caught_up = True
        return is_based

    async def release(self, jobs: TableJobs) -> None:
        """Take in an open transaction, although its end has not arrived."""
        read, now = self._read, time.monotonic()
        if read.held_from is None or read.seen is None:
            return
        before = replace(read, wait=TransactionWait(self.job.transactions), seen=read.held_from - 1)
        is_cut = not read.wait.is_complete(now)
        state = replace(self._state(), read=before, releases=True, cuts=is_cut)
        await self._take(jobs, TableWork(state, read.held_from, read.seen + 1), read.seen + 1, None)

    async def rebase(self, jobs: TableJobs, reason: str) -> None:
        """Fold the archive into a new base."""
        await self._count(lambda: self._archive.rebase(reason, self._folding(jobs)))

    async def flush(self, jobs: TableJobs) -> None:
        """Take in what the stream holds now, up to the last complete transaction."""
        if not self._is_open:
            await self._reopen(jobs)
        await self.advance(jobs)

    async def _reopen(self, jobs: TableJobs) -> None:
        """Open the archive, forget what was read after it, and check that its stream is the same."""
        self._is_open = self._progressed = False
        await self._archive.open()
        self._read = ReadPosition(TransactionWait(self.job.transactions))
        if self._archive.head is not None:
            # Before the status shows the head, up to which `publish` trims the stream.
            self._check_length(await self._tail())
            if last := LastRecord.of(self._archive.manifest, self.job.layout):
                await self._edges.check_last_record(last)
        else:
            self._start = await self._edges.start()
            self._progress.start = self._start.seq_num
        await self._count(lambda: self._archive.resume(self._folding(jobs)))
        self._owned_at = time.monotonic()
        self._is_open = True

    async def _follow(self, jobs: TableJobs) -> None:
        """Take in new records every interval, and do what else is due."""
        self._events.start(self._archive.primary)
        self._progress.enter(State.RUNNING)
        clock, interval = asyncio.get_running_loop().time, self.job.interval.total_seconds()
        due, self._is_following = clock(), True
        try:
            while not self._stopping.is_set():
                if clock() >= due:
                    await self.advance(jobs)
                    # Tables of one interval are due together, and share a batch.
                    due = max((due // interval + 1) * interval, clock())
                await self._serve(jobs)
                await _wait(self._woken, min(_LOOK, due - clock()))
                self._woken.clear()
        finally:
            self._is_following = self._is_unreachable = False

    async def _serve(self, jobs: TableJobs) -> None:
        """Do what is due besides new records."""
        await self._serve_requests(jobs)
        now, last = time.monotonic(), -1 if self._read.seen is None else self._read.seen
        wait = self._read.wait
        is_over = wait.is_complete(now) or wait.is_cut(last, now)
        if is_over and await self._tail() <= self._next:
            await self.release(jobs)
        if reason := self._archive.due():
            await self.rebase(jobs, reason)
        if now - self._owned_at >= OWNER_CHECK_SECONDS:
            await self._archive.writer.check_owner()
            self._owned_at = now

    async def _serve_requests(self, jobs: TableJobs) -> None:
        """Write a base with everything that the stream holds now, if one is requested.

        Writes none while all records belong to an open transaction and no base exists.
        """
        if not self._requests.begin():
            return
        is_based = await self.advance(jobs, REQUESTED)
        if not is_based and self._archive.manifest is not None:
            await self.rebase(jobs, REQUESTED)
        if (base := self.status().last_base) is not None:
            self._requests.answer(base)

    async def _take(self, jobs: TableJobs, work: TableWork, tail: int, force: str | None) -> None:
        """Take in and commit records; skips unfit ones if a later record empties the table."""

        async def take() -> Batch | None:
            intake = await jobs.take_in(work, tail)
            self._read = intake.read
            is_last = intake.read.seen is not None and intake.read.seen + 1 >= tail
            await self._archive.commit(intake, self._folding(jobs), force if is_last else None)
            return intake.batch

        try:
            await self._count(take)
        except ValuesIncompatibleError as error:
            await self._skip_to_truncate(jobs, error)

    async def _skip_to_truncate(self, jobs: TableJobs, error: ValuesIncompatibleError) -> None:
        """Continue at the next record that empties the table, such as the start of a repeated copy.

        Raises the error if there is none, or if the search holds up a stop; the next run searches
        again.
        """
        began, start, tail = time.monotonic(), error.seq_num + 1, await self._edges.tail()
        truncate: int | None = None
        while truncate is None and start < tail:
            if self._stopping.is_set() and time.monotonic() - began >= STOP_SEARCH_SECONDS:
                break
            end = min(tail, start + min(self.job.max_records, _SEARCH_RECORDS))
            truncate = await jobs.first_truncate(TableWork(self._state(), start, end))
            start = end
        if truncate is None:
            raise error
        logger.warning(
            "table %s: record %d does not fit the table, and record %d empties it: those before it "
            "are skipped (%s)",
            self.job.table, error.seq_num, truncate, "; ".join(error.problems),
        )  # fmt: skip
        self._read = replace(
            self._read,
            wait=TransactionWait(self.job.transactions),
            seen=truncate - 1,
            skipped=truncate - 1,
        )

    async def _count(self, work: Callable[[], Awaitable[Batch | None]]) -> None:
        """Do `work`, and count and log what it took in and committed."""
        began, before, epoch = time.monotonic(), self._archive.manifest, self._archive.epoch
        batch = await work()
        seconds = time.monotonic() - began
        after = self._archive.manifest
        self._log.committed(before, after, seconds)
        if batch is not None:
            self._progressed = True
            self._progress.take(batch, seconds, self._read.held_from)
            self._log.warn(batch, self.job.dead_letters.location)
            self._log.took(batch.seen, batch.records / seconds if seconds > 0 else 0.0)
        if batch is not None or after is not before:
            self._progress.recover()
        if after is not before:
            self._owned_at = time.monotonic()
        self._adopt()
        self._events.wake()
        if self._archive.epoch > epoch:
            await self._publish_delta()
            await self._collect()
            await asyncio.to_thread(trim_memory)  # of request threads

    async def _publish_delta(self) -> None:
        """Write versions for committed bases; a failure does not affect the archive."""
        for uri, error in (await self._archive.publish_delta()).items():
            self._progress.count(delta_errors=1)
            logger.warning(
                "table %s: the Delta log in %s was not written, the next base tries again: %s",
                self.job.table, uri, error.message,
            )  # fmt: skip

    async def _collect(self) -> None:
        try:
            await self._archive.collect()
        except StreamfoldError as error:
            # The commit succeeded, and the next base collects again.
            if error.destination is not None:
                self._progress.count_destination_error(error.destination)
            logger.warning(
                "table %s: old files were not deleted: %s", self.job.table, error.message
            )

    async def _begin_empty(self) -> None:
        """Publish a table whose stream is still empty; undeclared columns are learned later."""
        if self._archive.manifest is not None or self._start is None:
            return
        start = self._start.seq_num
        if await self._tail() > start:
            return
        began = time.monotonic()
        timestamp = await self._edges.timestamp(start - 1) if start else None
        incomplete = self._state().incomplete_before()
        await self._archive.begin_empty(start - 1, FIRST, incomplete, timestamp)
        self._log.committed(None, self._archive.manifest, time.monotonic() - began)

    async def _finish(self, jobs: TableJobs) -> None:
        """Write the last diff, or leave it to the next run."""
        try:
            await self.flush(jobs)
            self._events.start(self._archive.primary)
        except Exception as raised:
            error = self._failures.understood(raised)
            self._progress.fail(error, State.STOPPED)
            logger.error("table %s: the last flush failed: %s", self.job.table, error.message)
        else:
            self._progress.enter(State.CLOSED)

    async def _tail(self) -> int:
        """Return the tail of the stream, and show it in the status."""
        try:
            tail = await self._edges.tail()
        except StreamMissingError as error:
            if self._archive.head is None:
                raise
            raise ChangesLostError.missing(error.stream) from None
        self._progress.tail = tail
        return tail

    async def _note_tail(self, tail: int | None) -> None:
        """Report how far the table is behind its stream; None for an unknown tail."""
        self._progress.tail = tail
        unread = self._progress.unread_range()
        if unread is not None and unread != self._noted:
            self._progress.unread = await self._edges.unread(*unread)
            self._noted = unread

    def _check_length(self, tail: int) -> None:
        """Raise if the stream ends before the next record, because it was created anew."""
        if tail < self._next:
            raise ChangesLostError.shortened(self.job.stream, tail, self._next)

    @property
    def _next(self) -> int:
        """The first record that is not taken in yet."""
        ends = [at for at in (self._read.seen, self._archive.head) if at is not None]
        if ends:
            return max(ends) + 1
        return self._start.seq_num if self._start else 0

    def _state(self) -> TableState:
        manifest = self._archive.manifest
        return TableState(
            self._task_job,
            self._archive.writer.schema,
            self._read,
            time.monotonic(),
            without_chain(manifest) if manifest else None,
            None if manifest else self._start,
        )

    def _folding(self, jobs: TableJobs) -> Callable[[FoldStep], Awaitable[list[WrittenPart]]]:
        return lambda step: jobs.fold(self.job, step)

    def _adopt(self) -> None:
        self._progress.adopt(self._archive.manifest, self._archive.lagging)

    def _refusal(self) -> ConflictError:
        status = self.status()
        why = f" ({status.last_error.message})" if status.last_error else ""
        return ConflictError(
            f"the writer of table {self.job.table!r} is {status.state}{why}: start it again"
        )


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
