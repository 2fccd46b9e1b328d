"""Array kernels between records and columns; importing this module needs numba.

As in `record_kernel`, only the canonical encoding is read; `columns` handles the rest in plain Python.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamfold.model.records import HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records.compiling import inner, kernel
from streamfold.records.record_kernel import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    BEYOND,
    BODY,
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    NOT_CANONICAL,
    ONE,
    RECORDS,
    U8,
    U64,
    ZERO,
    Bytes,
    Offsets,
    Values,
    _copy,
    _put_varint,
    _read_extent,
    _read_position,
    _signed,
    _varint_size,
)

CellOffsets = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

#: Tag of a ReadBatch's tail, which stands where one batch ends and the next begins.
TAIL = U8(0x12)
#: Above this a sequence number does not fit into a signed column.
_SIGNED_MAX = U64(2**63 - 1)


@inner
def _take_field(
    column: tuple[CellOffsets, Bytes],
    row: U64,
    raw: Bytes,
    at: U64,
    end: U64,
    tag: U8,
    wanted: bool,
) -> U64:
    """Copy the field `tag`, empty if absent, into a row; return the offset after it, or BEYOND."""
    start = stop = at
    if at < end and raw[at] == tag:
        start, stop = _read_extent(raw, at + ONE, end)
    if wanted and stop != BEYOND:
        offsets, content = column
        _copy(content, U64(offsets[row]), raw, start, stop - start)
        offsets[row + ONE] = U64(offsets[row]) + (stop - start)
    return stop


@kernel
def fill_columns(
    raw: Bytes,
    seq_nums: Offsets,
    timestamps: Values,
    headers: CellOffsets,
    names: tuple[CellOffsets, Bytes],
    values: tuple[CellOffsets, Bytes],
    bodies: tuple[CellOffsets, Bytes],
    with_headers: bool,
    with_bodies: bool,
) -> tuple[int, int]:
    """Split ReadBatches, one after the other, into columns that have room for the worst case.

    Returns the number of records and of headers, or NOT_CANONICAL twice.
    """
    at, row, header, end = ZERO, ZERO, ZERO, U64(len(raw))
    headers[0] = names[0][0] = values[0][0] = bodies[0][0] = 0
    while at < end:
        tag = raw[at]
        at, stop = _read_extent(raw, at + ONE, end)
        if stop == BEYOND or (tag != RECORDS and tag != TAIL):
            return NOT_CANONICAL, NOT_CANONICAL
        if tag == TAIL:
            at = stop
            continue
        seq_num, stamp, at = _read_position(raw, at, stop)
        seq_nums[row], timestamps[row] = _signed(seq_num), stamp
        while at < stop and raw[at] == HEADERS:
            at, inner = _read_extent(raw, at + ONE, stop)
            at = _take_field(names, header, raw, at, inner, HEADER_NAME, with_headers)
            at = _take_field(values, header, raw, at, inner, HEADER_VALUE, with_headers)
            if inner == BEYOND or at != inner:
                return NOT_CANONICAL, NOT_CANONICAL
            header += ONE
        at = _take_field(bodies, row, raw, at, stop, BODY, with_bodies)
        if at != stop or seq_num > _SIGNED_MAX:
            return NOT_CANONICAL, NOT_CANONICAL
        row += ONE
        if with_headers:
            headers[row] = header
    return _signed(row), _signed(header)


@inner
def _field_size(size: int) -> int:
    """Bytes of a delimited field; an empty one is omitted."""
    return 1 + _varint_size(U64(size)) + size if size else 0


@inner
def _put_field(out: Bytes, at: int, tag: U8, column: tuple[CellOffsets, Bytes], row: int) -> int:
    offsets, content = column
    size: int = offsets[row + 1] - offsets[row]
    if size == 0:
        return at
    out[at] = tag
    at = _put_varint(out, at + 1, U64(size))
    _copy(out, U64(at), content, U64(offsets[row]), U64(size))
    return at + size


@inner
def _header_size(
    names: tuple[CellOffsets, Bytes], values: tuple[CellOffsets, Bytes], row: int
) -> int:
    name = names[0][row + 1] - names[0][row]
    return _field_size(name) + _field_size(values[0][row + 1] - values[0][row])


@kernel
def encode_appends(
    stamps: Values,
    stamped: Flags,
    headers: CellOffsets,
    names: tuple[CellOffsets, Bytes],
    values: tuple[CellOffsets, Bytes],
    bodies: tuple[CellOffsets, Bytes],
    out: Bytes,
    offsets: Offsets,
    metered: Offsets,
) -> None:
    """Write every row as a record of an AppendInput; `out` has room for the worst case."""
    at = 0
    offsets[0] = 0
    for row in range(len(stamps)):
        size = 1 + _varint_size(stamps[row]) if stamped[row] else 0
        body = bodies[0][row + 1] - bodies[0][row]
        weight = RECORD_OVERHEAD + body
        for header in range(headers[row], headers[row + 1]):
            inner = _header_size(names, values, header)
            size += 1 + _varint_size(U64(inner)) + inner
            weight += HEADER_OVERHEAD
            weight += names[0][header + 1] - names[0][header]
            weight += values[0][header + 1] - values[0][header]
        size += _field_size(body)
        out[at] = RECORDS
        at = _put_varint(out, at + 1, U64(size))
        if stamped[row]:
            out[at] = APPEND_TIMESTAMP
            at = _put_varint(out, at + 1, stamps[row])
        for header in range(headers[row], headers[row + 1]):
            out[at] = APPEND_HEADERS
            at = _put_varint(out, at + 1, U64(_header_size(names, values, header)))
            at = _put_field(out, at, HEADER_NAME, names, header)
            at = _put_field(out, at, HEADER_VALUE, values, header)
        at = _put_field(out, at, APPEND_BODY, bodies, row)
        offsets[row + 1] = at
        metered[row] = weight
