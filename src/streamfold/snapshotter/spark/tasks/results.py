"""Task results: reports and Arrow data as bytes, in rows of three columns.

Spark neither knows nor converts the columns of the table: types that it lacks pass unchanged,
columns can be added while a query runs, and a shuffle moves one row for thousands of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from streamfold._native import trim_memory
from streamfold.archive.write.artifacts import WrittenPart
from streamfold.errors import StreamfoldError

#: The schema `plans.TASK_RESULTS`.
_ARROW = pa.schema([("bucket", pa.int32()), ("seq_num", pa.int64()), ("payload", pa.binary())])

#: Instead of a bucket: a report to the driver, or the error that ended the task.
REPORT, FAILURE = -1, -2

Batches: TypeAlias = Iterable[pa.RecordBatch]


class TaskResult(NamedTuple):
    """One row: changes of a bucket, a written part, or a report."""

    bucket: int
    seq_num: int
    payload: Any

    @classmethod
    def of_part(cls, bucket: int, written: WrittenPart) -> TaskResult:
        return cls(bucket, 0, msgspec.json.encode(written))


def written_parts(rows: Sequence[Any]) -> list[WrittenPart]:
    """Return the parts that tasks wrote, by bucket; raises the error of a failed task."""
    raise_task_errors(rows)
    ordered = sorted(rows, key=lambda row: row.bucket)
    return [msgspec.json.decode(bytes(row.payload), type=WrittenPart) for row in ordered]


def pack(table: pa.Table) -> bytes:
    """Encode a table, including its schema."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpack(payload: Any) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(payload)).read_all()


def task_results(batches: Batches) -> Iterator[TaskResult]:
    """Yield the rows that Spark passes to a task."""
    for batch in batches:
        columns = (batch.column(name) for name in _ARROW.names)
        for bucket, seq_num, payload in zip(*columns, strict=True):
            yield TaskResult(bucket.as_py(), seq_num.as_py(), payload.as_buffer())


def result_batch(*results: TaskResult) -> pa.RecordBatch:
    """Return rows for Spark."""
    columns = zip(*results, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, kind) for values, kind in zip(columns, _ARROW.types, strict=True)],
        schema=_ARROW,
    )


def task(work: Callable[..., Iterator[TaskResult]]) -> Callable[..., Iterator[pa.RecordBatch]]:
    """Make `work` a function for `mapInArrow` that returns our errors as results.

    Spark would reduce them to text, and retry what cannot succeed.
    """

    @wraps(work)
    def run(batches: Batches, **options: Any) -> Iterator[pa.RecordBatch]:
        try:
            for result in work(batches, **options):
                yield result_batch(result)
        except StreamfoldError as error:
            yield result_batch(TaskResult(FAILURE, 0, error.to_wire().encode()))

    return run


def raise_task_errors(rows: Iterable[Any]) -> None:
    """Raise the first error that ended a task."""
    for row in rows:
        if row.bucket == FAILURE:
            raise StreamfoldError.from_wire(bytes(row.payload).decode())


def return_memory() -> None:
    """Return unused memory to the system: all tables share a few Python workers, which stay."""
    pa.default_memory_pool().release_unused()
    trim_memory()
