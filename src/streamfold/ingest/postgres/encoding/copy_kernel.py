"""An array kernel that writes lines of COPY as records; importing this module needs numba.

It checks every value, and understands what nearly all of them look like. It leaves a line with any
other value to `RowEncoder`, which writes the same bytes or says what is wrong. Lines must be UTF-8 and
end with a newline; see `streamfold.records.record_kernel` for the rules of numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from streamfold.ingest.postgres.encoding import values
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.compiling import inner, kernel
from streamfold.records.json_kernel import _BASE64, _HEX, _put
from streamfold.records.record_kernel import (
    APPEND_BODY,
    APPEND_HEADERS,
    ONE,
    RECORDS,
    U8,
    U64,
    Bytes,
    Offsets,
    _copy,
    _put_varint,
    _signed,
    _varint_size,
)

#: How the text of a column becomes JSON.
NUMBER, TEXT, BOOL, FLOAT, DATE, TIMESTAMP, TIMESTAMPTZ, BYTEA = range(8)
#: By type; all others are texts.
KINDS: Final = {
    **dict.fromkeys((values.INT2, values.INT4, values.INT8, values.OID), NUMBER),
    **dict.fromkeys((values.FLOAT4, values.FLOAT8), FLOAT),
    values.BOOL: BOOL,
    values.BYTEA: BYTEA,
    values.DATE: DATE,
    values.TIMESTAMP: TIMESTAMP,
    values.TIMESTAMPTZ: TIMESTAMPTZ,
}
#: Bytes of JSON for one of a line at most (`\\u0001`), and beside them for a value (`null`, quotes).
GROWTH, VALUE_BYTES = 6, 8
#: Bytes that encoding adds to a record at most, beside those that limits count: tags and lengths.
RECORD_GROWTH = 32
#: Bytes of a line's key at most: six times as many, as JSON has at most, and the quotes of each value
#: are less than `encoded_copy.KEY_RESERVE`. The encoder weighs longer keys.
KEY_BYTES_MAX = 1 << 10

_BACKSLASH, _QUOTE = U8(92), U8(34)


def _bytes(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)


_NULL, _TRUE, _FALSE = _bytes(b"null"), _bytes(b"true"), _bytes(b"false")
_NAN, _INFINITY, _MINUS_INFINITY = _bytes(b"NaN"), _bytes(b"Infinity"), _bytes(b"-Infinity")
#: What follows a backslash within a text; the last is the only one that JSON lacks.
_ESCAPED = _bytes(b"bfnrt\\v")
#: A date and time, with zeros for digits; a date is its first part.
_MOMENT = _bytes(b"0000-00-00 00:00:00")
_DATE_SIZE = 10
_POINT_ZERO, _CONTROL, _VERTICAL = _bytes(b".0"), _bytes(b"\\u00"), _bytes(b"\\u000b")
_COPY_HEADER = b"\x0a\x04copy\x12"
_COPY_SIZE = len(_COPY_HEADER)
#: Digits of the largest number of a row.
_DIGITS = 20
#: For words of eight bytes: each byte is 1, a space, a quote, a backslash, or has its highest bit.
_EACH, _HIGHEST = U64(0x0101010101010101), U64(0x8080808080808080)
_SPACES, _QUOTES, _BACKSLASHES = U64(32) * _EACH, U64(34) * _EACH, U64(92) * _EACH
_WORD = U64(8)
#: By byte: 0 = as it is, 1 = ends a value, 2 = needs an escape.
_SPECIAL = np.zeros(256, np.uint8)
_SPECIAL[:0x20] = 2
_SPECIAL[[9, 10]] = 1  # tab and newline
_SPECIAL[[34, 92]] = 2


@inner
def _value_end(raw: Bytes, at: int) -> int:
    here = U64(at)
    while _SPECIAL[raw[here]] != 1:
        here += ONE
    return _signed(here)


@inner
def _clean_end(raw: Bytes, at: U64) -> U64:
    """Return the offset of the first byte that is not as it is: eight at once, as far as they are."""
    end = U64(len(raw))
    while at + _WORD <= end:
        word = U64(0)
        for index in range(8):
            word |= U64(raw[at + U64(index)]) << U64(8 * index)
        quotes, backslashes = word ^ _QUOTES, word ^ _BACKSLASHES
        # A byte below a limit borrows from the highest bit, and may from the next byte: only after one.
        below = (
            (word - _SPACES) & ~word
            | (quotes - _EACH) & ~quotes
            | (backslashes - _EACH) & ~backslashes
        )
        if below & _HIGHEST:
            break
        at += _WORD
    while _SPECIAL[raw[at]] == 0:
        at += ONE
    return at


@inner
def _count_up(digits: Bytes, first: int) -> int:
    """Add one to a number in digits that end with the array; returns the offset of its first digit."""
    at = _DIGITS - 1
    while at >= first and digits[at] == 57:  # 9
        digits[at] = 48
        at -= 1
    if at < first:
        digits[at] = 49
        return at
    digits[at] += U8(1)
    return first


@inner
def _equals(raw: Bytes, start: int, end: int, text: Bytes) -> bool:
    if end - start != len(text):
        return False
    same = True
    for index in range(len(text)):
        same = same and raw[start + index] == text[index]
    return same


@inner
def _skip_digits(raw: Bytes, at: int) -> int:
    """Return the offset after the digits; the end of a value is not one."""
    here = U64(at)
    while 48 <= raw[here] <= 57:
        here += ONE
    return _signed(here)


@inner
def _whole_end(raw: Bytes, at: int) -> int:
    """Return the offset after a whole number as JSON has it, or -1."""
    if raw[at] == 45:  # -
        at += 1
    after = _skip_digits(raw, at)
    if after == at or (raw[at] == 48 and after > at + 1):
        return -1
    return after


@inner
def _put_text(out: Bytes, at: int, raw: Bytes, done: int) -> tuple[int, int]:
    """Write a text; COPY escapes as JSON does, but for quotes and some control characters.

    The first offset is -1 for an escape that COPY does not have, and for a control character that it
    would have escaped.
    """
    out[at] = _QUOTE
    at += 1
    while True:
        clean = _signed(_clean_end(raw, U64(done)))
        _copy(out, U64(at), raw, U64(done), U64(clean - done))
        at += clean - done
        done = clean
        byte = raw[done]
        if _SPECIAL[byte] == 1:
            out[at] = _QUOTE
            return at + 1, done
        if byte == _BACKSLASH:
            known = False
            for index in range(len(_ESCAPED)):
                known = known or raw[done + 1] == _ESCAPED[index]
            if not known:
                return -1, done
            if raw[done + 1] == 118:  # v
                at = _put(out, at, _VERTICAL)
            else:
                out[at], out[at + 1] = byte, raw[done + 1]
                at += 2
            done += 2
            continue
        if byte == _QUOTE:
            out[at], out[at + 1] = _BACKSLASH, byte
        elif byte == 8 or byte == 12 or byte == 13:
            return -1, done
        else:
            at = _put(out, at, _CONTROL)
            out[at], out[at + 1] = _HEX[byte >> 4], _HEX[byte & 15]
        at += 2
        done += 1


@inner
def _put_float(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    """Write a number with a point or an exponent, or the name of one; -1 if it is neither."""
    named = (
        _equals(raw, start, end, _NAN)
        or _equals(raw, start, end, _INFINITY)
        or _equals(raw, start, end, _MINUS_INFINITY)
    )
    pointed = False
    if not named:
        done = _whole_end(raw, start)
        if done >= 0 and raw[done] == 46:  # .
            pointed, before = True, done + 1
            done = _skip_digits(raw, before)
            if done == before:
                return -1
        if done >= 0 and raw[done] == 101:  # e
            if raw[done + 1] != 43 and raw[done + 1] != 45:  # + and -
                return -1
            pointed, before = True, done + 2
            done = _skip_digits(raw, before)
            if done == before:
                return -1
        if done != end:
            return -1
    if named:
        out[at] = _QUOTE
        at += 1
    _copy(out, U64(at), raw, U64(start), U64(end - start))
    at += end - start
    if named:
        out[at] = _QUOTE
        return at + 1
    return at if pointed else _put(out, at, _POINT_ZERO)


@inner
def _put_moment(out: Bytes, at: int, raw: Bytes, start: int, end: int, kind: int) -> int:
    """Write a date or time of the years 1 to 9999; -1 if it is another."""
    size = end - start
    zone = kind == TIMESTAMPTZ
    if zone:
        if size < 3 or raw[end - 3] != 43 or raw[end - 2] != 48 or raw[end - 1] != 48:  # +00
            return -1
        size -= 3
    fixed = _DATE_SIZE if kind == DATE else len(_MOMENT)
    if size < fixed:
        return -1
    for index in range(fixed):
        byte, wanted = raw[start + index], _MOMENT[index]
        if wanted == 48:
            if byte < 48 or byte > 57:
                return -1
        elif byte != wanted:
            return -1
    if size > fixed:  # a point and digits
        point = start + fixed
        if kind == DATE or raw[point] != 46 or size == fixed + 1:
            return -1
        if _skip_digits(raw, point + 1) != start + size:
            return -1
    out[at] = _QUOTE
    _copy(out, U64(at + 1), raw, U64(start), U64(size))
    if kind != DATE:
        out[at + 11] = 84  # T
    at += 1 + size
    if zone:
        out[at] = 90  # Z
        at += 1
    out[at] = _QUOTE
    return at + 1


@inner
def _nibble(digit: U8) -> int:
    return _signed(U64(digit)) - (48 if digit < 58 else 87)


@inner
def _put_bytea(out: Bytes, at: int, raw: Bytes, start: int, end: int) -> int:
    """Write bytes, given as a backslash, an x and hexadecimal digits, in base64; else -1."""
    if end - start < 2 or (end - start) % 2 == 1:
        return -1
    if raw[start] != _BACKSLASH or raw[start + 1] != 120:  # x
        return -1
    for offset in range(start + 2, end):
        digit = raw[offset]
        if not (48 <= digit <= 57 or 97 <= digit <= 102):
            return -1
    out[at] = _QUOTE
    at += 1
    done = start + 2
    while done < end:
        left = (end - done) // 2
        word = np.int64(0)
        for index in range(min(left, 3)):
            byte = _nibble(raw[done + 2 * index]) << 4 | _nibble(raw[done + 2 * index + 1])
            word |= byte << (16 - 8 * index)
        out[at] = _BASE64[word >> 18]
        out[at + 1] = _BASE64[(word >> 12) & 63]
        out[at + 2] = _BASE64[(word >> 6) & 63] if left > 1 else 61
        out[at + 3] = _BASE64[word & 63] if left > 2 else 61
        at += 4
        done += 6
    out[at] = _QUOTE
    return at + 1


@inner
def _put_typed(out: Bytes, at: int, raw: Bytes, start: int, end: int, kind: int) -> int:
    """Write a value that is neither a text nor null; -1 if it cannot. A byte must follow `end`."""
    if kind == NUMBER:
        if _whole_end(raw, start) != end:
            return -1
        _copy(out, U64(at), raw, U64(start), U64(end - start))
        return at + end - start
    if kind == BOOL:
        if end - start != 1 or (raw[start] != 116 and raw[start] != 102):  # t and f
            return -1
        return _put(out, at, _TRUE if raw[start] == 116 else _FALSE)  # t
    if kind == FLOAT:
        return _put_float(out, at, raw, start, end)
    if kind == BYTEA:
        return _put_bytea(out, at, raw, start, end)
    return _put_moment(out, at, raw, start, end, kind)


@inner
def _put_value(out: Bytes, at: int, raw: Bytes, start: int, kind: int) -> tuple[int, int]:
    """Write the value at `start`; returns the offsets after it, the first of them -1 if it cannot."""
    if raw[start] == _BACKSLASH and raw[start + 1] == 78 and _SPECIAL[raw[start + 2]] == 1:  # N
        return _put(out, at, _NULL), start + 2
    if kind == TEXT:
        return _put_text(out, at, raw, start)
    end = _value_end(raw, start)
    if kind == BYTEA:
        if raw[start] != _BACKSLASH:
            return -1, end
        start += 1  # COPY escapes the backslash
    return _put_typed(out, at, raw, start, end, kind), end


@inner
def _put_body(
    out: Bytes, raw: Bytes, at: int, kinds: Bytes, keys: Bytes, texts: Bytes, offsets: Offsets
) -> tuple[int, int]:
    """Write the body for the line at `at`; returns its size, or -1, and the offset of the next line."""
    size, key = 0, 0
    for column in range(len(kinds)):
        start, stop = offsets[column], offsets[column + 1]
        _copy(out, U64(size), texts, U64(start), U64(stop - start))
        before = at
        size, at = _put_value(out, size + stop - start, raw, at, _signed(U64(kinds[column])))
        if keys[column]:
            key += at - before
        if size < 0 or raw[at] != (9 if column + 1 < len(kinds) else 10):  # tab or newline
            return -1, at
        at += 1
    if key > KEY_BYTES_MAX:
        return -1, at
    start, stop = offsets[len(kinds)], offsets[len(kinds) + 1]
    _copy(out, U64(size), texts, U64(start), U64(stop - start))
    return size + stop - start, at


@kernel
def encode_lines(
    raw: Bytes,
    at: int,
    kinds: Bytes,
    keys: Bytes,
    texts: Bytes,
    offsets: Offsets,
    headers: Bytes,
    digits: Bytes,
    first: int,
    records: int,
    room: int,
    overhead: int,
    body: Bytes,
    out: Bytes,
) -> tuple[int, int, int, int, int, int]:
    """Write records for whole lines from `at` on: at most `records`, of `room` metered bytes.

    `digits` end with the number of the first row, from `first` on; `headers` are tags and bytes before
    such a number, and its length.
    Returns the offset of the next line, the records, their metered size and encoded size, and the
    offsets of the last line and its record, or -1.
    """
    done, metered, size, line, last = 0, 0, 0, -1, -1
    while at < len(raw):
        if done == records:
            break
        length, after = _put_body(body, raw, at, kinds, keys, texts, offsets)
        if length < 0:
            break
        width = _DIGITS - first
        weight = overhead + width + length
        if metered + weight > room:
            break
        line, last = at, size
        whole = len(headers) + 1 + width + 1 + _varint_size(U64(length)) + length
        out[size] = RECORDS
        size = _put_varint(out, size + 1, U64(whole))
        _copy(out, U64(size), headers, U64(0), U64(len(headers)))
        size += len(headers)
        out[size - _COPY_SIZE - 1] = U8(_COPY_SIZE + 1 + width)
        out[size] = U8(width)
        _copy(out, U64(size + 1), digits, U64(first), U64(width))
        size += 1 + width
        first = _count_up(digits, first)
        out[size] = APPEND_BODY
        size = _put_varint(out, size + 1, U64(length))
        _copy(out, U64(size), body, U64(0), U64(length))
        size += length
        done += 1
        metered += weight
        at = after
    return at, done, metered, size, line, last


class Written(NamedTuple):
    """The outcome of one call of the kernel."""

    #: Offset of the next line; unless none is left, it does not fit, or the kernel cannot write it.
    next: int
    records: int
    metered: int
    #: Bytes of the room that are used.
    size: int
    #: Offsets of the last line that was written, and of its record; -1 if none was.
    line: int
    last: int


class LineWriter:
    """Writes lines of one table; `out` has room for one batch."""

    def __init__(
        self,
        columns: Sequence[tuple[bytes, int, bool]],
        closing: bytes,
        header: bytes,
        overhead: int,
    ) -> None:
        """`columns` are the JSON before each value, its type, and whether it is part of the key.

        `header` is an encoded header.
        `overhead` is the metered size of a record beside its body and the digits of its number.
        """
        texts = [*(text for text, _, _ in columns), closing]
        self._kinds = np.array([KINDS.get(oid, TEXT) for _, oid, _ in columns], np.uint8)
        self._keys = np.array([is_key for _, _, is_key in columns], np.uint8)
        self._texts = _bytes(b"".join(texts))
        self._offsets = np.array([0, *accumulate(map(len, texts))], np.int64)
        # The kernel writes the length of the second header.
        self._headers = _bytes(header + bytes((APPEND_HEADERS, 0)) + _COPY_HEADER)
        self._overhead = overhead
        self._digits = np.empty(_DIGITS, np.uint8)
        self._body = np.empty(0, np.uint8)
        self.out = np.empty(BATCH_BYTES_MAX + RECORD_GROWTH * BATCH_RECORDS_MAX, np.uint8)

    def write(
        self, lines: bytes, at: int, *, number: int, records: int, room: int, used: int = 0
    ) -> Written:
        """Write records of whole lines from `at` on to `out`, after what is used of it.

        The first is row `number`.
        """
        need = GROWTH * len(lines) + VALUE_BYTES * len(self._kinds) + len(self._texts)
        if len(self._body) < need:
            self._body = np.empty(need, np.uint8)
        digits = b"%d" % number
        first = _DIGITS - len(digits)
        self._digits[first:] = _bytes(digits)
        found = encode_lines(
            _bytes(lines), at, self._kinds, self._keys, self._texts, self._offsets, self._headers,
            self._digits, first, records, room, self._overhead, self._body, self.out[used:],
        )  # fmt: skip
        return Written(*found)
