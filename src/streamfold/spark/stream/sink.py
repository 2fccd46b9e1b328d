"""`write` and `writeStream` of `format("streamfold")`: what Spark calls, and where.

`write` runs in tasks. Exactly-once writes pass through the driver: tasks encode rows and return them as
their commit messages, and `commit` appends them. Spark may call `commit` again for a batch that it saw
fail, and `abort` for one that the stream already has: so `commit` checks before it appends, and `abort`
undoes nothing.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from streamfold.errors import InvalidError, OutcomeUnknownError, TooLargeError
from streamfold.records.columns import warm_up_columns
from streamfold.spark.errors import CarriesErrors, OptionError
from streamfold.spark.stream.client import Connection, RetryDeadline, Streams
from streamfold.spark.stream.exactly_once import MARKER_RESERVE, Transaction
from streamfold.spark.stream.options import SinkOptions
from streamfold.spark.stream.rows import by_stream, check_columns, cut_batches, stage

#: Spark's name for the property with the id of a task's query.
_QUERY_ID = "sql.streaming.queryId"
#: Rows of an Arrow batch from which on loading the compiled kernels pays off.
_KERNEL_ROWS = 5_000
#: Most bytes of a transaction's name, so that its marker fits.
_NAME_MAX = 200


class Staged(WriterCommitMessage):
    """One task's rows on the way to the driver."""

    def __init__(self, rows: bytes, query: str | None) -> None:
        #: An Arrow stream, compressed; see `rows`.
        self.rows = rows
        self.query = query

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.rows).read_all()


class Appended(WriterCommitMessage):
    """How many records a task appended."""

    def __init__(self, records: int) -> None:
        self.records = records


class _Rows(CarriesErrors):
    """Shared by all writers: checked options, and rows as records."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidError("a stream cannot be overwritten: use mode append")
        check_columns(schema.fieldNames(), options)
        name = options.txn_id or ""
        if len(name.encode()) > _NAME_MAX or not name.isprintable():
            raise OptionError("txnId", f"must have at most {_NAME_MAX} bytes, all printable")
        self._options = options

    def _staged(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            if batch.num_rows >= _KERNEL_ROWS:
                warm_up_columns()
            yield stage(batch, self._options)

    def _hand_over(self, batches: Iterator[pa.RecordBatch], query: str | None) -> Staged:
        """Return all rows of a task, in order, as its message to the driver."""
        tables, size = [], 0
        for table in self._staged(batches):
            tables.append(table)
            size += table.nbytes
            self._check_size(size)
        if not tables:
            return Staged(b"", query)
        sink = pa.BufferOutputStream()
        compressed = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, tables[0].schema, options=compressed) as stream:
            for table in tables:
                stream.write_table(table)
        return Staged(sink.getvalue().to_pybytes(), query)

    def _append_once(self, messages: Sequence[Any], name: str, batch: int) -> None:
        """Append the rows of all tasks, by partition, unless the streams have them."""
        found = [message.table() for message in messages if message is not None and message.rows]
        if not found:
            return
        staged = pa.concat_tables(found)
        self._check_size(staged.nbytes)
        with Connection(self._options.endpoint) as connection:
            for stream, rows in by_stream(staged):
                parts = list(cut_batches(rows, MARKER_RESERVE))
                Transaction(connection, stream, name, batch, parts).append()

    def _check_size(self, size: int) -> None:
        if size > self._options.max_batch_bytes:
            raise TooLargeError(
                f"this batch has over {self._options.max_batch_bytes} bytes of rows, and they pass "
                "through the driver: lower maxRecordsPerTrigger of the source, or raise maxBatchBytes"
            )


class StreamAppends(_Rows, DataSourceStreamArrowWriter):
    """`writeStream`: exactly once for each query and batch."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        context = TaskContext.get()
        query = self._options.txn_id or (context and context.getLocalProperty(_QUERY_ID))
        if not query:
            raise OptionError("txnId", "is missing, and Spark gives no id of the query: set it")
        return self._hand_over(iterator, query)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """On the driver; Spark may call it again for a batch that the streams already have."""
        name = next((message.query for message in messages if message is not None), None)
        if name is not None:
            self._append_once(messages, name, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Undo nothing: Spark repeats the batch, and only what is missing is then appended."""


class CommittedAppends(_Rows, DataSourceArrowWriter):
    """`write` with `txnId`: exactly once for each `txnId` and `txnVersion`."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """In a task."""
        return self._hand_over(iterator, self._options.txn_id)

    def commit(self, messages: Sequence[Any]) -> None:
        """On the driver."""
        name, version = self._options.txn_id, self._options.txn_version
        if name is not None:
            self._append_once(messages, name, version)

    def abort(self, messages: Sequence[Any]) -> None:
        """Undo nothing: the same transaction, tried again, appends only what is missing."""


class BatchAppends(_Rows, DataSourceArrowWriter):
    """`write`: tasks append directly, in parallel and at least once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Appended:
        """In a task; rows keep their order within its partition."""
        records = 0
        with Connection(self._options.endpoint) as connection:
            for table in self._staged(iterator):
                for stream, rows in by_stream(table):
                    for parts in cut_batches(rows):
                        self._append(connection, stream, b"".join(parts))
                records += len(table)
        return Appended(records)

    def commit(self, messages: Sequence[Any]) -> None:
        """Do nothing: what was written is durable."""

    def abort(self, messages: Sequence[Any]) -> None:
        """Undo nothing: streams are append-only."""

    def _append(self, connection: Connection, stream: str, raw: bytes) -> None:
        deadline = RetryDeadline(connection.endpoint.retry_timeout)
        while True:
            try:
                Streams(connection).append(stream, raw)
            except OutcomeUnknownError as error:
                deadline.wait(connection.endpoint, error)
            else:
                return
