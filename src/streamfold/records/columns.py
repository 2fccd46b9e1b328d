"""Converts records to columns and back without an object per record.

`read_columns` decodes reads, `encode_columns` encodes appends.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamfold import _native
from streamfold._native import CodecError
from streamfold.records.payload import malformed

Bytes: TypeAlias = npt.NDArray[np.uint8]
CellOffsets: TypeAlias = npt.NDArray[np.int32]


class BytesColumn(NamedTuple):
    """Byte values. Row i is `content[offsets[i]:offsets[i + 1]]`, as in an Arrow binary array."""

    offsets: CellOffsets
    content: Bytes


class HeaderColumn(NamedTuple):
    """The headers of row i are entries `offsets[i]` to `offsets[i + 1]` of names and values."""

    offsets: CellOffsets
    names: BytesColumn
    values: BytesColumn


class Columns(NamedTuple):
    """Records as read. Columns that were not requested are None."""

    seq_nums: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.uint64]
    headers: HeaderColumn | None
    bodies: BytesColumn | None


class AppendColumns(NamedTuple):
    """Records to append. Rows whose `stamped` is false have no timestamp."""

    timestamps: npt.NDArray[np.uint64]
    stamped: npt.NDArray[np.bool_]
    headers: HeaderColumn
    bodies: BytesColumn


class EncodedRecords(NamedTuple):
    """Encoded AppendInput records. Any consecutive run of them is a valid AppendInput."""

    raw: bytes
    #: Offset of each record, followed by the length of `raw`.
    offsets: npt.NDArray[np.int64]
    #: Metered bytes of each record.
    metered: npt.NDArray[np.int64]


def read_columns(
    payload: bytes | memoryview, *, headers: bool = True, bodies: bool = True
) -> Columns:
    """Decode the requested columns of concatenated ReadBatches."""
    raw = np.frombuffer(payload, np.uint8)
    try:
        seq_nums, timestamps, pairs, texts = _native.read_columns(raw, headers, bodies)
    except CodecError as error:
        raise malformed(error) from None
    return Columns(
        seq_nums,
        timestamps,
        pairs and HeaderColumn(pairs[0], BytesColumn(*pairs[1]), BytesColumn(*pairs[2])),
        texts and BytesColumn(*texts),
    )


def encode_columns(rows: AppendColumns) -> EncodedRecords:
    """Encode rows as AppendInput records."""
    try:
        encoded = _native.encode_columns(rows.timestamps, rows.stamped, rows.headers, rows.bodies)
    except CodecError as error:
        raise malformed(error) from None
    return EncodedRecords(*encoded)
