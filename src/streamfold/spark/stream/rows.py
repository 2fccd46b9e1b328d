"""Converts stream records to Spark rows, and DataFrame rows to records to append.

A staged table has one row per record: `stream`, `record` (its bytes in an AppendInput), `metered`
(bytes as limits count them), and `key` if rows are to be ordered. A run of records is one slice of
memory, whatever its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streamfold.errors import InvalidError
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.columns import (
    AppendColumns,
    BytesColumn,
    Columns,
    EncodedRecords,
    HeaderColumn,
    encode_columns,
)
from streamfold.spark.errors import OptionError
from streamfold.spark.stream.options import SinkOptions

#: Maximum milliseconds in a Spark timestamp, which counts microseconds.
TIMESTAMP_MAX = (2**63 - 1) // 1000

_HEADER = StructType(
    [StructField("name", BinaryType(), False), StructField("value", BinaryType(), False)]
)
_SPARK = {
    "stream": StructField("stream", StringType(), False),
    "seq_num": StructField("seq_num", LongType(), False),
    "timestamp": StructField("timestamp", TimestampType(), True),
    "headers": StructField("headers", ArrayType(_HEADER, False), False),
    "body": StructField("body", BinaryType(), False),
}
_ARROW_HEADER = pa.struct(
    [pa.field("name", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)]
)
_ARROW_HEADERS = pa.list_(pa.field("element", _ARROW_HEADER, nullable=False))
_ARROW_TIMESTAMP = pa.timestamp("us", "UTC")
_ARROW = {
    "stream": pa.field("stream", pa.string(), nullable=False),
    "seq_num": pa.field("seq_num", pa.int64(), nullable=False),
    "timestamp": pa.field("timestamp", _ARROW_TIMESTAMP, nullable=True),
    "headers": pa.field("headers", _ARROW_HEADERS, nullable=False),
    "body": pa.field("body", pa.binary(), nullable=False),
}
STREAM, RECORD, METERED, KEY = "stream", "record", "metered", "key"
_COLUMNS = ("stream", "body", "headers", "timestamp")


def spark_schema(columns: Sequence[str]) -> StructType:
    return StructType([_SPARK[name] for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([_ARROW[name] for name in columns])


def record_batch(stream: str, columns: Columns, schema: pa.Schema) -> pa.RecordBatch:
    """Build Spark rows without copying header or body bytes."""
    arrays = [_ARRAYS[name](stream, columns) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _stream(stream: str, columns: Columns) -> Any:
    return pa.repeat(pa.scalar(stream, pa.string()), len(columns.seq_nums))


def _seq_num(stream: str, columns: Columns) -> Any:
    return pa.array(columns.seq_nums)


def _timestamp(stream: str, columns: Columns) -> Any:
    """Return exact timestamps, or null for those that Spark cannot represent."""
    reachable = columns.timestamps <= np.uint64(TIMESTAMP_MAX)
    micros = columns.timestamps.astype(np.int64) * np.int64(1000)
    mask = None if reachable.all() else ~reachable
    return pa.array(micros, pa.int64(), mask=mask).view(_ARROW_TIMESTAMP)


def _headers(stream: str, columns: Columns) -> Any:
    headers = columns.headers
    if headers is None:
        raise ValueError("the headers were not read")
    pairs = pa.StructArray.from_arrays(
        [_binary(headers.names), _binary(headers.values)], fields=list(_ARROW_HEADER)
    )
    return pa.Array.from_buffers(
        _ARROW_HEADERS,
        len(headers.offsets) - 1,
        [None, pa.py_buffer(headers.offsets)],
        children=[pairs],
    )


def _body(stream: str, columns: Columns) -> Any:
    if columns.bodies is None:
        raise ValueError("the bodies were not read")
    return _binary(columns.bodies)


def _binary(column: BytesColumn) -> Any:
    offsets, content = column
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


_ARRAYS = {
    "stream": _stream,
    "seq_num": _seq_num,
    "timestamp": _timestamp,
    "headers": _headers,
    "body": _body,
}


def check_columns(names: list[str], options: SinkOptions) -> None:
    """Reject a DataFrame whose columns do not make up records."""
    allowed = {*_COLUMNS, options.order_by}
    for name in names:
        if name not in allowed:
            raise InvalidError(
                f"column {name!r} is not part of a record: drop it; known are {', '.join(_COLUMNS)}"
            )
    if "body" not in names:
        raise InvalidError("the rows have no column 'body': rename one to it")
    if options.stream is None and "stream" not in names:
        raise OptionError("stream", "is missing, and the rows have no column 'stream': give either")
    if options.order_by is not None and options.order_by not in names:
        raise OptionError(
            "orderBy", f"names {options.order_by!r}, which is not a column of the rows"
        )


def stage(batch: pa.RecordBatch, options: SinkOptions) -> pa.Table:
    """Encode rows as records in a staged table."""
    table = pa.Table.from_batches([batch])
    encoded = encode_columns(_append_columns(batch))
    columns = {
        STREAM: _streams(table, options.stream),
        RECORD: _records(encoded),
        METERED: pa.array(encoded.metered),
    }
    _check_sizes(encoded)
    if options.order_by is not None:
        columns[KEY] = table[options.order_by]
    return pa.table(columns)


def by_stream(staged: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Yield each stream's rows, sorted by key if there is one, else in arrival order."""
    for stream in sorted(pc.unique(staged[STREAM]).to_pylist()):
        rows = staged.filter(pc.equal(staged[STREAM], stream))
        if KEY in rows.column_names:
            rows = rows.take(pc.sort_indices(rows[KEY]))
        yield stream, rows.combine_chunks()


def cut_batches(rows: pa.Table, reserve: int = 0) -> Iterator[list[bytes]]:
    """Yield runs of records that each fit one append with `reserve` metered bytes to spare.

    Each run is two pieces of an AppendInput: all records but the last, and the last record.
    """
    metered = rows[METERED].to_numpy()
    sums = np.concatenate(([0], np.cumsum(metered)))
    records = rows[RECORD].combine_chunks() if len(rows) else pa.array([], pa.large_binary())
    start = 0
    while start < len(rows):
        room = sums[start] + BATCH_BYTES_MAX - reserve
        end = min(int(np.searchsorted(sums, room, "right")) - 1, start + BATCH_RECORDS_MAX)
        if end <= start:
            raise InvalidError(
                f"a record of {metered[start]} metered bytes is too large: at most "
                f"{BATCH_BYTES_MAX - reserve} are possible here"
            )
        yield [_bytes(records, start, end - 1), _bytes(records, end - 1, end)]
        start = end


def _bytes(records: Any, start: int, end: int) -> bytes:
    """Return the contiguous bytes of a run of values."""
    _, offsets, data = records.buffers()
    edges = np.frombuffer(offsets, np.int64)[records.offset :]
    return bytes(data[int(edges[start]) : int(edges[end])]) if data is not None else b""


def _records(encoded: EncodedRecords) -> Any:
    buffers = [None, pa.py_buffer(encoded.offsets), pa.py_buffer(encoded.raw)]
    return pa.Array.from_buffers(pa.large_binary(), len(encoded.metered), buffers)


def _streams(table: pa.Table, stream: str | None) -> Any:
    if stream is not None:
        return pa.repeat(pa.scalar(stream, pa.string()), len(table))
    names = table[STREAM].cast(pa.string())
    if names.null_count:
        raise InvalidError("a row has no stream: fill the column 'stream', or give the option")
    return names


def _append_columns(batch: pa.RecordBatch) -> AppendColumns:
    names = batch.schema.names
    stamps = batch.column("timestamp") if "timestamp" in names else None
    timestamps, stamped = _timestamps(stamps, batch.num_rows)
    headers = batch.column("headers") if "headers" in names else None
    return AppendColumns(
        timestamps,
        stamped,
        _header_column(headers, batch.num_rows),
        _bytes_column(batch.column("body")),
    )


def _timestamps(column: Any, rows: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return milliseconds and a mask of rows that have them. Accepts timestamps and integers."""
    if column is None:
        return np.zeros(rows, np.uint64), np.zeros(rows, np.bool_)
    if pa.types.is_timestamp(column.type):
        column = pc.floor_temporal(column, unit="millisecond").cast(pa.timestamp("ms", "UTC"))
    elif not pa.types.is_integer(column.type):
        raise InvalidError(f"column 'timestamp' is {column.type}: make it a timestamp or a bigint")
    stamped = column.is_valid().to_numpy(zero_copy_only=False)
    millis = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    if (millis < 0).any():
        raise InvalidError(
            f"timestamp {int(millis.min())} ms is before 1970: records cannot have it"
        )
    return millis.astype(np.uint64), stamped


def _header_column(column: Any, rows: int) -> HeaderColumn:
    if column is None:
        nothing = BytesColumn(np.zeros(1, np.int32), np.zeros(0, np.uint8))
        return HeaderColumn(np.zeros(rows + 1, np.int32), nothing, nothing)
    if not pa.types.is_list(column.type) or not pa.types.is_struct(column.type.value_type):
        raise InvalidError(
            f"column 'headers' is {column.type}: make it an array of structs of name and value"
        )
    counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    pairs = column.flatten()
    names, values = (_bytes_column(pc.struct_field(pairs, part)) for part in ("name", "value"))
    if (np.diff(names.offsets) == 0).any():
        raise InvalidError(
            "a header has no name, which would make its record a command: name all headers"
        )
    return HeaderColumn(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), names, values)


def _bytes_column(column: Any) -> BytesColumn:
    """Return a binary or text column's buffers, from its first row on. Nulls become empty."""
    if not (pa.types.is_binary(column.type) or pa.types.is_string(column.type)):
        raise InvalidError(
            f"a column of {column.type} cannot be bytes: cast it to binary or string"
        )
    column = column.cast(pa.binary())
    if column.null_count:
        column = column.fill_null(b"")
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return BytesColumn(edges - edges[0], content[edges[0] : edges[-1]])


def _check_sizes(encoded: EncodedRecords) -> None:
    if len(encoded.metered) and (largest := int(encoded.metered.max())) > BATCH_BYTES_MAX:
        raise InvalidError(
            f"a record of {largest} metered bytes is too large: at most {BATCH_BYTES_MAX} are possible"
        )
