"""What travels between tasks and driver: Arrow data as bytes in rows of three columns.

Spark neither knows nor converts the columns of the table: types that it lacks pass unharmed, columns
may come in while a query runs, and a shuffle moves one row for thousands of changes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from streamfold.errors import StreamfoldError

#: Of a data frame of parcels.
TASK_RESULTS = "bucket int, seq_num long, payload binary"
_ARROW = pa.schema([("bucket", pa.int32()), ("seq_num", pa.int64()), ("payload", pa.binary())])

#: Buckets that are none: what a task tells the driver, and an error that ended it.
REPORT, FAILURE = -1, -2

Batches: TypeAlias = Iterable[pa.RecordBatch]


class TaskResult(NamedTuple):
    """One row: changes of a bucket, or a report."""

    bucket: int
    seq_num: int
    payload: bytes


def pack(table: pa.Table) -> bytes:
    """A table as bytes, its schema included."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def unpack(payload: Any) -> pa.Table:
    """The table again."""
    return pa.ipc.open_stream(pa.py_buffer(payload)).read_all()


def task_results(batches: Batches) -> Iterator[TaskResult]:
    """The rows that Spark hands to a task."""
    for batch in batches:
        columns = (batch.column(name) for name in ("bucket", "seq_num", "payload"))
        for bucket, seq_num, payload in zip(*columns, strict=True):
            yield TaskResult(bucket.as_py(), seq_num.as_py(), payload.as_buffer())


def task(work: Callable[..., Iterator[TaskResult]]) -> Callable[..., Iterator[pa.RecordBatch]]:
    """Make `work` a function for `mapInArrow`; an error of ours becomes a parcel, kept whole.

    Spark would make text of it, and try again what cannot succeed.
    """

    @wraps(work)
    def run(batches: Batches, **given: Any) -> Iterator[pa.RecordBatch]:
        try:
            for task_result in work(batches, **given):
                yield _row(task_result)
        except StreamfoldError as error:
            yield _row(TaskResult(FAILURE, 0, pickle.dumps(_error_text(error))))

    return run


def raise_task_errors(rows: Iterable[Any]) -> None:
    """Raise the first error that a task ended with."""
    for row in rows:
        if row.bucket == FAILURE:
            kind, fields = pickle.loads(row.payload)  # noqa: S301 - written by our own tasks
            raise _rebuilt(kind, fields)


def _row(task_result: TaskResult) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([value], kind) for value, kind in zip(task_result, _ARROW.types, strict=True)],
        schema=_ARROW,
    )


def _error_text(error: StreamfoldError) -> tuple[type[StreamfoldError], dict[str, Any]]:
    # Errors have constructors of their own, so they do not pickle by themselves.
    return type(error), dict(error.__dict__)


def _rebuilt(kind: type[StreamfoldError], fields: dict[str, Any]) -> StreamfoldError:
    error = kind.__new__(kind)
    Exception.__init__(error, fields["message"])
    error.__dict__.update(fields)
    return error
