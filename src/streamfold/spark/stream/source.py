"""`format("streamfold")`: its entry points, and where Spark calls them.

Spark creates and pickles a `StreamfoldSource` in short-lived Python processes on the driver. The
readers' `read` runs in tasks. So only the stream reader holds a connection: it stays in one process
on the driver for as long as its query.
"""

# mypy: disallow-subclassing-any=False
# mypy does not follow Spark's base classes.

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from streamfold.errors import InvalidError
from streamfold.spark.errors import CarriesErrors
from streamfold.spark.stream.client import Endpoint, ServerConnection, StreamCalls, answer_timeout
from streamfold.spark.stream.options import (
    EARLIEST,
    LATEST,
    TASK_RECORDS,
    TASKS,
    SourceOptions,
    parse_sink,
    parse_source,
    parse_streaming,
)
from streamfold.spark.stream.positions import Offset, StreamPositions, backlog, limit_records, split
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.rows import arrow_schema, record_batch, spark_schema
from streamfold.spark.stream.stored import OpenBasin, StoredBasin, open_basin, read_stored


@cache
def _freeze_modules() -> None:
    """Exclude everything loaded so far from garbage collection.

    Spark runs the garbage collector after every call and every task. Scanning all modules each time
    would be most of a small task's Python cost.
    """
    gc.freeze()


class StreamfoldSource(CarriesErrors, DataSource):
    """Reads from and appends to streams of any S2 endpoint."""

    @classmethod
    def name(cls) -> str:
        return "streamfold"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._raw = dict(options)

    def schema(self) -> StructType:
        return spark_schema(parse_source(self._raw).columns)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(_with_schema(parse_source(self._raw), schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        return StreamReader(_with_schema(parse_streaming(self._raw), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        # Imported here because every read starts processes that import this module but not the
        # sink.
        from streamfold.spark.stream.sink import BatchAppends, CommittedAppends

        options = parse_sink(self._raw)
        kind = BatchAppends if options.txn_id is None else CommittedAppends
        return kind(options, schema, overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from streamfold.spark.stream.sink import StreamAppends

        return StreamAppends(parse_sink(self._raw), schema, overwrite)


def _with_schema(options: SourceOptions, schema: StructType) -> SourceOptions:
    """Return the options. Raises InvalidError if `schema`, perhaps the user's, does not fit."""
    own = spark_schema(options.columns)
    if schema != own:
        raise InvalidError(
            f"the schema {schema.simpleString()} is not that of the rows, which is "
            f"{own.simpleString()}: give none, and choose columns with the option columns"
        )
    return options


class RangePartition(InputPartition):
    """One task's part of a stream."""

    def __init__(self, part: Range) -> None:
        super().__init__(part)
        self.part = part


class _RangeReader(CarriesErrors):
    """Base of batch and streaming readers: a task reads one range."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one partition's records in Arrow batches of a few megabytes. Runs in a task."""
        if not isinstance(partition, RangePartition):
            return  # Spark creates an empty partition if there is nothing to read
        part, columns = partition.part, self._options.columns
        _freeze_modules()
        schema = arrow_schema(columns)
        options = Wanted("headers" in columns, "body" in columns, self._options.fail_on_data_loss)
        origin = self._options.origin
        if isinstance(origin, StoredBasin):
            pieces = read_stored(origin, part, options)
        else:
            pieces = read_range(origin, part, options)
        for piece in pieces:
            yield record_batch(part.stream, piece, schema)

    def _parts(self, start: Offset, end: Offset) -> list[InputPartition]:
        options, ranges = self._options, backlog(start, end)
        least = options.min_partitions or min(TASKS, sum(map(len, ranges)) // TASK_RECORDS + 1)
        parts = split(ranges, least, options.max_records_per_partition)
        return [RangePartition(part) for part in parts]


class BatchReader(_RangeReader, DataSourceReader):
    """`spark.read`: everything from start to end, both fixed when the query is planned."""

    def partitions(self) -> list[InputPartition]:
        """Plan the partitions. Spark calls this on the driver, once per query."""
        _freeze_modules()
        with _open_streams(self._options.origin) as streams:
            positions = StreamPositions(self._options, streams)
            start = positions.starts(EARLIEST)
            return self._parts(start, positions.ends(start))


class StreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`. Called on the driver, in one process per query, except for `read`."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._connection: ServerConnection | None = None
        self._initial: Offset | None = None
        self._target: Offset | None = None
        #: Monotonic time when the last batch was planned.
        self._triggered: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for tasks, without the connection."""
        return {**self.__dict__, "_connection": None}

    @contextmanager
    def _positions(self) -> Iterator[StreamPositions]:
        origin = self._options.origin
        if isinstance(origin, StoredBasin):
            # Reopened for each call, because an open basin does not see later records.
            with open_basin(origin) as basin:
                yield StreamPositions(self._options, basin)
            return
        if self._connection is None:
            self._connection = ServerConnection(origin, answer_timeout(origin))
        yield StreamPositions(self._options, StreamCalls(self._connection))

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the same offset every time: Spark calls this more than once."""
        if self._initial is None:
            with self._positions() as positions:
                self._initial = positions.starts(LATEST)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return one limit, since Spark accepts only one. `latestOffset` applies the others."""
        options = self._options
        if options.max_records_per_trigger is not None:
            return ReadMaxRows(options.max_records_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_records_per_trigger is not None:
            return ReadMinRows(options.min_records_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        with self._positions() as positions:
            return self._latest(positions, start, limit)

    def _latest(self, positions: StreamPositions, begun: Offset, limit: ReadLimit) -> Offset:
        end = positions.tails(begun)
        start = positions.with_new(begun, end)
        if self._target is not None:
            end = {s: min(end[s], target) for s, target in self._target.items() if s in end} | {
                stream: position for stream, position in start.items() if stream not in self._target
            }
        if isinstance(limit, ReadAllAvailable):
            return end
        if self._target is None and self._awaits_more(start, end):
            return begun
        if isinstance(limit, ReadMaxRows):
            end = limit_records(start, end, limit.max_rows)
        if self._options.max_bytes_per_trigger is not None:
            end = _limit_bytes(positions, start, end, self._options.max_bytes_per_trigger)
        return end

    def _awaits_more(self, start: Offset, end: Offset) -> bool:
        """Return whether to wait because too few records are pending and the last batch is recent."""
        options, now = self._options, time.monotonic()
        least, delay = options.min_records_per_trigger, options.max_trigger_delay.total_seconds()
        records = sum(map(len, backlog(start, end)))
        recent = self._triggered is not None and now - self._triggered < delay
        if least is not None and records < least and recent:
            return True
        if records:
            self._triggered = now
        return False

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the query's end at the current tails, leaving later records to the next run."""
        with self._positions() as positions:
            self._target = positions.tails({})

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        with self._positions() as positions:
            return positions.tails({})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        with self._positions() as positions:
            return self._parts(positions.with_new(start, end), end)

    def commit(self, end: Offset) -> None:
        """Do nothing: Spark's checkpoint stores the position, and streams keep their records."""

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()


@contextmanager
def _open_streams(origin: Endpoint | StoredBasin) -> Iterator[StreamCalls | OpenBasin]:
    if isinstance(origin, StoredBasin):
        with open_basin(origin) as basin:
            yield basin
    else:
        with ServerConnection(origin, answer_timeout(origin)) as connection:
            yield StreamCalls(connection)


def _limit_bytes(positions: StreamPositions, start: Offset, end: Offset, limit: int) -> Offset:
    """Return the offset after about `limit` bytes, estimated from the size of the next records."""
    waiting = backlog(start, end)
    total = sum(map(len, waiting))
    size = sum(positions.mean_size(part.stream, part.start) * len(part) for part in waiting)
    # A size of 0 means that nothing is pending, or that all of it is gone, which tasks report.
    return limit_records(start, end, int(limit / (size / total))) if size else end
