"""All tables of one process, and their Spark session; no table stops another."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from streamfold.backoff import UNATTENDED, Backoff
from streamfold.errors import InvalidError, NotFoundError
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.lanes import APART, HEAVY
from streamfold.snapshotter.spark.query import ChangeQuery
from streamfold.snapshotter.spark.table.edges import StreamTails
from streamfold.snapshotter.spark.table.requests import Request
from streamfold.snapshotter.spark.table.writer import TableWriter
from streamfold.snapshotter.spark.table_job import TableJob
from streamfold.snapshotter.status.table_status import SparkCounts, State, TableStatus
from streamfold.spark.session import (
    QUICK_JAVA,
    is_local,
    is_submitted,
    local_master,
    open_session,
)

#: Only backlogs and folds have work for more workers on this machine, and each takes 200 MB.
_IDLE_WORKERS = {"spark.python.factory.idleWorkerMaxPoolSize": str(os.cpu_count() or 1)}
_DEFAULTS = {
    # Python does the work on rows, so compiling Java well costs more than it saves: a third of the CPU
    # time of a fold of 5 million changes.
    # By default, Java's heap starts with a 64th of the machine's memory, and hardly shrinks.
    "spark.driver.extraJavaOptions": (
        f"{QUICK_JAVA} -Xms64m -XX:MinHeapFreeRatio=20 -XX:MaxHeapFreeRatio=40"
    ),
    # Over TCP, a task waits up to 45 ms for a delayed acknowledgement. Other sessions accept that: over
    # a Unix socket, a Python process that planned a query prints a `BrokenPipeError` when it ends.
    "spark.python.unix.domain.socket.enabled": "true",
    # A long fold of one table must not delay the diffs of others.
    "spark.scheduler.mode": "FAIR",
    # A task result is one row with many changes: bytes bound a batch of rows.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    "spark.ui.showConsoleProgress": "false",
    # Stopping does not wait for a task of the query that reads from a silent server.
    "spark.sql.streaming.stopTimeout": "3s",
}
#: Seconds between two checks whether any table is left.
_LOOK = 0.5
#: Seconds to wait for destinations and servers before Spark starts.
CHECK_SECONDS = 5.0
#: Seconds between two checks of a table's destinations and server, and between two looks at its lag.
_CHECK_PAUSE = 2.0


def snapshotter_session(
    settings: Mapping[str, str] | None = None, *, verbose: bool = False
) -> SparkSession:
    """Start a Spark session for the snapshotter; `settings` and spark-submit override its defaults.

    Spark prints nothing unless `verbose`.
    """
    master = (settings or {}).get("spark.master", _master())
    here = _IDLE_WORKERS if is_local(master) and not is_submitted() else {}
    session = open_session(
        "streamfold snapshotter",
        settings=settings,
        defaults={**_DEFAULTS, **here, "spark.master": _master()},
        service=True,
        quiet=not verbose,
    )
    session.sparkContext.setLogLevel("WARN" if verbose else "ERROR")
    return session


def _master() -> str:
    """Return a local master with a slot for the query's task beside all other jobs."""
    cores = os.cpu_count() or 1
    return local_master(HEAVY * cores + APART + 1)


class Snapshotter:
    """The tables of one process, whose status is available before Spark starts.

        with Snapshotter(jobs, scratch=folder) as snapshotter:
            snapshotter.check()
            with snapshotter.publishing(spark):
                snapshotter.wait(stop)

    `scratch` is a folder for Spark's temporary files, which are not needed afterwards.
    """

    def __init__(
        self, jobs: Sequence[TableJob], *, scratch: Path, backoff: Backoff = UNATTENDED
    ) -> None:
        names = [job.table for job in jobs]
        if not names or len(set(names)) < len(names):
            raise InvalidError(f"tables {names} must be at least one, without repeated names")
        self._loop = DriverLoop()
        scratch.mkdir(parents=True, exist_ok=True)
        self._scratch = scratch
        self._tails = StreamTails()
        self._tables = {job.table: TableWriter(job, self._tails, backoff=backoff) for job in jobs}
        self._query: ChangeQuery | None = None
        self._checks: list[Future[None]] = []

    def __enter__(self) -> Snapshotter:
        self._loop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.__exit__()
        self._tails.close()

    def check(self) -> None:
        """Check that all destinations and servers answer; the status shows what is wrong.

        Waits a few seconds at most; the checks continue until `publishing`.
        """
        looks: list[Future[None]] = [Future() for _ in self._tables]
        for table, look in zip(self._tables.values(), looks, strict=True):
            self._checks.append(self._loop.submit(self._check(table, look)))
        wait(looks, CHECK_SECONDS)

    async def _check(self, table: TableWriter, look: Future[None]) -> None:
        while self._query is None:
            await table.check()
            if not look.done():
                look.set_result(None)
            await asyncio.sleep(_CHECK_PAUSE)

    @contextmanager
    def publishing(self, spark: SparkSession) -> Iterator[None]:
        """Publish the tables while the block runs, then flush them."""
        self._query = query = ChangeQuery(spark, self._scratch)
        query.start()
        tables = list(self._tables.values())
        runs = [self._loop.submit(table.run(query)) for table in tables]
        looks = self._loop.submit(self._look())
        try:
            yield
        finally:
            try:
                for table in tables:
                    self._loop.soon(table.stop)
                wait(runs)
                for run in runs:
                    run.result()
            finally:
                looks.cancel()
                query.close()

    async def _look(self) -> None:
        """Report the lag of all tables, whose tails one request fetches."""
        while True:
            await asyncio.gather(*(table.look() for table in self._tables.values()))
            await asyncio.sleep(_CHECK_PAUSE)

    def statuses(self) -> dict[str, TableStatus]:
        return {name: table.status() for name, table in self._tables.items()}

    def spark(self) -> SparkCounts:
        """Return Spark's work for all tables together."""
        return self._query.total if self._query else SparkCounts()

    def request_snapshot(self, table: str) -> Request:
        if table not in self._tables:
            raise NotFoundError(f"table {table!r} is not one of {sorted(self._tables)}: name one")
        return self._tables[table].request_snapshot()

    def wait(self, stop: threading.Event) -> bool:
        """Wait until `stop` is set or no table is left, and return whether any is."""
        while not stop.wait(_LOOK):
            if all(status.state.is_final for status in self.statuses().values()):
                return False
        return True

    @property
    def is_whole(self) -> bool:
        """Return whether every table was flushed and closed."""
        return all(status.state is State.CLOSED for status in self.statuses().values())
