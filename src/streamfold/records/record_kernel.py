"""Array kernels over the bytes of records; importing this module needs numba.

They understand the canonical encoding only, the one that serializers emit: fields in order, varints
as short as possible, defaults left out. For anything else they return NOT_CANONICAL and `plain` takes
over, which also raises every error. They run without the GIL and are cached on disk once compiled.

Offsets are int64 and values uint64 throughout: numba makes a float of a mixture of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from streamfold.model.records import HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records import plain

Bytes: TypeAlias = npt.NDArray[np.uint8]
Offsets: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.uint64]
U64: TypeAlias = np.uint64
U8: TypeAlias = np.uint8
Function = TypeVar("Function", bound=Callable[..., Any])

#: Tags, as bytes: numba would compile a function again for every literal number it is called with.
RECORDS, SEQ_NUM, TIMESTAMP = U8(plain.RECORDS), U8(plain.SEQ_NUM), U8(plain.TIMESTAMP)
HEADERS, BODY = U8(plain.HEADERS), U8(plain.BODY)
HEADER_NAME, HEADER_VALUE = U8(plain.HEADER_NAME), U8(plain.HEADER_VALUE)
APPEND_TIMESTAMP = U8(plain.APPEND_TIMESTAMP)
APPEND_HEADERS, APPEND_BODY = U8(plain.APPEND_HEADERS), U8(plain.APPEND_BODY)

#: Returned instead of an offset or a count: `plain` must parse this.
NOT_CANONICAL = -1

#: Columns of a scan, one row per record: where headers and body are, and the client's timestamp.
START, END, STAMP, FLAGS, COLUMNS = 0, 1, 2, 3, 4
#: Bits of FLAGS: the client gave a timestamp; a header has an empty name.
STAMPED, COMMAND = 1, 2

#: Bytes that sequencing adds to a record at most: tag, length, sequence number and timestamp.
GROWTH_MAX = 1 + 5 + 11 + 11


def _inner(function: Function) -> Function:
    """Compile as a part of the kernels that call it."""
    return cast("Function", numba.njit(nogil=True)(function))


def _kernel(function: Function) -> Function:
    """Compile at the first call; without a folder for the cache, at the first in each process."""
    try:
        return cast("Function", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:
        return _inner(function)


@_inner
def _signed(value: U64) -> int:
    return np.int64(value)  # type: ignore[return-value]  # to numba, an int


@_inner
def _read_varint(raw: Bytes, at: int, end: int) -> tuple[U64, int]:
    """The number at `at` and the offset after it, or NOT_CANONICAL."""
    value = U64(0)
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = raw[at]
        at += 1
        value |= U64(byte & 0x7F) << U64(shift)
        if byte < 0x80:
            padded = byte == 0 and shift > 0
            overflows = byte > 1 and shift == 63
            return value, NOT_CANONICAL if padded or overflows else at
    return value, NOT_CANONICAL


@_inner
def _read_delimited(raw: Bytes, at: int, end: int) -> tuple[int, int]:
    """Start and end of the bytes whose length is at `at`; the end may be NOT_CANONICAL."""
    size, start = _read_varint(raw, at, end)
    if start == NOT_CANONICAL or size > U64(end - start):
        return 0, NOT_CANONICAL
    return start, start + _signed(size)


@_inner
def _read_filled(raw: Bytes, at: int, end: int, tag: U8) -> tuple[int, int]:
    """Size of the bytes in the field `tag`, and the offset after; size 0 if the field is absent."""
    if at >= end or raw[at] != tag:
        return 0, at
    start, stop = _read_delimited(raw, at + 1, end)
    if stop == start:
        return 0, NOT_CANONICAL
    return stop - start, stop


@_inner
def _weigh(raw: Bytes, at: int, end: int, headers: U8, body: U8) -> tuple[int, bool]:
    """Metered size of the headers and body in `raw[at:end]`, and whether a name is empty."""
    metered = RECORD_OVERHEAD
    nameless = False
    while at < end and raw[at] == headers:
        at, stop = _read_delimited(raw, at + 1, end)
        if stop == NOT_CANONICAL:
            return NOT_CANONICAL, nameless
        name, at = _read_filled(raw, at, stop, HEADER_NAME)
        if at == NOT_CANONICAL:
            return NOT_CANONICAL, nameless
        value, at = _read_filled(raw, at, stop, HEADER_VALUE)
        if at != stop:
            return NOT_CANONICAL, nameless
        nameless = nameless or name == 0
        metered += HEADER_OVERHEAD + name + value
    size, at = _read_filled(raw, at, end, body)
    return NOT_CANONICAL if at != end else metered + size, nameless


@_kernel
def count_records(raw: Bytes) -> int:
    """How many records `raw` begins with."""
    at = count = 0
    while at < len(raw) and raw[at] == RECORDS:
        _, at = _read_delimited(raw, at + 1, len(raw))
        if at == NOT_CANONICAL:
            return NOT_CANONICAL
        count += 1
    return count


@_kernel
def count_parts(raw: Bytes, most: int) -> int:
    """How many records and headers `raw` begins with; it stops beyond `most`, or where `scan` would."""
    at = parts = 0
    while at < len(raw) and raw[at] == RECORDS and parts <= most:
        at, end = _read_delimited(raw, at + 1, len(raw))
        parts += 1
        if end == NOT_CANONICAL:
            return parts
        if at < end and raw[at] == APPEND_TIMESTAMP:
            _, at = _read_varint(raw, at + 1, end)
        while at != NOT_CANONICAL and at < end and raw[at] == APPEND_HEADERS and parts <= most:
            _, at = _read_delimited(raw, at + 1, end)
            parts += 1
        at = end
    return parts


@_kernel
def scan(raw: Bytes, rows: Values) -> tuple[int, int, int, int]:
    """Fill one row per AppendRecord at the beginning of `raw`.

    Returns the offset after them (or NOT_CANONICAL), their metered size, the number of those with
    an empty header name, and the index of the first without a timestamp, `len(rows)` if none.
    """
    at = metered = commands = 0
    unstamped = len(rows)
    for index in range(len(rows)):
        start, end = _read_delimited(raw, at + 1, len(raw))
        at, stamp, flags = start, U64(0), 0
        if at < end and raw[at] == APPEND_TIMESTAMP:
            flags = STAMPED
            stamp, at = _read_varint(raw, at + 1, end)
        elif unstamped > index:
            unstamped = index
        if end == NOT_CANONICAL or at == NOT_CANONICAL:
            return NOT_CANONICAL, 0, 0, 0
        size, nameless = _weigh(raw, at, end, APPEND_HEADERS, APPEND_BODY)
        if size == NOT_CANONICAL:
            return NOT_CANONICAL, 0, 0, 0
        if nameless:
            flags |= COMMAND
            commands += 1
        metered += size
        rows[index, START], rows[index, END] = U64(at), U64(end)
        rows[index, STAMP], rows[index, FLAGS] = stamp, U64(flags)
        at = end
    return at, metered, commands, unstamped


@_inner
def _varint_size(value: U64) -> int:
    size = 1
    while value >= U64(0x80):
        value >>= U64(7)
        size += 1
    return size


@_inner
def _put_varint(out: Bytes, at: int, value: U64) -> int:
    while value >= U64(0x80):
        out[at] = U8(value & U64(0x7F) | U64(0x80))
        value >>= U64(7)
        at += 1
    out[at] = U8(value)
    return at + 1


@_inner
def _put_number(out: Bytes, at: int, tag: U8, value: U64) -> int:
    """Write a field; zero is left out, as in proto3."""
    if value == U64(0):
        return at
    out[at] = tag
    return _put_varint(out, at + 1, value)


@_inner
def _copy(out: Bytes, at: U64, raw: Bytes, start: U64, size: U64) -> None:
    """Unsigned throughout: no index could count from the end, and so the loop becomes a memcpy."""
    done = U64(0)
    while done < size:
        out[at + done] = raw[start + done]
        done += U64(1)


@_inner
def _put_rest(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    """Copy headers and body, and give them the tags that they have in a SequencedRecord."""
    _copy(out, U64(at), raw, U64(start), U64(end - start))
    shift, here = at - start, start
    while here < end and raw[here] == APPEND_HEADERS:
        out[here + shift] = HEADERS
        _, here = _read_delimited(raw, here + 1, end)
    if here < end:
        out[here + shift] = BODY
    return end + shift


@_kernel
def emit(
    raw: Bytes,
    rows: Values,
    first: U64,
    now: U64,
    floor: U64,
    arrival: bool,
    uncapped: bool,
    out: Bytes,
) -> tuple[int, U64, U64]:
    """Write the scanned records as SequencedRecords; returns the size and the outer timestamps."""
    at, latest, earliest = 0, floor, floor
    for index in range(len(rows)):
        stamp = now
        if not arrival and rows[index, FLAGS] & U64(STAMPED):
            stamp = rows[index, STAMP]
        if not uncapped and stamp > now:
            stamp = now
        latest = max(latest, stamp)
        if index == 0:
            earliest = latest
        start, end = _signed(rows[index, START]), _signed(rows[index, END])
        seq_num = first + U64(index)
        size = end - start
        size += 1 + _varint_size(seq_num) if seq_num else 0
        size += 1 + _varint_size(latest) if latest else 0
        out[at] = RECORDS
        at = _put_varint(out, at + 1, U64(size))
        at = _put_number(out, at, SEQ_NUM, seq_num)
        at = _put_number(out, at, TIMESTAMP, latest)
        at = _put_rest(out, at, raw, start, end)
    return at, earliest, latest


@_kernel
def measure(raw: Bytes, offsets: Offsets, timestamps: Values, metered: Offsets) -> tuple[int, U64]:
    """Fill the index of a payload; returns where it ends (or NOT_CANONICAL) and the first number.

    For sequence numbers that do not follow each other, `plain` raises the error.
    """
    at, first = 0, U64(0)
    offsets[0] = metered[0] = 0
    for index in range(len(timestamps)):
        at, end = _read_delimited(raw, at + 1, len(raw))
        seq_num = stamp = U64(0)
        if at < end and raw[at] == SEQ_NUM:
            seq_num, at = _read_varint(raw, at + 1, end)
        if at != NOT_CANONICAL and at < end and raw[at] == TIMESTAMP:
            stamp, at = _read_varint(raw, at + 1, end)
        if end == NOT_CANONICAL or at == NOT_CANONICAL:
            return NOT_CANONICAL, first
        size, _ = _weigh(raw, at, end, HEADERS, BODY)
        first = first if index else seq_num
        if size == NOT_CANONICAL or seq_num != first + U64(index):
            return NOT_CANONICAL, first
        offsets[index + 1] = at = end
        timestamps[index] = stamp
        metered[index + 1] = metered[index] + size
    return at, first
