"""The source of the permanent query: its batches are the driver's plans, its rows the tasks' results.

The driver knows the manifests, so it decides which records come next. Tasks read these and take
them in: no record passes through Java. Spark asks its source for the next offset in a separate
Python process on the driver's machine; the source asks the driver, over a socket that only this
user can reach, and gets the next plan as soon as there is one. An idle query makes a few calls per
minute.

An offset shows how far each table is: `{"plan": 7, "records": {"orders": 1200}}`.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from streamfold.spark.errors import CarriesErrors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

#: Schema of what tasks return, see `tasks.results`.
TASK_RESULTS = "bucket int, seq_num long, payload binary"
#: Name of the source.
TABLES = "streamfold-tables"
#: Seconds after which a call without a plan returns: Spark calls again.
IDLE = 5.0
#: Seconds before the next call to a driver that does not answer, because it stops or restarts.
_GONE_PAUSE = 0.2
#: Maximum bytes of a socket's folder, since its path may have 107; the folder if the usual one has
#: more.
_FOLDER_BYTES, _SHORT_FOLDER = 80, "/tmp"  # noqa: S108 - a new folder in it is this user's alone

Offset = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch of the query."""

    number: int
    #: The works of each task, packed.
    tasks: tuple[tuple[bytes, ...], ...]
    #: For all tables: the first record that is not taken in after the batch, and the stream's tail.
    ends: dict[str, int] = field(default_factory=dict)
    tails: dict[str, int] = field(default_factory=dict)


class TablesSource(CarriesErrors, DataSource):
    """Results for all tables of a snapshotter; only for its own query."""

    @classmethod
    def name(cls) -> str:
        return TABLES

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._socket = options["socket"]

    def schema(self) -> str:
        return TASK_RESULTS

    def streamReader(self, schema: StructType) -> PlanReader:  # noqa: N802 - Spark's name
        return PlanReader(self._socket)


class TaskPartition(InputPartition):
    """The works of one task, packed."""

    def __init__(self, works: tuple[bytes, ...]) -> None:
        super().__init__(None)
        self.works = works


class PlanReader(CarriesErrors, DataSourceStreamReader):
    """Spark calls `read` in tasks, everything else on the driver, in one process per query."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._connection: Connection | None = None
        self._plan = Plan(0, ())

    def __getstate__(self) -> dict[str, Any]:
        """Return what tasks need: they get their ranges with their partitions."""
        return {**self.__dict__, "_connection": None, "_plan": Plan(0, ())}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        return {"plan": 0, "records": {}}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Wait for the next plan; returns `start` if none comes within seconds."""
        plan = self._ask(int(start["plan"]))
        if plan is None:
            return start
        self._plan = plan
        return {"plan": plan.number, "records": plan.ends}

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """Return the tails, so that the query's progress shows the lag of all tables."""
        return {"plan": self._plan.number, "records": self._plan.tails}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if int(end["plan"]) != self._plan.number:
            raise RuntimeError(f"plan {end['plan']} is asked for, the last is {self._plan.number}")
        return [TaskPartition(works) for works in self._plan.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: yield the result of each table."""
        # Only tasks need it, and each process that plans would spend a second on it.
        from streamfold.snapshotter.spark.tasks.batch import take_in_ranges

        if isinstance(partition, TaskPartition):
            yield from take_in_ranges(partition.works)

    def commit(self, end: Offset) -> None:
        """Do nothing: manifests hold the positions."""

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _ask(self, number: int) -> Plan | None:
        try:
            if self._connection is None:
                self._connection = Client(self._socket, "AF_UNIX")
            self._connection.send(number)
            plan: Plan | None = self._connection.recv()
        except (OSError, EOFError):
            self._connection = None
            time.sleep(_GONE_PAUSE)
            return None
        return plan


class PlanServer:
    """Serves plans to the source of one query; a context manager.

    Calls `next_plan` in a thread with the number of the last plan. It returns the next one, or None
    if there is none within `IDLE` seconds.
    """

    def __init__(self, next_plan: Callable[[int], Plan | None]) -> None:
        self._next_plan = next_plan
        self._closed = False
        usual = tempfile.gettempdir()
        folder = usual if len(usual.encode()) <= _FOLDER_BYTES else _SHORT_FOLDER
        self._folder = tempfile.TemporaryDirectory(prefix="streamfold-", dir=folder)
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> dict[str, str]:
        """Listen; returns the options of the source."""
        address = f"{self._folder.name}/plans"
        self._listener.bind(address)
        self._listener.listen()
        threading.Thread(target=self._accept, name="plans", daemon=True).start()
        return {"socket": address}

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.debug("no connection for plans was accepted: %s", error)
                    time.sleep(_GONE_PAUSE)
                continue
            # Spark may start a second process for the source before the first one has ended.
            name, connection = "plans of a query", Connection(accepted.detach())
            threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                while not self._closed:
                    connection.send(self._next_plan(int(connection.recv())))
            except (OSError, EOFError):
                return  # the query has ended
