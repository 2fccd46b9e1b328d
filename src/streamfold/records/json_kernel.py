"""An array kernel that writes stored records as JSON; importing this module needs numba.

It understands canonical payloads whose text is valid UTF-8, and leaves everything else to Python, like
`record_kernel`, which see for the rules of numba.
"""

from __future__ import annotations

import numpy as np

from streamfold.records.compiling import inner, kernel
from streamfold.records.record_kernel import (
    BEYOND,
    BODY,
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    NOT_CANONICAL,
    ONE,
    U8,
    U64,
    ZERO,
    Bytes,
    _copy,
    _read_extent,
    _read_position,
    _signed,
)

#: Bytes of JSON for one of a payload at most (`\\u0001`), and beside them for a record.
GROWTH, RECORD_BYTES = 6, 100


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)


_OPEN, _TIME, _CLOSE = _bytes(b'{"seq_num":'), _bytes(b',"timestamp":'), _bytes(b"}")
_OPEN_HEADERS, _CLOSE_HEADERS = _bytes(b',"headers":['), _bytes(b"]")
_OPEN_PAIR, _MIDDLE, _CLOSE_PAIR = _bytes(b'["'), _bytes(b'","'), _bytes(b'"]')
_OPEN_BODY, _CLOSE_BODY = _bytes(b',"body":"'), _bytes(b'"')
_COMMA, _CONTROL = _bytes(b","), _bytes(b"\\u00")
_HEX = _bytes(b"0123456789abcdef")
_BASE64 = _bytes(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
#: Bits of a digit of base64.
_DIGIT = U64(0x3F)
_TEN = U64(10)


def _escapes() -> Bytes:
    """By byte: 0 = as it is, 1 = as \\u00.., 2 = not ASCII, else the letter after a backslash."""
    table = np.zeros(256, np.uint8)
    table[:0x20], table[0x80:] = 1, 2
    for byte, letter in zip(b'\b\t\n\f\r"\\', b'btnfr"\\', strict=True):
        table[byte] = letter
    return table


_ESCAPES = _escapes()


@inner
def _put(out: Bytes, at: int, text: Bytes) -> int:
    _copy(out, U64(at), text, ZERO, U64(len(text)))
    return at + len(text)


@inner
def _put_decimal(out: Bytes, at: int, value: U64) -> int:
    start = U64(at)
    end, rest = start + ONE, value
    while rest >= _TEN:
        rest //= _TEN
        end += ONE
    here = end
    while here > start:
        here -= ONE
        out[here] = U8(48) + U8(value % _TEN)
        value //= _TEN
    return _signed(end)


@inner
def _utf8_size(raw: Bytes, at: U64, end: U64) -> U64:
    """Bytes of the character at `at`, which is not ASCII; 0 if it is not valid."""
    first = raw[at]
    size = U64(2) if first < 0xE0 else U64(3) if first < 0xF0 else U64(4)
    if first < 0xC2 or first > 0xF4 or size > end - at:
        return ZERO
    second = raw[at + ONE]
    lowest = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
    highest = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
    if second < lowest or second > highest:
        return ZERO
    here = at + U64(2)
    while here < at + size:
        if raw[here] & 0xC0 != 0x80:
            return ZERO
        here += ONE
    return size


@inner
def _put_text(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    """Write UTF-8 with what JSON wants escaped; NOT_CANONICAL if it is not UTF-8."""
    to, done, stop = U64(at), U64(start), U64(end)
    while done < stop:
        clean = done
        while clean < stop and _ESCAPES[raw[clean]] == 0:
            clean += ONE
        _copy(out, to, raw, done, clean - done)
        to += clean - done
        done = clean
        if done == stop:
            break
        kind = _ESCAPES[raw[done]]
        if kind == 2:
            size = _utf8_size(raw, done, stop)
            if size == ZERO:
                return NOT_CANONICAL
            _copy(out, to, raw, done, size)
            to += size
            done += size
            continue
        if kind == 1:
            _copy(out, to, _CONTROL, ZERO, U64(len(_CONTROL)))
            to += U64(len(_CONTROL))
            out[to] = _HEX[raw[done] >> 4]
            out[to + ONE] = _HEX[raw[done] & 15]
        else:
            out[to] = 92
            out[to + ONE] = kind
        to += U64(2)
        done += ONE
    return _signed(to)


@inner
def _put_base64(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    to, done, stop = U64(at), U64(start), U64(end)
    while done < stop:
        left = stop - done
        word = U64(raw[done]) << U64(16)
        if left > ONE:
            word |= U64(raw[done + ONE]) << U64(8)
        if left > U64(2):
            word |= U64(raw[done + U64(2)])
        out[to] = _BASE64[word >> U64(18)]
        out[to + ONE] = _BASE64[(word >> U64(12)) & _DIGIT]
        out[to + U64(2)] = _BASE64[(word >> U64(6)) & _DIGIT] if left > ONE else 61
        out[to + U64(3)] = _BASE64[word & _DIGIT] if left > U64(2) else 61
        to += U64(4)
        done += U64(3)
    return _signed(to)


@inner
def _put_member(
    out: Bytes, at: int, raw: Bytes, offset: U64, end: U64, tag: U8, base64: bool
) -> tuple[int, U64]:
    """Write the bytes of the field `tag`, if it is there; returns the offsets in `out` and `raw`."""
    if offset >= end or raw[offset] != tag:
        return at, offset
    start, stop = _read_extent(raw, offset + ONE, end)
    if stop <= start or stop == BEYOND:
        return NOT_CANONICAL, ZERO
    if base64:
        return _put_base64(out, at, raw, _signed(start), _signed(stop)), stop
    return _put_text(out, at, raw, _signed(start), _signed(stop)), stop


@inner
def _put_headers(
    out: Bytes, at: int, raw: Bytes, offset: U64, end: U64, base64: bool
) -> tuple[int, U64]:
    first = True
    while offset < end and raw[offset] == HEADERS:
        offset, stop = _read_extent(raw, offset + ONE, end)
        if stop == BEYOND:
            return NOT_CANONICAL, ZERO
        at = _put(out, at, _OPEN_HEADERS if first else _COMMA)
        first = False
        at = _put(out, at, _OPEN_PAIR)
        at, offset = _put_member(out, at, raw, offset, stop, HEADER_NAME, base64)
        if at == NOT_CANONICAL:
            return NOT_CANONICAL, ZERO
        at = _put(out, at, _MIDDLE)
        at, offset = _put_member(out, at, raw, offset, stop, HEADER_VALUE, base64)
        if at == NOT_CANONICAL or offset != stop:
            return NOT_CANONICAL, ZERO
        at = _put(out, at, _CLOSE_PAIR)
    if not first:
        at = _put(out, at, _CLOSE_HEADERS)
    return at, offset


@kernel
def write_json(raw: Bytes, count: int, base64: bool, out: Bytes) -> int:
    """Write `count` records as the elements of an array; returns the size, or NOT_CANONICAL."""
    offset, stop, at = ZERO, U64(len(raw)), 0
    for index in range(count):
        offset, end = _read_extent(raw, offset + ONE, stop)
        if end == BEYOND:
            return NOT_CANONICAL
        seq_num, stamp, offset = _read_position(raw, offset, end)
        if offset == BEYOND:
            return NOT_CANONICAL
        if index:
            at = _put(out, at, _COMMA)
        at = _put_decimal(out, _put(out, at, _OPEN), seq_num)
        at = _put_decimal(out, _put(out, at, _TIME), stamp)
        at, offset = _put_headers(out, at, raw, offset, end, base64)
        if at != NOT_CANONICAL and offset < end:
            at, offset = _put_member(out, _put(out, at, _OPEN_BODY), raw, offset, end, BODY, base64)
            if at != NOT_CANONICAL:
                at = _put(out, at, _CLOSE_BODY)
        if at == NOT_CANONICAL or offset != end:
            return NOT_CANONICAL
        at = _put(out, at, _CLOSE)
    return at if offset == stop else NOT_CANONICAL
