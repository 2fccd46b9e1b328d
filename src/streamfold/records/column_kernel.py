"""Array kernels between records and columns; importing this module needs numba.

As in `record_kernel`, only the canonical encoding is read; `columns` handles the rest in plain Python.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamfold.model.records import HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records.record_kernel import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    BODY,
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    NOT_CANONICAL,
    RECORDS,
    SEQ_NUM,
    TIMESTAMP,
    U8,
    U64,
    Bytes,
    Offsets,
    Values,
    _copy,
    _inner,
    _kernel,
    _put_varint,
    _signed,
    _varint_size,
)

CellOffsets = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

#: Tag of a ReadBatch's tail, which stands where one batch ends and the next begins.
TAIL = U8(0x12)
#: Above this a sequence number does not fit into a signed column.
_SIGNED_MAX = U64(2**63 - 1)
#: Instead of an offset, NOT_CANONICAL: reading goes by unsigned offsets, which cannot count from
#: the end, and so costs half as much.
BEYOND = U64(2**64 - 1)
ZERO, ONE = U64(0), U64(1)
#: Of a varint's byte: its bits, and the least value of one that others follow; bits per byte, those
#: before the tenth, which is the last, and those after it.
_BITS, _MORE = U64(0x7F), U64(0x80)
_SHIFT, _SHIFT_LAST, _SHIFT_END = U64(7), U64(63), U64(70)


@_inner
def _read_number(raw: Bytes, at: U64, end: U64) -> tuple[U64, U64]:
    """As `_read_varint`, unsigned; most numbers are lengths of one byte, or of two."""
    if at >= end:
        return ZERO, BEYOND
    byte = U64(raw[at])
    at += ONE
    if byte < _MORE:
        return byte, at
    value, shift = byte & _BITS, _SHIFT
    while at < end and shift < _SHIFT_END:
        byte = U64(raw[at])
        at += ONE
        value |= (byte & _BITS) << shift
        if byte < _MORE:
            overflows = shift == _SHIFT_LAST and byte > ONE
            return value, BEYOND if byte == ZERO or overflows else at
        shift += _SHIFT
    return value, BEYOND


@_inner
def _read_extent(raw: Bytes, at: U64, end: U64) -> tuple[U64, U64]:
    """Start and end of the bytes whose length is at `at`; the end may be BEYOND."""
    size, start = _read_number(raw, at, end)
    if start == BEYOND or size > end - start:
        return ZERO, BEYOND
    return start, start + size


@_inner
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


@_kernel
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
        seq_num = stamp = ZERO
        if at < stop and raw[at] == SEQ_NUM:
            seq_num, at = _read_number(raw, at + ONE, stop)
        if at < stop and raw[at] == TIMESTAMP:
            stamp, at = _read_number(raw, at + ONE, stop)
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


@_inner
def _field_size(size: int) -> int:
    """Bytes of a delimited field; an empty one is omitted."""
    return 1 + _varint_size(U64(size)) + size if size else 0


@_inner
def _put_field(out: Bytes, at: int, tag: U8, column: tuple[CellOffsets, Bytes], row: int) -> int:
    offsets, content = column
    size: int = offsets[row + 1] - offsets[row]
    if size == 0:
        return at
    out[at] = tag
    at = _put_varint(out, at + 1, U64(size))
    _copy(out, U64(at), content, U64(offsets[row]), U64(size))
    return at + size


@_inner
def _header_size(
    names: tuple[CellOffsets, Bytes], values: tuple[CellOffsets, Bytes], row: int
) -> int:
    name = names[0][row + 1] - names[0][row]
    return _field_size(name) + _field_size(values[0][row + 1] - values[0][row])


@_kernel
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
