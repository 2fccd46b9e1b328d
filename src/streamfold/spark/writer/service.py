"""All tables of one process: each lives on its own, whatever happens to the others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from streamfold.archive.events import Backoff
from streamfold.errors import InvalidError, NotFoundError
from streamfold.snapshotter.service.status import State, TableStatus
from streamfold.spark.writer.driver_loop import DriverLoop
from streamfold.spark.writer.job import TableJob
from streamfold.spark.writer.listener import LagListener
from streamfold.spark.writer.table import TableWriter

#: Seconds between two looks at whether any table is left.
_LOOK = 0.5


class SnapshotWriter:
    """Publishes tables from `__enter__` to `__exit__`, which flushes them; the session is passed in.

    `scratch` is a folder for what Spark wants to write down; nothing in it is needed afterwards.
    """

    def __init__(
        self,
        spark: SparkSession,
        jobs: Sequence[TableJob],
        *,
        scratch: Path,
        backoff: Backoff | None = None,
    ) -> None:
        names = [job.table for job in jobs]
        if not names or len(set(names)) < len(names):
            raise InvalidError(f"tables {names} must be at least one, each named once")
        self._spark = spark
        self._loop = DriverLoop()
        scratch.mkdir(parents=True, exist_ok=True)
        starting = threading.Lock()
        self._tables = {
            job.table: TableWriter(
                spark, job, self._loop, scratch=scratch, starting=starting, backoff=backoff
            )
            for job in jobs
        }
        self._listener = LagListener({t.name: t.lag for t in self._tables.values()})

    def __enter__(self) -> SnapshotWriter:
        self._loop.__enter__()
        self._spark.streams.addListener(self._listener)
        for table in self._tables.values():
            table.start()
        return self

    def __exit__(self, *_: object) -> None:
        for table in self._tables.values():
            table.stop()
        for table in self._tables.values():
            table.join()
        self._spark.streams.removeListener(self._listener)
        self._loop.__exit__()

    def statuses(self) -> dict[str, TableStatus]:
        return {name: table.status() for name, table in self._tables.items()}

    def request_snapshot(self, table: str) -> None:
        if table not in self._tables:
            raise NotFoundError(f"table {table!r} is not one of {sorted(self._tables)}: name one")
        self._tables[table].request_snapshot()

    def wait(self, stop: threading.Event) -> bool:
        """Wait until `stop` is set, or no table is left; whether any is."""
        while not stop.wait(_LOOK):
            if all(status.state.is_final for status in self.statuses().values()):
                return False
        return True

    @property
    def is_whole(self) -> bool:
        """Whether every table was flushed and closed."""
        return all(status.state is State.CLOSED for status in self.statuses().values())
