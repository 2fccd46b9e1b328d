"""`format("streamfold")`: what Spark calls, and where.

Spark makes a `StreamfoldSource` on the driver, in short-lived Python processes, and pickles it; the
readers' `read` runs in tasks. So only the stream reader holds a connection: it lives in one process on
the driver as long as its query.
"""

# mypy: disallow-subclassing-any=False
# The base classes are Spark's, which the checker does not follow.

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
from streamfold.records.columns import warm_up_columns
from streamfold.spark.errors import CarriesErrors
from streamfold.spark.stream.client import Connection, Endpoint, Streams, answer_timeout
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

#: Records from which on loading the compiled kernels, a second per worker, pays off.
_KERNEL_RECORDS = 50_000


@cache
def _freeze_modules(kernels: bool = False) -> None:
    """Exclude everything that this process has loaded from garbage collection.

    Spark collects garbage after every call and every task. Scanning all modules each time is most of
    the cost of a small task in Python, and with the kernels' compiler a fifth of a large one's.
    """
    gc.freeze()


class StreamfoldSource(CarriesErrors, DataSource):
    """Reads and appends to streams of any S2 endpoint."""

    @classmethod
    def name(cls) -> str:
        return "streamfold"

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    def schema(self) -> StructType:
        return spark_schema(parse_source(self._given).columns)

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(_with_schema(parse_source(self._given), schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        return StreamReader(_with_schema(parse_streaming(self._given), schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        # Here, because every read starts processes that import this module and do not need the sink.
        from streamfold.spark.stream.sink import BatchAppends, CommittedAppends

        options = parse_sink(self._given)
        kind = BatchAppends if options.txn_id is None else CommittedAppends
        return kind(options, schema, overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from streamfold.spark.stream.sink import StreamAppends

        return StreamAppends(parse_sink(self._given), schema, overwrite)


def _with_schema(options: SourceOptions, schema: StructType) -> SourceOptions:
    """Return the options if rows have this schema, which may be the user's; raise otherwise."""
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
    """Shared by batch and streaming reads: a task reads one range."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: yield the records of one partition, as Arrow batches of a few megabytes."""
        if not isinstance(partition, RangePartition):
            return  # Spark makes an empty partition if there is nothing to read
        part, columns = partition.part, self._options.columns
        if len(part) >= _KERNEL_RECORDS:
            warm_up_columns()
        _freeze_modules(len(part) >= _KERNEL_RECORDS)
        schema = arrow_schema(columns)
        wanted = Wanted("headers" in columns, "body" in columns, self._options.fail_on_data_loss)
        origin = self._options.origin
        if isinstance(origin, StoredBasin):
            found_in = read_stored(origin, part, wanted)
        else:
            found_in = read_range(origin, part, wanted)
        for found in found_in:
            yield record_batch(part.stream, found, schema)

    def _parts(self, start: Offset, end: Offset) -> list[InputPartition]:
        options, ranges = self._options, backlog(start, end)
        least = options.min_partitions or min(TASKS, sum(map(len, ranges)) // TASK_RECORDS + 1)
        parts = split(ranges, least, options.max_records_per_partition)
        return [RangePartition(part) for part in parts]


class BatchReader(_RangeReader, DataSourceReader):
    """`spark.read`: everything from the start to the end, both fixed when the query is planned."""

    def partitions(self) -> list[InputPartition]:
        """On the driver, once per query."""
        _freeze_modules()
        with _open_streams(self._options.origin) as streams:
            positions = StreamPositions(self._options, streams)
            start = positions.starts(EARLIEST)
            return self._parts(start, positions.ends(start))


class StreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`: all but `read` is called on the driver, in one process per query."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._connection: Connection | None = None
        self._initial: Offset | None = None
        self._target: Offset | None = None
        #: When the last batch began, by the monotonic clock.
        self._triggered: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to tasks: all but the connection."""
        return {**self.__dict__, "_connection": None}

    @contextmanager
    def _positions(self) -> Iterator[StreamPositions]:
        origin = self._options.origin
        if isinstance(origin, StoredBasin):
            # Opened for each call: one that is open does not see later records.
            with open_basin(origin) as basin:
                yield StreamPositions(self._options, basin)
            return
        if self._connection is None:
            self._connection = Connection(origin, answer_timeout(origin))
        yield StreamPositions(self._options, Streams(self._connection))

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return the same offset each time: Spark calls it more than once."""
        if self._initial is None:
            with self._positions() as positions:
                self._initial = positions.starts(LATEST)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return one of the limits, since Spark takes only one; `latestOffset` applies the others."""
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
        """Return whether too few records wait and the last batch is not too long ago."""
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
        """Leave records that arrive from now on to the next run."""
        with self._positions() as positions:
            self._target = positions.tails({})

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        with self._positions() as positions:
            return positions.tails({})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        with self._positions() as positions:
            return self._parts(positions.with_new(start, end), end)

    def commit(self, end: Offset) -> None:
        """Do nothing: Spark's checkpoint has the position, and streams keep their records."""

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()


@contextmanager
def _open_streams(origin: Endpoint | StoredBasin) -> Iterator[Streams | OpenBasin]:
    if isinstance(origin, StoredBasin):
        with open_basin(origin) as basin:
            yield basin
    else:
        with Connection(origin, answer_timeout(origin)) as connection:
            yield Streams(connection)


def _limit_bytes(positions: StreamPositions, start: Offset, end: Offset, limit: int) -> Offset:
    """Return an offset after about `limit` bytes, judging by the size of the next records."""
    waiting = backlog(start, end)
    total = sum(map(len, waiting))
    size = sum(positions.mean_size(found.stream, found.start) * len(found) for found in waiting)
    # Without a byte nothing waits, or all of it is gone, which the tasks report.
    return limit_records(start, end, int(limit / (size / total))) if size else end
