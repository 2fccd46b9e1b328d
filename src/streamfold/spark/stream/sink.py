"""`write` and `writeStream` of `format("streamfold")`, and where Spark calls their methods.

`write` runs in tasks. Exactly-once writes pass through the driver: tasks return encoded rows as
their commit messages, and `commit` appends them. Spark may call `commit` again for a batch that it
saw fail, and `abort` for a batch that is already in the stream. So `commit` checks before it
appends, and `abort` undoes nothing.
"""

# mypy: disallow-subclassing-any=False
# mypy does not follow Spark's base classes.

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
from streamfold.spark.errors import CarriesErrors, OptionError
from streamfold.spark.stream.client import RetryDeadline, ServerConnection, StreamCalls
from streamfold.spark.stream.exactly_once import MARKER_RESERVE, Transaction
from streamfold.spark.stream.options import SinkOptions
from streamfold.spark.stream.rows import by_stream, check_columns, cut_batches, stage

#: Spark's local property that holds the id of a task's query.
_QUERY_ID = "sql.streaming.queryId"
#: Maximum bytes of a transaction name, so that its marker fits.
_NAME_MAX = 200


class StagedRows(WriterCommitMessage):
    """One task's rows on the way to the driver."""

    def __init__(self, rows: bytes, query: str | None) -> None:
        #: A compressed Arrow stream: see `rows`.
        self.rows = rows
        self.query = query

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.rows).read_all()


class SinkCommitMessage(WriterCommitMessage):
    """The number of records that a task appended."""

    def __init__(self, records: int) -> None:
        self.records = records


class _Rows(CarriesErrors):
    """Base of all writers: checks options and encodes rows as records."""

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
            yield stage(batch, self._options)

    def _hand_over(self, batches: Iterator[pa.RecordBatch], query: str | None) -> StagedRows:
        """Return all of a task's rows, in order, as its commit message to the driver."""
        tables, size = [], 0
        for table in self._staged(batches):
            tables.append(table)
            size += table.nbytes
            self._check_size(size)
        if not tables:
            return StagedRows(b"", query)
        sink = pa.BufferOutputStream()
        compressed = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(sink, tables[0].schema, options=compressed) as stream:
            for table in tables:
                stream.write_table(table)
        return StagedRows(sink.getvalue().to_pybytes(), query)

    def _append_once(self, messages: Sequence[Any], name: str, batch: int) -> None:
        """Append all tasks' rows in partition order, except rows already in the streams."""
        tables = [message.table() for message in messages if message is not None and message.rows]
        if not tables:
            return
        staged = pa.concat_tables(tables)
        self._check_size(staged.nbytes)
        with ServerConnection(self._options.endpoint) as connection:
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
    """`writeStream`: appends each batch of each query exactly once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Encode a task's rows for the driver. Spark calls this in a task."""
        context = TaskContext.get()
        query = self._options.txn_id or (context and context.getLocalProperty(_QUERY_ID))
        if not query:
            raise OptionError("txnId", "is missing, and Spark gives no id of the query: set it")
        return self._hand_over(iterator, query)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Append the batch.

        Spark calls this on the driver, possibly again for a batch that is already in the streams.
        """
        name = next((message.query for message in messages if message is not None), None)
        if name is not None:
            self._append_once(messages, name, batchId)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Undo nothing: Spark retries the batch, which then appends only missing rows."""


class CommittedAppends(_Rows, DataSourceArrowWriter):
    """`write` with `txnId`: appends exactly once per `txnId` and `txnVersion`."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedRows:
        """Encode a task's rows for the driver. Spark calls this in a task."""
        return self._hand_over(iterator, self._options.txn_id)

    def commit(self, messages: Sequence[Any]) -> None:
        """Append the rows. Spark calls this on the driver."""
        name, version = self._options.txn_id, self._options.txn_version
        if name is not None:
            self._append_once(messages, name, version)

    def abort(self, messages: Sequence[Any]) -> None:
        """Undo nothing: a retry of the transaction appends only missing rows."""


class BatchAppends(_Rows, DataSourceArrowWriter):
    """`write`: tasks append directly, in parallel and at least once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SinkCommitMessage:
        """Append rows, keeping their order within the partition. Spark calls this in a task."""
        records = 0
        with ServerConnection(self._options.endpoint) as connection:
            for table in self._staged(iterator):
                for stream, rows in by_stream(table):
                    for parts in cut_batches(rows):
                        self._append(connection, stream, b"".join(parts))
                records += len(table)
        return SinkCommitMessage(records)

    def commit(self, messages: Sequence[Any]) -> None:
        """Do nothing: the appended rows are already durable."""

    def abort(self, messages: Sequence[Any]) -> None:
        """Undo nothing: streams are append-only."""

    def _append(self, connection: ServerConnection, stream: str, raw: bytes) -> None:
        deadline = RetryDeadline(connection.endpoint.retry_timeout)
        while True:
            try:
                StreamCalls(connection).append(stream, raw)
            except OutcomeUnknownError as error:
                deadline.wait(connection.endpoint, error)
            else:
                return
