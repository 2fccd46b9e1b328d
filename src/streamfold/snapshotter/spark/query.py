"""The permanent query of all tables.

Every change passes through Spark. Small ranges of all tables share the batches of one Structured
Streaming query, which runs as long as the process, in as few tasks as their size needs. Work that
could hold up other tables runs in jobs of its own, see `lanes`: a backlog, a fold, and any range of
a table that failed or was slow in a batch, until it has been quick several times. So does a range
that the query cannot take for now, because it starts, is busy or has ended; the table's next range
tries the query again.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamfold.errors import StreamfoldError
from streamfold.snapshotter.spark.errors_from_spark import QueryFailedError, error_from_spark
from streamfold.snapshotter.spark.lanes import CountedJobs, JobLanes, intake_counts
from streamfold.snapshotter.spark.plans import IDLE, TABLES, Plan, PlanServer, TablesSource
from streamfold.snapshotter.spark.tasks.arrivals import RangeTooLargeError
from streamfold.snapshotter.spark.tasks.batch import TableSlowError, TableWork, intakes
from streamfold.snapshotter.spark.tasks.intake import Intake

logger = logging.getLogger(__name__)

#: Records from which on a range is a backlog: about a second of work for one task.
BACKLOG_RECORDS = 200_000
#: Records from which on a batch gets another task, and tables that one task has room for.
_TASK_RECORDS, _TASK_TABLES = 20_000, 32
#: Records after which a task gets no further table; a single table may have more.
_TASK_RECORDS_MAX = 40_000
#: Seconds to wait for other tables after the first of a batch: those of one interval come together.
_GATHER = 0.02
#: Seconds after which a range that is in no batch yet is taken in apart.
_UNPLANNED = 20.0
#: A table that runs apart returns after this many consecutive ranges within this many seconds each.
#: Each further time that it runs apart, it takes twice as many, up to the maximum.
_QUICK_RANGES, _QUICK_RANGES_MAX, _QUICK_SECONDS = 3, 48, 1.0
#: Seconds before a query that ended is started again, at first and at most.
_RESTART_PAUSE, _RESTART_PAUSE_MAX = 1.0, 30.0
#: Seconds for the query's end at a stop.
_STOP_SECONDS = 10.0


class _NoBatchError(Exception):
    """The query cannot take a range for now, and no table is to blame."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A range that waits for its batch."""

    work: TableWork
    outcome: Future[Intake] = field(default_factory=Future)

    def answer(self, result: Intake | Exception) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return  # its table has stopped waiting
        if isinstance(result, Exception):
            self.outcome.set_exception(result)
        else:
            self.outcome.set_result(result)


@dataclass(slots=True)
class _Apart:
    """A table that runs apart."""

    #: Quick ranges in a row that it takes to return to the query.
    needed: int
    quick: int = 0


class ChangeQuery(JobLanes):
    """Runs the work of all tables on Spark; `start` it, and `close` it after the last table.

    Call coroutines on the loop of the tables, everything else in any thread.
    """

    def __init__(self, spark: SparkSession, scratch: Path) -> None:
        super().__init__(spark)
        self._scratch = scratch
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        #: The tickets of the plan that the query works on.
        self._tickets: dict[str, _Ticket] = {}
        #: By table: the first record that is not taken in, and the tail of its stream.
        self._ends: dict[str, int] = {}
        self._tails: dict[str, int] = {}
        self._closing = False
        #: How often the query was started, and the last start after which it asked for a plan.
        self._run_number = self._served = 0
        #: Whether ranges are taken in apart until the query asks for a plan.
        self._is_down = False
        self._query: StreamingQuery | None = None
        #: Tables that run apart.
        self._slow: dict[str, _Apart] = {}
        #: How often a table went apart.
        self._relapses: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._keep_running, name="query", daemon=True)

    def start(self) -> None:
        self._spark.dataSource.register(TablesSource)
        self._thread.start()

    def close(self) -> None:
        """End the query and the jobs beside it, and lose work that nobody waits for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._stop_query()
        super().close()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    @property
    def has_served(self) -> bool:
        """Whether the query has started. Until then, changes wait."""
        return self._served > 0

    async def take_in(self, work: TableWork, tail: int) -> Intake:
        """Take in records of one table; the query's progress shows `tail`, its stream's."""
        with self._changed:
            self._ends[work.table], self._tails[work.table] = work.start, tail
        intake = await self._take_in(work)
        with self._changed:
            self._ends[work.table] = work.end if intake.read.seen is None else intake.read.seen + 1
        return intake

    async def _take_in(self, work: TableWork) -> Intake:
        if work.end - work.start <= BACKLOG_RECORDS:
            try:
                return await self._take_in_range(work)
            except RangeTooLargeError:
                logger.debug("table %s: one task cannot hold %s", work.table, work.text)
        return await self.take_in_backlog(work)

    async def _take_in_range(self, work: TableWork) -> Intake:
        if work.table not in self._slow:
            try:
                return await self._in_batch(work)
            except _NoBatchError as reason:
                logger.debug("table %s: %s; %s is taken in apart", work.table, reason, work.text)
            except (TableSlowError, QueryFailedError) as error:
                # Another table may be to blame for a failed batch: apart, each table fails for
                # itself.
                logger.info("table %s: %s; it continues apart", work.table, error.message)
                needed = _QUICK_RANGES << min(self._relapses[work.table], 8)
                self._slow[work.table] = _Apart(min(needed, _QUICK_RANGES_MAX))
                self._relapses[work.table] += 1
        intake = await self.take_in_alone(work)
        self._note_speed(work.table, intake.seconds)
        return intake

    async def _in_batch(self, work: TableWork) -> Intake:
        ticket = _Ticket(work)
        with self._changed:
            if self._is_down:
                raise _NoBatchError("the query of all tables is down")
            self._waiting.append(ticket)
            self._changed.notify_all()
        watch = asyncio.get_running_loop().call_later(_UNPLANNED, self._give_up, ticket)
        try:
            return await asyncio.wrap_future(ticket.outcome)
        finally:
            watch.cancel()

    def _give_up(self, ticket: _Ticket) -> None:
        """Have a range taken in apart that is in no plan, because the query starts or is busy."""
        with self._changed:
            if ticket not in self._waiting:
                return
            self._waiting.remove(ticket)
            self._is_down = True
        ticket.answer(_NoBatchError(f"the query had no place for it within {_UNPLANNED:g} s"))

    def _next_plan(self, run: int, number: int) -> Plan | None:
        """Return the plan after this one, in the thread that serves the query's source."""
        with self._changed:
            if run != self._run_number:
                return None  # that query has ended
            self._served, self._is_down = run, False
            if not self._changed.wait_for(partial(self._has_work, run), IDLE):
                return None
        time.sleep(_GATHER)
        with self._changed:
            if not self._has_work(run) or self._closing or run != self._run_number:
                return None
            # Tickets of a plan that did not reach the query are planned again.
            waiting = [*self._tickets.values(), *self._waiting]
            chosen = first_that_fit(waiting, self._cores)
            self._waiting = waiting[len(chosen) :]
            self._tickets = {ticket.work.table: ticket for ticket in chosen}
            works = [ticket.work for ticket in chosen]
            ends = {**self._ends, **{work.table: work.end for work in works}}
            return Plan(number + 1, pack(works, self._cores), ends, dict(self._tails))

    def _has_work(self, run: int) -> bool:
        return bool(self._waiting or self._tickets or self._closing or run != self._run_number)

    def _process(self, rows: DataFrame, batch_id: int) -> None:
        """Process a batch, in a thread of Spark's; an error would end the query."""
        with self._changed:
            tickets, self._tickets = self._tickets, {}
        text = "take in " + ", ".join(ticket.work.text for ticket in tickets.values())
        results: dict[str, Intake | StreamfoldError] = {}
        try:
            jobs = CountedJobs(self._spark, text, "query")
            try:
                with jobs:
                    results = intakes(rows.collect())
            finally:
                self._add({table: intake_counts(results.get(table)) for table in tickets}, jobs)
        except Exception as raised:  # a table whose ticket has no answer would never go on
            _fail(tickets.values(), error_from_spark(raised))
        for table, ticket in tickets.items():
            missing = QueryFailedError(f"the batch of table {table!r} has no result for it")
            ticket.answer(results.get(table, missing))

    def _note_speed(self, table: str, seconds: float) -> None:
        """Return a table to the query when it has been quick several times."""
        apart = self._slow.get(table)
        if apart is None:
            return
        apart.quick = apart.quick + 1 if seconds < _QUICK_SECONDS else 0
        if apart.quick >= apart.needed:
            del self._slow[table]

    def _keep_running(self) -> None:
        """Run the query, and restart it if it ends; its work is repeated."""
        pause, said = _RESTART_PAUSE, ""
        while not self._closing:
            with self._changed:
                self._run_number += 1
            try:
                with PlanServer(partial(self._next_plan, self._run_number)) as options:
                    self._run_query(options)
            except Exception as raised:
                message = error_from_spark(raised).message
                if not self._closing and message != said:
                    logger.warning("the query of all tables ended and starts again: %s", message)
                    said = message
            with self._changed:
                served = self._served == self._run_number
                pause = _RESTART_PAUSE if served else min(2 * pause, _RESTART_PAUSE_MAX)
                self._is_down = True
                tickets = [*self._tickets.values(), *self._waiting]
                self._tickets, self._waiting = {}, []
            _fail(tickets, _NoBatchError("the query of all tables ended"))
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)

    def _run_query(self, options: dict[str, str]) -> None:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="query-", dir=self._scratch, ignore_cleanup_errors=True
        ) as folder:
            rows = self._spark.readStream.format(TABLES).options(**options).load()
            self._query = (
                rows.writeStream.foreachBatch(self._process)
                .queryName(f"snapshotter {uuid4().hex[:8]}")
                .option("checkpointLocation", Path(folder).resolve().as_uri())
                .start()
            )
            if self._closing:
                self._stop_query()
            self._query.awaitTermination()

    def _stop_query(self) -> None:
        try:
            if self._query is not None:
                self._query.stop()
        except (PySparkException, Py4JError, OSError) as error:
            logger.debug("the query has not ended in time: %s", error)


def first_that_fit(tickets: Sequence[_Ticket], tasks: int) -> list[_Ticket]:
    """Return the tickets of the next batch, so that no task of it takes long.

    As many tickets as tasks always fit: each gets a task of its own.
    """
    chosen, records = list[_Ticket](), 0
    for ticket in tickets:
        records += ticket.work.end - ticket.work.start
        is_full = records > tasks * _TASK_RECORDS_MAX or len(chosen) == tasks * _TASK_TABLES
        if is_full and len(chosen) >= tasks:
            break
        chosen.append(ticket)
    return chosen


def pack(works: Sequence[TableWork], most: int) -> tuple[tuple[bytes, ...], ...]:
    """Distribute works over as few tasks as their size needs, at most `most`."""
    records = sum(work.end - work.start for work in works)
    needed = max(records // _TASK_RECORDS, len(works) // _TASK_TABLES) + 1
    count = max(1, min(most, len(works), needed))
    tasks: list[list[TableWork]] = [[] for _ in range(count)]
    sizes = [0] * count
    for work in sorted(works, key=lambda work: work.start - work.end):
        smallest = sizes.index(min(sizes))
        tasks[smallest].append(work)
        sizes[smallest] += work.end - work.start
    return tuple(tuple(work.pack() for work in task) for task in tasks)


def _fail(tickets: Iterable[_Ticket], error: Exception) -> None:
    for ticket in tickets:
        ticket.answer(error)
