"""What tasks and driver exchange: Arrow data as bytes in rows of three columns.

Spark neither knows nor converts the columns of the table: types that it lacks pass unchanged, columns
may be added while a query runs, and a shuffle moves one row for thousands of changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from streamfold.errors import StreamfoldError

#: Schema of a DataFrame of task results.
TASK_RESULTS = "bucket int, seq_num long, payload binary"
_ARROW = pa.schema([("bucket", pa.int32()), ("seq_num", pa.int64()), ("payload", pa.binary())])

#: Not buckets: a task's report to the driver, and an error that ended it.
REPORT, FAILURE = -1, -2

Batches: TypeAlias = Iterable[pa.RecordBatch]


class TaskResult(NamedTuple):
    """One row: changes of a bucket, or a report."""

    bucket: int
    seq_num: int
    payload: bytes


def pack(table: pa.Table) -> bytes:
    """Encode a table as bytes, including its schema."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpack(payload: Any) -> pa.Table:
    """Decode the table."""
    return pa.ipc.open_stream(pa.py_buffer(payload)).read_all()


def task_results(batches: Batches) -> Iterator[TaskResult]:
    """Yield the rows that Spark passes to a task."""
    for batch in batches:
        columns = (batch.column(name) for name in ("bucket", "seq_num", "payload"))
        for bucket, seq_num, payload in zip(*columns, strict=True):
            yield TaskResult(bucket.as_py(), seq_num.as_py(), payload.as_buffer())


def task(work: Callable[..., Iterator[TaskResult]]) -> Callable[..., Iterator[pa.RecordBatch]]:
    """Make `work` a function for `mapInArrow`; our errors become task results, with all fields.

    Spark would turn them into text, and retry what cannot succeed.
    """

    @wraps(work)
    def run(batches: Batches, **given: Any) -> Iterator[pa.RecordBatch]:
        try:
            for task_result in work(batches, **given):
                yield result_batch([task_result])
        except StreamfoldError as error:
            yield result_batch([TaskResult(FAILURE, 0, error.to_wire().encode())])

    return run


def raise_task_errors(rows: Iterable[Any]) -> None:
    """Raise the first error that ended a task."""
    for row in rows:
        if row.bucket == FAILURE:
            raise StreamfoldError.from_wire(bytes(row.payload).decode())


def result_batch(results: Sequence[TaskResult]) -> pa.RecordBatch:
    """Make the rows that Spark would pass to a task."""
    columns = zip(*results, strict=True) if results else ((), (), ())
    return pa.RecordBatch.from_arrays(
        [pa.array(values, kind) for values, kind in zip(columns, _ARROW.types, strict=True)],
        schema=_ARROW,
    )
