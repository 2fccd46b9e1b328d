"""An array kernel that writes stored records as JSON; importing this module needs numba.

It understands canonical payloads whose text is valid UTF-8, and leaves everything else to Python, like
`record_kernel`, which see for the rules of numba.
"""

from __future__ import annotations

import numpy as np

from streamfold.records.record_kernel import (
    BODY,
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    NOT_CANONICAL,
    SEQ_NUM,
    TIMESTAMP,
    U8,
    U64,
    Bytes,
    _copy,
    _inner,
    _kernel,
    _read_delimited,
    _read_varint,
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


def _escapes() -> Bytes:
    """By byte: 0 = as it is, 1 = as \\u00.., 2 = not ASCII, else the letter after a backslash."""
    table = np.zeros(256, np.uint8)
    table[:0x20], table[0x80:] = 1, 2
    for byte, letter in zip(b'\b\t\n\f\r"\\', b'btnfr"\\', strict=True):
        table[byte] = letter
    return table


_ESCAPES = _escapes()


@_inner
def _put(out: Bytes, at: int, text: Bytes) -> int:
    _copy(out, U64(at), text, U64(0), U64(len(text)))
    return at + len(text)


@_inner
def _put_decimal(out: Bytes, at: int, value: U64) -> int:
    digits, rest = 1, value
    while rest >= U64(10):
        rest //= U64(10)
        digits += 1
    for offset in range(at + digits - 1, at - 1, -1):
        out[offset] = U8(48) + U8(value % U64(10))
        value //= U64(10)
    return at + digits


@_inner
def _utf8_size(raw: Bytes, at: int, end: int) -> int:
    """Bytes of the character at `at`, which is not ASCII; 0 if it is not valid."""
    first = raw[at]
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if first < 0xC2 or first > 0xF4 or at + size > end:
        return 0
    second = raw[at + 1]
    lowest = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
    highest = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
    if second < lowest or second > highest:
        return 0
    for offset in range(at + 2, at + size):
        if raw[offset] & 0xC0 != 0x80:
            return 0
    return size


@_inner
def _put_text(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    """Write UTF-8 with what JSON wants escaped; NOT_CANONICAL if it is not UTF-8."""
    done = start
    while done < end:
        clean = done
        while clean < end and _ESCAPES[raw[clean]] == 0:
            clean += 1
        _copy(out, U64(at), raw, U64(done), U64(clean - done))
        at += clean - done
        done = clean
        if done == end:
            break
        kind = _ESCAPES[raw[done]]
        if kind == 2:
            size = _utf8_size(raw, done, end)
            if size == 0:
                return NOT_CANONICAL
            _copy(out, U64(at), raw, U64(done), U64(size))
            at += size
            done += size
            continue
        if kind == 1:
            at = _put(out, at, _CONTROL)
            out[at] = _HEX[raw[done] >> 4]
            out[at + 1] = _HEX[raw[done] & 15]
        else:
            out[at] = 92
            out[at + 1] = kind
        at += 2
        done += 1
    return at


@_inner
def _put_base64(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    done = start
    while done < end:
        left = end - done
        word = np.int64(raw[done]) << 16
        if left > 1:
            word |= np.int64(raw[done + 1]) << 8
        if left > 2:
            word |= np.int64(raw[done + 2])
        out[at] = _BASE64[word >> 18]
        out[at + 1] = _BASE64[(word >> 12) & 63]
        out[at + 2] = _BASE64[(word >> 6) & 63] if left > 1 else 61
        out[at + 3] = _BASE64[word & 63] if left > 2 else 61
        at += 4
        done += 3
    return at


@_inner
def _put_string(out: Bytes, at: int, raw: Bytes, start: int, end: int, base64: bool) -> int:
    if base64:
        return _put_base64(out, at, raw, start, end)
    return _put_text(out, at, raw, start, end)


@_inner
def _put_member(
    out: Bytes, at: int, raw: Bytes, offset: int, end: int, tag: U8, base64: bool
) -> tuple[int, int]:
    """Write the bytes of the field `tag`, if it is there; returns the offsets in `out` and `raw`."""
    if offset >= end or raw[offset] != tag:
        return at, offset
    start, stop = _read_delimited(raw, offset + 1, end)
    if stop <= start:
        return NOT_CANONICAL, 0
    return _put_string(out, at, raw, start, stop, base64), stop


@_inner
def _put_headers(
    out: Bytes, at: int, raw: Bytes, offset: int, end: int, base64: bool
) -> tuple[int, int]:
    first = True
    while offset < end and raw[offset] == HEADERS:
        offset, stop = _read_delimited(raw, offset + 1, end)
        if stop == NOT_CANONICAL:
            return NOT_CANONICAL, 0
        at = _put(out, at, _OPEN_HEADERS if first else _COMMA)
        first = False
        at = _put(out, at, _OPEN_PAIR)
        at, offset = _put_member(out, at, raw, offset, stop, HEADER_NAME, base64)
        if at == NOT_CANONICAL:
            return NOT_CANONICAL, 0
        at = _put(out, at, _MIDDLE)
        at, offset = _put_member(out, at, raw, offset, stop, HEADER_VALUE, base64)
        if at == NOT_CANONICAL or offset != stop:
            return NOT_CANONICAL, 0
        at = _put(out, at, _CLOSE_PAIR)
    if not first:
        at = _put(out, at, _CLOSE_HEADERS)
    return at, offset


@_kernel
def write_json(raw: Bytes, count: int, base64: bool, out: Bytes) -> int:
    """Write `count` records as the elements of an array; returns the size, or NOT_CANONICAL."""
    offset = at = 0
    for index in range(count):
        offset, end = _read_delimited(raw, offset + 1, len(raw))
        seq_num = stamp = U64(0)
        if offset < end and raw[offset] == SEQ_NUM:
            seq_num, offset = _read_varint(raw, offset + 1, end)
        if offset != NOT_CANONICAL and offset < end and raw[offset] == TIMESTAMP:
            stamp, offset = _read_varint(raw, offset + 1, end)
        if end == NOT_CANONICAL or offset == NOT_CANONICAL:
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
    return at if offset == len(raw) else NOT_CANONICAL
