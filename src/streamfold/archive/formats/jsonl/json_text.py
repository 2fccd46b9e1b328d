"""Encodes columns as JSON text, one text per row, using only column operations.

Numbers are exact: integers in full, decimals as strings with all their digits, floats in the
shortest form that reads back as the same double. docs/reference/archive-format.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.conforming import (
    as_list,
    build_list,
    list_lengths,
    nulls_of,
    struct_children,
    values_of,
)
from streamfold.archive.formats.jsonl.json_values import encode_base64
from streamfold.archive.schema import is_decimal

#: First and last instant that RFC 3339 can express, in microseconds since 1970, and likewise days.
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
#: Nanoseconds end in 1677 and 2262. Parsers that count whole seconds first overflow at the very
#: start.
_FIRST_NS, _LAST_NS = -9_223_372_036_000_000_000, (1 << 63) - 1

#: Bytes that must be escaped inside a JSON string, and their escapes.
_ESCAPES = {0x5C: "\\\\", 0x22: '\\"', 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"} | {
    byte: f"\\u{byte:04x}" for byte in range(0x20) if byte not in (0x0A, 0x0D, 0x09)
}
_LINE_END, _BRACE = ord("\n"), ord("{")
_SPECIAL = np.isin(np.arange(256), list(_ESCAPES))


def join(*parts: str | pa.Array) -> pa.Array:
    """Return the parts of each row concatenated, or null where a part is null."""
    return pc.binary_join_element_wise(*parts, "")


def object_text(fields: Sequence[pa.Field], columns: Sequence[pa.Array]) -> pa.Array:
    """Return `{"name":value,...}` for every row, in the order of the fields, with nulls as null."""
    parts: list[str | pa.Array] = []
    pending = "{"
    for field, column in zip(fields, columns, strict=True):
        before, text, after = _dressed(column)
        parts += [f"{pending}{_name(field.name)}:{before}", text]
        pending = f"{after},"
    return join(*parts, pending[:-1] + "}")


def array_text(columns: Sequence[pa.Array]) -> pa.Array:
    """Return `[value,...]` for every row."""
    parts: list[str | pa.Array] = []
    pending = "["
    for column in columns:
        before, text, after = _dressed(column)
        parts += [pending + before, text]
        pending = f"{after},"
    return join(*parts, pending[:-1] + "]")


def value_text(column: pa.Array) -> pa.Array:
    """Return every value's JSON text, with null as null."""
    before, text, after = _dressed(column)
    return join(before, text, after) if before else text


def plain_text(column: pa.Array) -> tuple[pa.Array, bool]:
    """Return every value's text without quotes and escapes, and whether JSON quotes it."""
    kind, types = column.type, pa.types
    if types.is_string(kind):
        return column, True
    if types.is_binary(kind):
        return encode_base64(column), True
    if is_decimal(kind):
        return _decimal_text(column), True
    if types.is_temporal(kind):
        return _temporal_text(column), True
    if types.is_floating(kind):
        return _float_text(column), False
    return column.cast(pa.string()), False


def key_text(key: pa.Array) -> pa.Array:
    """Return each key's text. For several fields it is a JSON array, so no two keys look alike."""
    children = struct_children(key)
    text = plain_text(children[0])[0] if len(children) == 1 else array_text(children)
    return pc.if_else(key.is_valid(), text, None)


def _name(name: str) -> str:
    return msgspec.json.encode(name).decode()


def _dressed(column: pa.Array) -> tuple[str, pa.Array, str]:
    """Return text without nulls, and the quotes to put around each value."""
    if pa.types.is_nested(column.type):
        return "", _filled(_nested_text(column)), ""
    text, quoted = plain_text(column)
    if not quoted:
        return "", _filled(text), ""
    if pa.types.is_string(column.type):
        text = _escaped(text)
    return ('"', text, '"') if not text.null_count else ("", _filled(join('"', text, '"')), "")


def _filled(text: pa.Array) -> pa.Array:
    return pc.fill_null(text, "null") if text.null_count else text


def _nested_text(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_struct(kind):
        text = object_text(list(kind), struct_children(column))
        return pc.if_else(column.is_valid(), text, None) if column.null_count else text
    lists = as_list(column)
    values = lists.flatten()
    if pa.types.is_map(kind):
        keys, items = values.field(0), values.field(1)
        texts, (opening, closing) = join(value_text(keys), ":", value_text(items)), "{}"
    else:
        texts, (opening, closing) = value_text(values), "[]"
    grouped = build_list(list_lengths(lists), texts, pa.list_(pa.string()), nulls_of(column))
    return join(opening, pc.binary_join(grouped, ","), closing)


def _escaped(text: pa.Array) -> pa.Array:
    """Return the text with JSON escapes. Most columns need none and are returned unchanged."""
    data, _ = values_of(text)
    special = data[_SPECIAL[data]]
    if not len(special):
        return text
    present = set(np.unique(special).tolist())
    for byte, escape in _ESCAPES.items():  # the backslash comes first, or it would be escaped twice
        if byte in present:
            text = pc.replace_substring(text, chr(byte), escape)
    return text


def _float_text(column: pa.Array) -> pa.Array:
    """Return floats as text. A float32 is written as the equal double, which readers get exactly."""
    doubles = column.cast(pa.float64())
    text = doubles.cast(pa.string())
    # Without a point, many readers would take it for an integer and lose its sign.
    text = pc.if_else(pc.equal(text, "-0"), "-0.0", text)
    if pc.all(pc.is_finite(doubles)).as_py() is not False:
        return text
    text = pc.if_else(pc.is_nan(doubles), '"NaN"', text)
    text = pc.if_else(pc.equal(doubles, float("inf")), '"Infinity"', text)
    return pc.if_else(pc.equal(doubles, float("-inf")), '"-Infinity"', text)


def _decimal_text(column: pa.Array) -> pa.Array:
    """Return all digits in plain notation. Arrow writes small values with an exponent."""
    text = column.cast(pa.string())
    if not pc.any(pc.match_substring(text, "E")).as_py():
        return text
    scale = column.type.scale
    digits = _unscaled_text(column)
    sign = pc.if_else(pc.starts_with(digits, "-"), "-", "")
    digits = pc.utf8_lpad(pc.utf8_ltrim(digits, "-"), scale + 1, "0")
    whole = pc.utf8_slice_codeunits(digits, 0, -scale)
    return join(sign, whole, ".", pc.utf8_slice_codeunits(digits, -scale, None))


def _unscaled_text(column: pa.Array) -> pa.Array:
    make = pa.decimal128 if column.type.bit_width == 128 else pa.decimal256
    kind = make(column.type.precision, 0)
    buffers = column.buffers()
    whole = pa.Array.from_buffers(kind, len(column), buffers, -1, column.offset)
    return whole.cast(pa.string())


def _temporal_text(column: pa.Array) -> pa.Array:
    """Return RFC 3339 text. Days and instants beyond its range become digits counted from 1970."""
    kind = column.type
    if pa.types.is_time(kind):
        return column.cast(pa.string())
    if pa.types.is_date(kind):
        text, numbers = column.cast(pa.string()), column.cast(pa.int32())
        return _within(text, numbers, _FIRST_DAY, _LAST_DAY)
    text = column.cast(pa.timestamp(kind.unit)).cast(pa.string())
    text = pc.binary_replace_slice(text, 10, 11, "T")
    if kind.tz:
        text = join(text, "Z")
    limits = (_FIRST_US, _LAST_US) if kind.unit == "us" else (_FIRST_NS, _LAST_NS)
    return _within(text, column.cast(pa.int64()), *limits)


def _within(text: pa.Array, numbers: pa.Array, first: int, last: int) -> pa.Array:
    if not len(numbers) or numbers.null_count == len(numbers):
        return text
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] >= first and bounds["max"] <= last:
        return text
    inside = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    return pc.if_else(inside, text, numbers.cast(pa.string()))


def begin_as_objects(lines: bytes) -> bool:
    """Return whether every line begins with a brace, as Arrow's reader requires.

    The reader takes a line `null` for a row, and the process aborts if that is the first line it
    reads (upstream defect 23).
    """
    data = np.frombuffer(lines, np.uint8)
    starts = np.flatnonzero(data[:-1] == _LINE_END) + 1
    return lines[:1] == b"{" and bool((data[starts] == _BRACE).all())
