"""One task of the permanent query: small ranges of several tables, taken in independently.

A table that fails, or waits for its server or destination, does not affect the others of the task: its
result is an error, and whatever it does later has no effect.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa

from streamfold.errors import RetryLaterError, StreamfoldError
from streamfold.snapshotter.spark.errors_from_spark import error_from_spark
from streamfold.snapshotter.spark.tasks.arrivals import (
    TASK_BYTES,
    LastRecord,
    TaskRecords,
    ask_stream,
    read_records,
    read_whole,
)
from streamfold.snapshotter.spark.tasks.intake import Intake, TableState, take_in
from streamfold.snapshotter.spark.tasks.results import (
    FAILURE,
    Batches,
    TaskResult,
    result_batch,
    return_memory,
)
from streamfold.spark.errors import DataLossError, StreamReplacedError
from streamfold.spark.stream.range_reads import Range

T = TypeVar("T")

#: Records after which a worker returns memory; for fewer, that costs more than it is worth.
MANY_RECORDS = 10_000
#: Tables that a task works on at once, in threads.
_AT_ONCE = 4
#: Seconds without a result after which a task gives up on the tables that it works on: while it gets
#: no processor time, and while it computes.
STALL_SECONDS, STALL_SECONDS_BUSY = 3.0, 20.0
#: Seconds between two looks at the processor time, and what counts as none.
_LOOK, _NO_WORK = 0.5, 0.005


class TableSlowError(RetryLaterError):
    """A table held up a task of several: it continues in jobs of its own."""

    code = "table_slow"


@dataclass(frozen=True, slots=True)
class TableWork:
    """A table and the records to take into it."""

    state: TableState
    start: int
    end: int

    @property
    def table(self) -> str:
        return self.state.job.table

    @property
    def records(self) -> Range:
        return Range(self.state.job.stream, self.start, self.end)

    @property
    def text(self) -> str:
        """The table and the range, for people."""
        return f"{self.table} [{self.start}, {self.end})"

    def read(self, most_bytes: int = TASK_BYTES) -> list[pa.RecordBatch]:
        """Read the records, if the stream is still the one that the archive was made from.

        Leaves what exceeds `most_bytes` to the next batch, unless a transaction would end there:
        RangeTooLargeError then.
        """
        last = self._last_record
        if last is None or last.seq_num != self.start - 1:
            self.check_stream()
            return self._read(most_bytes)
        try:
            return self._read(most_bytes, last)  # one request checks and reads
        except DataLossError as error:
            if isinstance(error, StreamReplacedError):
                raise
            return self._read(most_bytes)  # the archive's last record is trimmed

    def _read(self, most_bytes: int, after: LastRecord | None = None) -> list[pa.RecordBatch]:
        endpoint = self.state.job.endpoint
        if self.state.releases:
            return read_whole(endpoint, self.records, after)
        return read_records(endpoint, self.records, most_bytes, after)

    @property
    def _last_record(self) -> LastRecord | None:
        return LastRecord.of(self.state.manifest, self.state.job.layout)

    def check_stream(self) -> None:
        """Raise if the stream is not the one that the archive was made from."""
        last, job = self._last_record, self.state.job
        if last is not None:
            shown = ask_stream(
                job.endpoint, job.stream, lambda calls: calls.timestamp(job.stream, last.seq_num)
            )
            last.check(job.stream, shown)

    def run(self, most_bytes: int = TASK_BYTES) -> Intake:
        """Read and take in the records, as many as `read` returns."""
        began, job = time.monotonic(), self.state.job
        batches = self.read(most_bytes)
        intake = take_in(TaskRecords(job.endpoint, job.stream, batches), self.state)
        size = sum(batch.nbytes for batch in batches)
        return replace(intake, seconds=time.monotonic() - began, size_bytes=size)

    def pack(self) -> bytes:
        """Return the work for a task: the state of a table with many buckets has megabytes."""
        return zlib.compress(pickle.dumps(self), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> TableWork:
        work: TableWork = pickle.loads(zlib.decompress(packed))  # noqa: S301 - our driver made it
        return work


def take_in_ranges(packed: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
    """Take in ranges of several tables; yields an `Intake` or an error for each."""
    works = {work.table: work for work in map(TableWork.unpack, packed)}
    share, records = TASK_BYTES // max(1, len(works)), 0
    calls = {table: partial(work.run, share) for table, work in works.items()}
    for table, result in _side_by_side(calls):
        yield _result(table, result)
        if isinstance(result, Intake) and result.batch:
            records += result.batch.records
    if records > MANY_RECORDS:
        return_memory()


def take_in_alone(batches: Batches, packed: bytes) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow` over one row: take in the records of one table, however long it takes."""
    work = TableWork.unpack(packed)
    for _ in batches:
        try:
            yield _result(work.table, work.run())
        except Exception as error:
            yield _result(work.table, error_from_spark(error))


def _result(table: str, result: Intake | StreamfoldError) -> pa.RecordBatch:
    if isinstance(result, StreamfoldError):
        return result_batch(TaskResult(FAILURE, 0, pickle.dumps((table, result.to_wire()))))
    return result_batch(TaskResult(0, 0, pickle.dumps((table, result))))


def intakes(rows: Sequence[TaskResult]) -> dict[str, Intake | StreamfoldError]:
    """Return the result of each table of a batch."""
    results: dict[str, Intake | StreamfoldError] = {}
    for row in rows:
        table, content = pickle.loads(bytes(row.payload))  # noqa: S301 - our own tasks wrote it
        results[table] = StreamfoldError.from_wire(content) if row.bucket == FAILURE else content
    return results


class _Stall:
    """How long a task has waited for others; computing on a busy machine counts less.

    Counts looks, not seconds: a process that did not run meanwhile has waited for nobody.
    """

    def __init__(self) -> None:
        self._looks = self._idle = 0
        self._used = time.process_time()

    def is_over(self) -> bool:
        """Look at the processor time; called after every `_LOOK` seconds without a result."""
        used = time.process_time()
        self._looks += 1
        self._idle += 1
        if used - self._used > _NO_WORK:
            self._used, self._idle = used, 0
        return self._idle * _LOOK >= STALL_SECONDS or self._looks * _LOOK >= STALL_SECONDS_BUSY


def _side_by_side(
    calls: Mapping[str, Callable[[], T]],
) -> Iterator[tuple[str, T | StreamfoldError]]:
    """Yield the result of each call as it ends; one that holds up the others becomes an error.

    The threads are daemons: one that waits for silent storage does not keep its process alive.
    """
    done: queue.SimpleQueue[tuple[str, T | StreamfoldError]] = queue.SimpleQueue()
    waiting, under_way = deque(calls.items()), set[str]()

    def run() -> None:
        while True:
            try:
                name, call = waiting.popleft()
            except IndexError:
                return
            under_way.add(name)
            try:
                done.put((name, call()))
            except Exception as error:
                done.put((name, error_from_spark(error)))

    def start() -> None:
        for _ in range(min(_AT_ONCE, len(waiting))):
            threading.Thread(target=run, name="tables of a task", daemon=True).start()

    start()
    left, stall = set(calls), _Stall()
    while left:
        try:
            name, result = done.get(timeout=_LOOK)
        except queue.Empty:
            if stall.is_over():
                for name in sorted(left & under_way):
                    left.discard(name)
                    yield name, TableSlowError(f"table {name!r} held up its batch")
                start()  # in place of the threads that are stuck
                stall = _Stall()
            continue
        if name in left:
            left.discard(name)
            stall = _Stall()
            yield name, result
