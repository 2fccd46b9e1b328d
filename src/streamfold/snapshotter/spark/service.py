"""All tables of one process, and the Spark session that they share; no table stops another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from streamfold.backoff import Backoff
from streamfold.errors import InvalidError, NotFoundError
from streamfold.snapshotter.spark.driver_loop import DriverLoop
from streamfold.snapshotter.spark.jobs import TableJob
from streamfold.snapshotter.spark.table.arrivals import driver_bytes
from streamfold.snapshotter.spark.table.writer import Request, TableWriter
from streamfold.snapshotter.status.table_status import State, TableStatus
from streamfold.spark.session import QUICK_JAVA, open_session

_DEFAULTS = {
    # Python does the work on rows, so compiling Java well costs more than it saves: a third of the
    # processor time of a fold of 5 million changes.
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    # Over TCP, a task waits up to 45 ms for a delayed acknowledgement. Other sessions accept that:
    # over a Unix socket, a Python process that planned a query prints a `BrokenPipeError` when it ends.
    "spark.python.unix.domain.socket.enabled": "true",
    # A long fold of one table must not delay the diffs of others.
    "spark.scheduler.mode": "FAIR",
    # A task result is one row with many changes: batches of rows are bounded by their bytes.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20),
    "spark.ui.showConsoleProgress": "false",
    # A query may be waiting for an unreachable server: stopping does not wait for it.
    "spark.sql.streaming.stopTimeout": "3s",
}
#: Seconds between two checks whether any table is left.
_LOOK = 0.5
#: Seconds to wait for destinations and servers before Spark starts.
CHECK_SECONDS = 5.0
#: Seconds between two such checks of a table.
_CHECK_PAUSE = 2.0


def snapshotter_session(
    settings: Mapping[str, str] | None = None, *, verbose: bool = False
) -> SparkSession:
    """Start a Spark session for the snapshotter; `settings` and spark-submit win over its defaults.

    Shows what Spark prints only if `verbose`.
    """
    session = open_session(
        "streamfold snapshotter",
        settings=settings,
        defaults=_DEFAULTS,
        service=True,
        quiet=not verbose,
    )
    session.sparkContext.setLogLevel("WARN" if verbose else "ERROR")
    return session


class Snapshotter:
    """The tables of one process; their status is available before Spark starts.

        with Snapshotter(jobs, scratch=folder) as snapshotter:
            snapshotter.check()
            with snapshotter.publishing(spark):
                snapshotter.wait(stop)

    `scratch` is a folder for Spark's temporary files; nothing in it is needed afterwards.
    """

    def __init__(
        self,
        jobs: Sequence[TableJob],
        *,
        scratch: Path,
        backoff: Backoff | None = None,
    ) -> None:
        names = [job.table for job in jobs]
        if not names or len(set(names)) < len(names):
            raise InvalidError(f"tables {names} must be at least one, without repeated names")
        self._loop = DriverLoop()
        self._begun = threading.Event()
        scratch.mkdir(parents=True, exist_ok=True)
        starting = threading.Lock()
        self._tables = {
            job.table: TableWriter(
                job,
                self._loop,
                scratch=scratch,
                starting=starting,
                most_bytes=driver_bytes(len(jobs)),
                backoff=backoff,
            )
            for job in jobs
        }

    def __enter__(self) -> Snapshotter:
        self._loop.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.set()
        self._loop.__exit__()

    def check(self) -> None:
        """Check that all destinations and servers answer; the status shows what is wrong.

        Waits a few seconds at most; the checks continue until `publishing`.
        """
        looks = [threading.Event() for _ in self._tables]
        for table, looked in zip(self._tables.values(), looks, strict=True):
            threading.Thread(
                target=self._check, args=(table, looked), name=f"check {table.name}", daemon=True
            ).start()
        end = time.monotonic() + CHECK_SECONDS
        for looked in looks:
            looked.wait(max(0.0, end - time.monotonic()))

    def _check(self, table: TableWriter, looked: threading.Event) -> None:
        while not self._begun.is_set():
            table.check()
            looked.set()
            self._begun.wait(_CHECK_PAUSE)

    @contextmanager
    def publishing(self, spark: SparkSession) -> Iterator[None]:
        """Publish the tables while the block runs, then flush them."""
        self._begun.set()
        for table in self._tables.values():
            table.start(spark)
        try:
            yield
        finally:
            for table in self._tables.values():
                table.stop()
            for table in self._tables.values():
                table.join()

    def statuses(self) -> dict[str, TableStatus]:
        return {name: table.status() for name, table in self._tables.items()}

    def request_snapshot(self, table: str) -> Request:
        if table not in self._tables:
            raise NotFoundError(f"table {table!r} is not one of {sorted(self._tables)}: name one")
        return self._tables[table].request_snapshot()

    def wait(self, stop: threading.Event) -> bool:
        """Wait until `stop` is set or no table is left; returns whether any is."""
        while not stop.wait(_LOOK):
            if all(status.state.is_final for status in self.statuses().values()):
                return False
        return True

    @property
    def is_whole(self) -> bool:
        """Return whether every table was flushed and closed."""
        return all(status.state is State.CLOSED for status in self.statuses().values())
