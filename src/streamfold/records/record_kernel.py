"""Array kernels over the bytes of records; importing this module needs numba.

They understand the canonical encoding only, the one that serializers emit: fields in order, varints
as short as possible, defaults left out. For anything else they return NOT_CANONICAL and `plain` takes
over, which also raises every error. They run without the GIL and are cached on disk once compiled.

Numbers are uint64 throughout, offsets that are read from too: an offset that cannot be negative cannot
count from the end of an array, so that reading costs a fifth. What is written to other arrays is int64.
Never mix the two: numba would make a float of it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from streamfold.model.records import HEADER_OVERHEAD, RECORD_OVERHEAD
from streamfold.records import plain
from streamfold.records.compiling import inner, kernel

Bytes: TypeAlias = npt.NDArray[np.uint8]
Offsets: TypeAlias = npt.NDArray[np.int64]
Values: TypeAlias = npt.NDArray[np.uint64]
U64: TypeAlias = np.uint64
U8: TypeAlias = np.uint8

#: Tags, as bytes: numba would compile a function again for every literal number it is called with.
RECORDS, SEQ_NUM, TIMESTAMP = U8(plain.RECORDS), U8(plain.SEQ_NUM), U8(plain.TIMESTAMP)
HEADERS, BODY = U8(plain.HEADERS), U8(plain.BODY)
HEADER_NAME, HEADER_VALUE = U8(plain.HEADER_NAME), U8(plain.HEADER_VALUE)
APPEND_TIMESTAMP = U8(plain.APPEND_TIMESTAMP)
APPEND_HEADERS, APPEND_BODY = U8(plain.APPEND_HEADERS), U8(plain.APPEND_BODY)

#: Returned by kernels instead of an offset or a count: `plain` must parse this.
NOT_CANONICAL = -1
#: The same within kernels, instead of an unsigned offset; it is beyond every end.
BEYOND = U64(2**64 - 1)
ZERO, ONE = U64(0), U64(1)
#: Of a varint's byte: its bits, and the least value of one that others follow; bits per byte, those
#: before the tenth, which is the last, and those after it.
_BITS, _MORE = U64(0x7F), U64(0x80)
_SHIFT, _SHIFT_LAST, _SHIFT_END = U64(7), U64(63), U64(70)
_RECORD_OVERHEAD, _HEADER_OVERHEAD = U64(RECORD_OVERHEAD), U64(HEADER_OVERHEAD)

#: Columns of a scan, one row per record: where headers and body are, and the client's timestamp.
START, END, STAMP, FLAGS, COLUMNS = 0, 1, 2, 3, 4
#: Bits of FLAGS: the client gave a timestamp; a header has an empty name.
STAMPED, COMMAND = 1, 2

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

#: Bytes that sequencing adds to a record at most: tag, length, sequence number and timestamp.
GROWTH_MAX = 1 + 5 + 11 + 11


@inner
def _signed(value: U64) -> int:
    return np.int64(value)  # type: ignore[return-value]  # to numba, an int


@inner
def _read_number(raw: Bytes, at: U64, end: U64) -> tuple[U64, U64]:
    """The varint at `at` and the offset after it, or BEYOND."""
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


@inner
def _read_extent(raw: Bytes, at: U64, end: U64) -> tuple[U64, U64]:
    """Start and end of the bytes whose length is at `at`; the end may be BEYOND."""
    size, start = _read_number(raw, at, end)
    if start == BEYOND or size > end - start:
        return ZERO, BEYOND
    return start, start + size


@inner
def _read_filled(raw: Bytes, at: U64, end: U64, tag: U8) -> tuple[U64, U64]:
    """Size of the bytes in the field `tag`, and the offset after; size 0 if the field is absent."""
    if at >= end or raw[at] != tag:
        return ZERO, at
    start, stop = _read_extent(raw, at + ONE, end)
    if stop == start:
        return ZERO, BEYOND
    return stop - start, stop


@inner
def _read_position(raw: Bytes, at: U64, end: U64) -> tuple[U64, U64, U64]:
    """Sequence number and timestamp of a SequencedRecord, and the offset after them, or BEYOND."""
    seq_num = stamp = ZERO
    if at < end and raw[at] == SEQ_NUM:
        seq_num, at = _read_number(raw, at + ONE, end)
    if at < end and raw[at] == TIMESTAMP:
        stamp, at = _read_number(raw, at + ONE, end)
    return seq_num, stamp, at


@inner
def _weigh(raw: Bytes, at: U64, end: U64, headers: U8, body: U8) -> tuple[U64, bool]:
    """Metered size of the headers and body in `raw[at:end]`, or BEYOND; whether a name is empty."""
    metered = _RECORD_OVERHEAD
    nameless = False
    while at < end and raw[at] == headers:
        at, stop = _read_extent(raw, at + ONE, end)
        if stop == BEYOND:
            return BEYOND, nameless
        name, at = _read_filled(raw, at, stop, HEADER_NAME)
        if at == BEYOND:
            return BEYOND, nameless
        value, at = _read_filled(raw, at, stop, HEADER_VALUE)
        if at != stop:
            return BEYOND, nameless
        nameless = nameless or name == ZERO
        metered += _HEADER_OVERHEAD + name + value
    size, at = _read_filled(raw, at, end, body)
    return BEYOND if at != end else metered + size, nameless


@kernel
def count_records(raw: Bytes) -> int:
    """How many records `raw` begins with."""
    at, end, count = ZERO, U64(len(raw)), 0
    while at < end and raw[at] == RECORDS:
        _, at = _read_extent(raw, at + ONE, end)
        if at == BEYOND:
            return NOT_CANONICAL
        count += 1
    return count


@kernel
def count_parts(raw: Bytes, most: int) -> int:
    """How many records and headers `raw` begins with; it stops beyond `most`, or where `scan` would."""
    at, stop, parts = ZERO, U64(len(raw)), 0
    while at < stop and raw[at] == RECORDS and parts <= most:
        at, end = _read_extent(raw, at + ONE, stop)
        parts += 1
        if end == BEYOND:
            return parts
        if at < end and raw[at] == APPEND_TIMESTAMP:
            _, at = _read_number(raw, at + ONE, end)
        while at < end and raw[at] == APPEND_HEADERS and parts <= most:
            _, at = _read_extent(raw, at + ONE, end)
            parts += 1
        at = end
    return parts


@kernel
def scan(raw: Bytes, rows: Values) -> tuple[int, int, int, int]:
    """Fill one row per AppendRecord at the beginning of `raw`.

    Returns the offset after them (or NOT_CANONICAL), their metered size, the number of those with
    an empty header name, and the index of the first without a timestamp, `len(rows)` if none.
    """
    at, stop, metered, commands = ZERO, U64(len(raw)), ZERO, 0
    unstamped = len(rows)
    for index in range(len(rows)):
        at, end = _read_extent(raw, at + ONE, stop)
        stamp, flags = ZERO, 0
        if end == BEYOND:
            return NOT_CANONICAL, 0, 0, 0
        if at < end and raw[at] == APPEND_TIMESTAMP:
            flags = STAMPED
            stamp, at = _read_number(raw, at + ONE, end)
            if at == BEYOND:
                return NOT_CANONICAL, 0, 0, 0
        elif unstamped > index:
            unstamped = index
        size, nameless = _weigh(raw, at, end, APPEND_HEADERS, APPEND_BODY)
        if size == BEYOND:
            return NOT_CANONICAL, 0, 0, 0
        if nameless:
            flags |= COMMAND
            commands += 1
        metered += size
        rows[index, START], rows[index, END] = at, end
        rows[index, STAMP], rows[index, FLAGS] = stamp, U64(flags)
        at = end
    return _signed(at), _signed(metered), commands, unstamped


@inner
def _varint_size(value: U64) -> int:
    size = 1
    while value >= U64(0x80):
        value >>= U64(7)
        size += 1
    return size


@inner
def _put_varint(out: Bytes, at: int, value: U64) -> int:
    here = U64(at)
    while value >= _MORE:
        out[here] = U8(value & _BITS | _MORE)
        value >>= _SHIFT
        here += ONE
    out[here] = U8(value)
    return _signed(here + ONE)


@inner
def _put_number(out: Bytes, at: int, tag: U8, value: U64) -> int:
    """Write a field; zero is left out, as in proto3."""
    if value == ZERO:
        return at
    out[U64(at)] = tag
    return _put_varint(out, at + 1, value)


@inner
def _copy(out: Bytes, at: U64, raw: Bytes, start: U64, size: U64) -> None:
    """Copy `size` bytes. A loop would copy the rest of a block byte by byte: most texts are short."""
    _memcpy(out.ctypes.data + _signed(at), raw.ctypes.data + _signed(start), _signed(size))


@inner
def _put_rest(out: Bytes, at: int, raw: Bytes, start: U64, end: U64) -> int:
    """Copy headers and body, and give them the tags that they have in a SequencedRecord."""
    to, here = U64(at), start
    _copy(out, to, raw, start, end - start)
    while here < end and raw[here] == APPEND_HEADERS:
        out[to + (here - start)] = HEADERS
        _, here = _read_extent(raw, here + ONE, end)
    if here < end:
        out[to + (here - start)] = BODY
    return _signed(to + (end - start))


@kernel
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
        start, end = rows[index, START], rows[index, END]
        seq_num = first + U64(index)
        size = _signed(end - start)
        size += 1 + _varint_size(seq_num) if seq_num else 0
        size += 1 + _varint_size(latest) if latest else 0
        out[U64(at)] = RECORDS
        at = _put_varint(out, at + 1, U64(size))
        at = _put_number(out, at, SEQ_NUM, seq_num)
        at = _put_number(out, at, TIMESTAMP, latest)
        at = _put_rest(out, at, raw, start, end)
    return at, earliest, latest


@kernel
def measure(raw: Bytes, offsets: Offsets, timestamps: Values, metered: Offsets) -> tuple[int, U64]:
    """Fill the index of a payload; returns where it ends (or NOT_CANONICAL) and the first number.

    For sequence numbers that do not follow each other, `plain` raises the error.
    """
    at, stop, first = ZERO, U64(len(raw)), ZERO
    offsets[0] = metered[0] = 0
    for index in range(len(timestamps)):
        at, end = _read_extent(raw, at + ONE, stop)
        if end == BEYOND:
            return NOT_CANONICAL, first
        seq_num, stamp, at = _read_position(raw, at, end)
        if at == BEYOND:
            return NOT_CANONICAL, first
        size, _ = _weigh(raw, at, end, HEADERS, BODY)
        first = first if index else seq_num
        if size == BEYOND or seq_num != first + U64(index):
            return NOT_CANONICAL, first
        offsets[index + 1] = at = end
        timestamps[index] = stamp
        metered[index + 1] = metered[index] + _signed(size)
    return _signed(at), first
