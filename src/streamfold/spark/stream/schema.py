"""The schema of a stream's rows in Spark and in Arrow; both must agree, including nullability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streamfold.records.columns import BytesColumn, Columns

#: The largest milliseconds that Spark's timestamps, which count microseconds, can hold.
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


def spark_schema(columns: Sequence[str]) -> StructType:
    return StructType([_SPARK[name] for name in columns])


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([_ARROW[name] for name in columns])


def record_batch(stream: str, found: Columns, schema: pa.Schema) -> pa.RecordBatch:
    """Make rows for Spark without copying the columns."""
    arrays = [_ARRAYS[name](stream, found) for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _stream(stream: str, found: Columns) -> Any:
    return pa.repeat(pa.scalar(stream, pa.string()), len(found.seq_nums))


def _seq_num(stream: str, found: Columns) -> Any:
    return pa.array(found.seq_nums)


def _timestamp(stream: str, found: Columns) -> Any:
    """Keep milliseconds exactly; those that Spark cannot express become null."""
    reachable = found.timestamps <= np.uint64(TIMESTAMP_MAX)
    micros = found.timestamps.astype(np.int64) * np.int64(1000)
    mask = None if reachable.all() else ~reachable
    return pa.array(micros, pa.int64(), mask=mask).view(_ARROW_TIMESTAMP)


def _headers(stream: str, found: Columns) -> Any:
    headers = found.headers
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


def _body(stream: str, found: Columns) -> Any:
    if found.bodies is None:
        raise ValueError("the bodies were not read")
    return _binary(found.bodies)


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
