"""Runs one table in a thread until it is stopped: it takes in new records every interval.

The driver does that alone while they are few. A backlog is taken in by a streaming query, which ends
when the table has caught up: one that waits for records would keep a Python process per table. After a
transient failure the table retries from what is committed; any other stops this table, and no other.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.backoff import Backoff
from streamfold.errors import ConflictError, StreamfoldError, WriterFencedError
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.errors_from_spark import (
    ServerUnreachableError,
    error_from_spark,
    in_terms_of_tables,
    is_retryable,
)
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.archive import TableArchive, TableEvents
from streamfold.snapshotter.spark.table.archive_updates import ArchiveUpdates
from streamfold.snapshotter.spark.table.arrivals import DRIVER_BYTES
from streamfold.snapshotter.spark.table.intake import StreamEdges, TableStream
from streamfold.snapshotter.spark.table.pipeline import TablePipeline
from streamfold.snapshotter.spark.table.progress import TableProgress
from streamfold.snapshotter.spark.table.server_watch import ServerWatch
from streamfold.snapshotter.status.table_status import ArtifactStatus, State, TableStatus

logger = logging.getLogger(__name__)

Request = Future[ArtifactStatus]
#: Seconds between two checks of the query: how late its end is noticed.
_LOOK = 0.25
#: Seconds between two checks of a starting query.
_START_LOOK = 0.05
#: Start of Spark's message about a query until its process runs.
_INITIALIZING = "Initializing"
#: The most seconds between two attempts to reach a server, and between two log lines that say the same.
#: An attempt takes up to three seconds if the server drops packets: then a line comes about every five.
_UNREACHABLE_PAUSE, _REPEAT = 2.0, 4.0


class SnapshotRequests:
    """The requests for one table; used from any thread.

    Requests made before a base starts share it. A later one gets the next base: the current one may
    lack what the stream held by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Request] = []
        #: How many of the pending requests the current base is for.
        self._served = 0
        self._refusal: StreamfoldError | None = None

    def add(self) -> Request:
        """Request a base; after `close`, raises the error that it got."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if len(self._pending) == self._served:
                self._pending.append(Future())
            return self._pending[-1]

    def begin(self) -> bool:
        """Start a base for all requests so far; returns whether there are any."""
        with self._lock:
            self._served = len(self._pending)
            return bool(self._pending)

    def give_up(self) -> None:
        """Leave the requests to the next attempt, because the base could not be written."""
        with self._lock:
            self._served = 0

    def answer(self, base: ArtifactStatus) -> None:
        """Answer the requests of the base, which is committed."""
        with self._lock:
            answered, self._pending = self._pending[: self._served], self._pending[self._served :]
            self._served = 0
        for request in answered:
            request.set_result(base)

    def close(self, refusal: StreamfoldError) -> None:
        """Refuse all requests from now on, for the reason given."""
        with self._lock:
            self._refusal, pending = refusal, self._pending
            self._pending, self._served = [], 0
        for request in pending:
            request.set_exception(refusal)


def _now() -> datetime:
    return datetime.now(UTC)


class TableWriter:
    """Publishes one table in this process; `start` and `stop` it, read its status at any time."""

    def __init__(
        self,
        job: TableJob,
        loop: DriverLoop,
        *,
        scratch: Path,
        starting: threading.Lock | None = None,
        most_bytes: int = DRIVER_BYTES,
        backoff: Backoff | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """`most_bytes`: bytes of records that the driver may hold for this table."""
        self.job = job
        self._most_bytes = most_bytes
        #: The query that takes in a backlog now.
        self._query: StreamingQuery | None = None
        #: Held while a query starts, so that tables of a process start one at a time.
        self._starting = starting or threading.Lock()
        #: Name of the query and of the jobs of this table, unique in the session.
        self.name = f"snapshotter {job.table} {uuid4().hex[:8]}"
        self._published = TableArchive(job, loop)
        self._events = TableEvents(job, loop)
        self._watch = TableProgress(
            job.table, job.stream, job.destinations, now, job.dead_letters.location
        )
        self._now = now
        self._woken = threading.Event()
        self._scratch = scratch
        self._backoff = backoff or Backoff()
        self._rng = random.Random()  # noqa: S311 - only for pauses
        self._stopping = threading.Event()
        self._requests = SnapshotRequests()
        #: Why the server could not be reached when the table was to stop.
        self._unreachable: StreamfoldError | None = None
        #: The last logged failure, and its time.
        self._logged: tuple[str, float] = ("", 0.0)
        self._thread: threading.Thread | None = None
        self._server: ServerWatch | None = None
        #: Held while the thread is set, and by work that requires that it is not.
        self._beginning = threading.Lock()

    def check(self) -> None:
        """Check that destinations and server answer before Spark starts; the status shows errors."""
        try:
            self._published.check()
            self._watch.note_tail(StreamEdges(self.job).tail())
        except StreamfoldError as error:
            failure: StreamfoldError | None = error
        else:
            failure = None
        with self._beginning:
            if self._thread is not None:
                return  # the table's own thread reports it
            if failure is not None:
                self._note(failure, State.RETRYING)
                return
            self._watch.recover()
            self._watch.enter(State.STARTING)

    def start(self, spark: SparkSession) -> None:
        stream = TableStream(spark, self.job, self._most_bytes)
        pipeline = TablePipeline(spark, self.job, self._published, self._now, stream)
        updates = ArchiveUpdates(
            stream,
            pipeline,
            self._published,
            self._events,
            self._watch,
            self._woken.set,
            self._stopping,
        )
        self._server = server = self._server_watch(updates, stream)
        with self._beginning:
            self._thread = threading.Thread(
                target=self._live, args=(updates, stream, server), name=self.name, daemon=True
            )
        server.start()
        self._thread.start()

    def stop(self) -> None:
        """Request a flush and the end; returns at once."""
        self._stopping.set()
        self._woken.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; returns whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        ended = not self._thread.is_alive()
        if ended and self._server is not None:
            self._server.close()
        return ended

    def status(self) -> TableStatus:
        return self._watch.status(self._events.errors)

    def request_snapshot(self) -> Request:
        """Request a base, written as soon as the table runs; ConflictError if it never will."""
        request = self._requests.add()
        self._woken.set()
        return request

    def _live(self, updates: ArchiveUpdates, stream: TableStream, server: ServerWatch) -> None:
        # A name for the jobs of this thread, to cancel them by; those of the query have their own.
        stream.spark.sparkContext.setJobGroup(self.name, self.name)
        failures = 0
        while not self._stopping.is_set():
            try:
                self._run(updates, stream, server)
            except Exception as raised:
                updates.close(failed=True)
                failures = 1 if updates.progressed else failures + 1
                error = self._understood(raised)
                if not self._may_retry(error):
                    break
                self._stopping.wait(self._pause(error, failures))
        if not self.status().state.is_final:
            self._finish(updates, server)
        self._requests.close(self._refusal())
        # The writer that took the table sends its events.
        self._events.stop(deliver=self.status().state is not State.FENCED)

    def _run(self, updates: ArchiveUpdates, stream: TableStream, server: ServerWatch) -> None:
        """Open the archive and follow the stream until stopped; raises what went wrong."""
        updates.open()
        self._events.start(self._published.primary)
        self._watch.enter(State.RUNNING)
        with server:
            try:
                self._follow(updates, stream)
            finally:
                updates.close()

    def _follow(self, updates: ArchiveUpdates, stream: TableStream) -> None:
        """Take in new records every interval, and serve requests meanwhile."""
        due = time.monotonic()
        while not self._stopping.is_set():
            if time.monotonic() >= due:
                if not updates.advance():
                    self._catch_up(updates, stream)
                    continue
                due = max(due + self.job.interval.total_seconds(), time.monotonic())
            self._serve(updates)
            self._woken.wait(max(0.0, min(_LOOK, due - time.monotonic())))
            self._woken.clear()

    def _catch_up(self, updates: ArchiveUpdates, stream: TableStream) -> None:
        """Take in a backlog by a query, and serve requests meanwhile."""
        checkpoint = Path(tempfile.mkdtemp(prefix="query-", dir=self._scratch))
        self._query = query = self._start_query(updates, stream, checkpoint)
        try:
            while query.isActive and not self._stopping.is_set() and updates.failure is None:
                self._serve(updates)
                self._woken.wait(_LOOK)
                self._woken.clear()
            if updates.failure is not None:
                raise updates.failure
            if not query.isActive and (error := query.exception()) is not None:
                raise error
        finally:
            self._query = None
            self._end(query)
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _start_query(
        self, updates: ArchiveUpdates, stream: TableStream, checkpoint: Path
    ) -> StreamingQuery:
        """Start the query; one table at a time, because Spark limits how long its process may take."""
        with self._starting:
            query = stream.follow(
                updates.position, updates.process_batch, name=self.name, checkpoint=checkpoint
            )
            while query.isActive and query.status["message"].startswith(_INITIALIZING):
                if self._stopping.wait(_START_LOOK):
                    break
            return query

    def _server_watch(self, updates: ArchiveUpdates, stream: TableStream) -> ServerWatch:
        """Return the watch of the server; a stop does not wait for one that does not answer."""

        def give_up(error: StreamfoldError) -> None:
            self._unreachable = error
            stream.spark.sparkContext.cancelJobGroup(self.name)
            if (query := self._query) is not None:
                self._end(query)

        return ServerWatch(
            stream,
            self._stopping,
            on_tail=updates.note_tail,
            report=self._report,
            give_up=give_up,
        )

    def _report(self, unreachable: StreamfoldError | None) -> None:
        if unreachable is not None:
            self._note(unreachable, State.RETRYING)
            return
        self._watch.recover()
        self._watch.enter(State.RUNNING)

    def _end(self, query: StreamingQuery) -> None:
        try:
            query.stop()
        except (PySparkException, Py4JJavaError) as error:
            # It ends when its server answers or times out; its batches do nothing any more.
            logger.debug("table %s: the query has not ended in time: %s", self.job.table, error)

    def _serve(self, updates: ArchiveUpdates) -> None:
        """Do what is due besides new records."""
        self._serve_requests(updates)
        updates.release_if_due()
        updates.rebase_if_due()
        updates.check_owner_if_due()

    def _serve_requests(self, updates: ArchiveUpdates) -> None:
        if not self._requests.begin():
            return
        try:
            updates.rebase_on_request()
        except BaseException:
            self._requests.give_up()
            raise
        base = self.status().last_base
        if base is not None and updates.failure is None:
            self._requests.answer(base)
        else:
            self._requests.give_up()

    def _finish(self, updates: ArchiveUpdates, server: ServerWatch) -> None:
        """Write the last diff; what cannot be written now is left to the next run."""
        try:
            if self._unreachable is not None:
                raise self._unreachable
            self._events.start(self._published.primary)
            with server:
                updates.flush()
        except Exception as raised:
            error = self._unreachable or self._understood(raised)
            self._watch.fail(error, State.STOPPED)
            logger.error("table %s: the last flush failed: %s", self.job.table, error.message)
        else:
            self._watch.enter(State.CLOSED)

    def _understood(self, raised: Exception) -> StreamfoldError:
        """Translate an error to the terms of the configuration."""
        return in_terms_of_tables(error_from_spark(raised), self.job.source["endpoint"])

    def _may_retry(self, error: StreamfoldError) -> bool:
        """Record a failure; returns whether a retry may help."""
        if is_retryable(error):
            self._note(error, State.RETRYING)
            return True
        fenced = isinstance(error, WriterFencedError)
        self._watch.fail(error, State.FENCED if fenced else State.STOPPED)
        logger.error("table %s stops: %s (%s)", self.job.table, error.message, error.code)
        return False

    def _note(self, error: StreamfoldError, state: State) -> None:
        """Record a transient failure; the same one is logged again only after some seconds."""
        if isinstance(error, ServerUnreachableError):
            self._watch.note_tail(None)
        self._watch.fail(error, state)
        message, at = self._logged
        now = time.monotonic()
        if error.message != message or now - at >= _REPEAT:
            logger.warning("table %s: %s; retrying", self.job.table, error.message)
            self._logged = error.message, now

    def _pause(self, error: StreamfoldError, failures: int) -> float:
        pause = self._backoff.pause(failures, self._rng)
        unreachable = isinstance(error, ServerUnreachableError)
        return min(pause, _UNREACHABLE_PAUSE) if unreachable else pause

    def _refusal(self) -> ConflictError:
        status = self.status()
        why = f" ({status.last_error.message})" if status.last_error else ""
        return ConflictError(
            f"the writer of table {self.job.table!r} is {status.state}{why}: start it again"
        )
