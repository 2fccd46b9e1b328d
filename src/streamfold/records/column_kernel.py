"""Array kernels between records and columns; importing this module needs numba.

As in `kernel`, only the canonical encoding is read; at anything else `columns` goes the plain way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamfold.model.records import HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records.kernel import (
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
    _read_delimited,
    _read_varint,
    _signed,
    _varint_size,
)

Places = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

#: Tag of a ReadBatch's tail, which stands where one batch ends and the next begins.
TAIL = U8(0x12)
#: Above this a sequence number has no place in a signed column.
_SIGNED_MAX = U64(2**63 - 1)


@_inner
def _read_position(raw: Bytes, at: int, end: int) -> tuple[U64, U64, int]:
    """Sequence number, timestamp, and the offset after them, or NOT_CANONICAL."""
    seq_num = stamp = U64(0)
    if at < end and raw[at] == SEQ_NUM:
        seq_num, at = _read_varint(raw, at + 1, end)
    if at != NOT_CANONICAL and at < end and raw[at] == TIMESTAMP:
        stamp, at = _read_varint(raw, at + 1, end)
    return seq_num, stamp, NOT_CANONICAL if seq_num > _SIGNED_MAX else at


@_inner
def _read_part(raw: Bytes, at: int, end: int, tag: U8) -> tuple[int, int, int]:
    """Where the bytes of the field `tag` are and the offset after; empty when it is not there."""
    if at >= end or raw[at] != tag:
        return at, at, at
    start, stop = _read_delimited(raw, at + 1, end)
    return start, stop, stop


@_kernel
def count_rows(raw: Bytes) -> int:
    """How many records ReadBatches have, one after the other; or NOT_CANONICAL."""
    at = count = 0
    while at < len(raw):
        tag = raw[at]
        if tag == RECORDS:
            count += 1
        elif tag != TAIL:
            return NOT_CANONICAL
        _, at = _read_delimited(raw, at + 1, len(raw))
        if at == NOT_CANONICAL:
            return NOT_CANONICAL
    return count


@_kernel
def fill_columns(
    raw: Bytes,
    seq_nums: Offsets,
    timestamps: Values,
    headers: Places,
    names: tuple[Places, Bytes],
    values: tuple[Places, Bytes],
    bodies: tuple[Places, Bytes],
    with_headers: bool,
    with_bodies: bool,
) -> int:
    """Fill columns that have room for all rows; returns the number of headers, or NOT_CANONICAL."""
    at = index = header = 0
    headers[0] = names[0][0] = values[0][0] = bodies[0][0] = 0
    while at < len(raw):
        tag = raw[at]
        at, stop = _read_delimited(raw, at + 1, len(raw))
        if tag != RECORDS:
            at = stop
            continue
        seq_num, timestamps[index], at = _read_position(raw, at, stop)
        seq_nums[index] = _signed(seq_num)
        while at != NOT_CANONICAL and at < stop and raw[at] == HEADERS:
            at, inner = _read_delimited(raw, at + 1, stop)
            at = inner if inner == NOT_CANONICAL else at
            at = _put_part(names, header, raw, at, inner, HEADER_NAME, with_headers)
            at = _put_part(values, header, raw, at, inner, HEADER_VALUE, with_headers)
            at = at if at == inner else NOT_CANONICAL
            header += with_headers
        at = _put_part(bodies, index, raw, at, stop, BODY, with_bodies)
        if at != stop:
            return NOT_CANONICAL
        index += 1
        if with_headers:
            headers[index] = header
    return header


@_inner
def _put_part(
    column: tuple[Places, Bytes], row: int, raw: Bytes, at: int, end: int, tag: U8, wanted: bool
) -> int:
    """Copy the field `tag` into a row of a column of bytes; returns the offset after it."""
    if at == NOT_CANONICAL:
        return at
    start, stop, after = _read_part(raw, at, end, tag)
    if wanted and after != NOT_CANONICAL:
        places, content = column
        _copy(content, U64(places[row]), raw, U64(start), U64(stop - start))
        places[row + 1] = places[row] + (stop - start)
    return after


@_inner
def _field_size(size: int) -> int:
    """Bytes of a delimited field; one without content is left out."""
    return 1 + _varint_size(U64(size)) + size if size else 0


@_inner
def _put_field(out: Bytes, at: int, tag: U8, column: tuple[Places, Bytes], row: int) -> int:
    places, content = column
    size: int = places[row + 1] - places[row]
    if size == 0:
        return at
    out[at] = tag
    at = _put_varint(out, at + 1, U64(size))
    _copy(out, U64(at), content, U64(places[row]), U64(size))
    return at + size


@_inner
def _header_size(names: tuple[Places, Bytes], values: tuple[Places, Bytes], row: int) -> int:
    name = names[0][row + 1] - names[0][row]
    return _field_size(name) + _field_size(values[0][row + 1] - values[0][row])


@_kernel
def encode_appends(
    stamps: Values,
    stamped: Flags,
    headers: Places,
    names: tuple[Places, Bytes],
    values: tuple[Places, Bytes],
    bodies: tuple[Places, Bytes],
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
