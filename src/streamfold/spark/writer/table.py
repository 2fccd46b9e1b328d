"""One table's writer: a streaming query, watched over by a thread, until it is told to stop.

A failure that may pass is tried again after a pause, from what is committed; any other stops this
table, and only this one.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.archive.events import Backoff
from streamfold.errors import ConflictError, WriterFencedError
from streamfold.snapshotter.service.status import State, TableStatus
from streamfold.spark.writer.driver_loop import DriverLoop
from streamfold.spark.writer.events import TableEvents
from streamfold.spark.writer.failures import may_pass, told_by
from streamfold.spark.writer.job import TableJob
from streamfold.spark.writer.pipeline import TablePipeline
from streamfold.spark.writer.published import PublishedTable
from streamfold.spark.writer.stream import TableStream
from streamfold.spark.writer.turns import Turns
from streamfold.spark.writer.watch import Watch

logger = logging.getLogger(__name__)

#: Seconds between two looks at the query: how late its end is noticed.
_LOOK = 0.25
#: Seconds between two looks at a query that starts.
_START_LOOK = 0.05
#: How what Spark says of a query begins until its process is there.
_INITIALIZING = "Initializing"


def _now() -> datetime:
    return datetime.now(UTC)


class TableWriter:
    """The life of one table in this process; `start` it, `stop` it, look at it at any time."""

    def __init__(
        self,
        spark: SparkSession,
        job: TableJob,
        loop: DriverLoop,
        *,
        scratch: Path,
        starting: threading.Lock | None = None,
        backoff: Backoff | None = None,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self.job = job
        #: Held while a query starts, by one table of a process at a time.
        self._starting = starting or threading.Lock()
        #: Of the query, by which the listener knows the table; a session may hold two writers of it.
        self.name = f"snapshotter {job.table} {uuid4().hex[:8]}"
        self._published = PublishedTable(job, loop)
        self._stream = TableStream(spark, job)
        self._events = TableEvents(job, self._published.primary, loop)
        self._watch = Watch(job.table, job.stream, now)
        self._woken = threading.Event()
        pipeline = TablePipeline(spark, job, self._published, now)
        self._turns = Turns(
            self._stream, pipeline, self._published, self._events, self._watch, self._woken.set
        )
        self._scratch = scratch
        self._backoff = backoff or Backoff()
        self._rng = random.Random()  # noqa: S311 - pauses need no secrecy
        self._stopping = threading.Event()
        self._requested = threading.Event()
        self._thread = threading.Thread(target=self._live, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to flush and to end; returns at once."""
        self._stopping.set()
        self._woken.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def status(self) -> TableStatus:
        return self._watch.status(self._events.errors)

    def lag(self, records: int) -> None:
        """Told by the listener: records that the query has still to read."""
        if self._turns.is_open:
            self._watch.lag(records)

    def request_snapshot(self) -> None:
        """Have a base written soon; ConflictError when there will be none."""
        state = self.status().state
        if state.is_final or self._stopping.is_set():
            raise ConflictError(
                f"the writer of table {self.job.table!r} is {state}: start it again"
            )
        if self._published.manifest is None:
            raise ConflictError(
                f"table {self.job.table!r} has no base yet: the first one is written as soon as "
                "there are records"
            )
        if self._requested.is_set():
            raise ConflictError(f"a base of table {self.job.table!r} is on its way already")
        self._requested.set()
        self._woken.set()

    def _live(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._run()
            except Exception as raised:
                failures = 1 if self._turns.progressed else failures + 1
                if not self._goes_on(raised):
                    break
                self._stopping.wait(self._backoff.pause(failures, self._rng))
        if not self.status().state.is_final:
            self._finish()
        self._events.stop()

    def _run(self) -> None:
        """Open the archive and follow the stream, until asked to stop; raises what went wrong."""
        start = self._turns.open()
        self._events.start()
        checkpoint = Path(tempfile.mkdtemp(prefix="query-", dir=self._scratch))
        query = self._follow(start, checkpoint)
        try:
            self._watch.enter(State.RUNNING)
            self._look_after(query)
        finally:
            self._turns.close()
            query.stop()
            shutil.rmtree(checkpoint, ignore_errors=True)

    def _follow(self, start: int, checkpoint: Path) -> StreamingQuery:
        """Start the query; Spark gives its process seconds to appear, so tables start in turn."""
        with self._starting:
            query = self._stream.follow(
                start,
                self._turns.take,
                name=self.name,
                interval=self.job.interval,
                checkpoint=checkpoint,
            )
            while query.isActive and query.status["message"].startswith(_INITIALIZING):
                if self._stopping.wait(_START_LOOK):
                    break
            return query

    def _look_after(self, query: StreamingQuery) -> None:
        while not self._stopping.is_set():
            self._woken.wait(_LOOK)
            self._woken.clear()
            if self._turns.failure is not None:
                raise self._turns.failure
            if not query.isActive:
                raise query.exception() or RuntimeError(f"query {self.name!r} ended by itself")
            if self._requested.is_set():
                self._turns.rebase_on_request()
                self._requested.clear()
            self._turns.release_if_due()
            self._turns.rebase_if_due()

    def _finish(self) -> None:
        """The last diff; what cannot be written now stays in the stream for the next run."""
        try:
            self._turns.flush()
        except Exception as raised:
            error = told_by(raised)
            self._watch.fail(error, State.STOPPED)
            logger.error("table %s: the last flush failed: %s", self.job.table, error.message)
        else:
            self._watch.enter(State.CLOSED)

    def _goes_on(self, raised: Exception) -> bool:
        """Record a failure; whether another try may help."""
        error = told_by(raised)
        if error.code.startswith("blob_"):
            self._watch.count_destination_error(_place_in(error.message, self.job))
        if may_pass(error):
            self._watch.fail(error, State.RETRYING)
            logger.warning("table %s: %s; trying again", self.job.table, error.message)
            return True
        fenced = isinstance(error, WriterFencedError)
        self._watch.fail(error, State.FENCED if fenced else State.STOPPED)
        logger.error("table %s stops: %s (%s)", self.job.table, error.message, error.code)
        return False


def _place_in(message: str, job: TableJob) -> str:
    """The destination that an error is about: messages of storage name it, else it is the first."""
    uris = [place.url.rstrip("/") + "/" for place in job.places]
    return next((uri for uri in uris if uri.rstrip("/") in message), uris[0])
