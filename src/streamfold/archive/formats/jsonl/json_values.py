"""Decodes JSON values into typed columns: the inverse of `json_text`, driven by the schema.

Two ways lead to the same columns. `readable_type` is the type requested from Arrow's JSON reader.
`readable_array` builds the same columns from Python values, more slowly but from every legal form.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.conforming import (
    Bytes,
    Lengths,
    as_list,
    build_list,
    build_struct,
    list_lengths,
    nulls_of,
    offsets_of,
    struct_children,
    values_of,
)
from streamfold.archive.schema import is_decimal


def encode_base64(array: pa.Array) -> pa.Array:
    """Return a binary column as base64 text. Nulls stay null."""
    data, lengths = values_of(array)
    groups = -(-lengths // 3)
    padded = np.zeros(int(groups.sum()) * 3, np.uint8)
    padded[_byte_indices(lengths, groups * 3)] = data
    text = np.frombuffer(base64.b64encode(padded.tobytes()), np.uint8).copy()
    ends = np.cumsum(groups * 4)
    short = groups * 3 - lengths
    text[ends[short >= 1] - 1] = ord("=")
    text[ends[short == 2] - 2] = ord("=")
    return _column(text, groups * 4, array, pa.string())


def decode_base64(array: pa.Array) -> pa.Array:
    """Decode a base64 column. Raises ValueError if an encoder would not have written the text."""
    text, lengths = values_of(array)
    if np.any(lengths % 4):
        raise ValueError("base64 text has a length that is not a multiple of four")
    ends = np.cumsum(lengths)[lengths > 0]
    padding = np.zeros(len(lengths), np.int64)
    filled = lengths > 0
    padding[filled] = (text[ends - 1] == ord("=")).astype(np.int64) + (text[ends - 2] == ord("="))
    plain = text.copy()
    plain[ends[padding[filled] >= 1] - 1] = ord("A")
    plain[ends[padding[filled] == 2] - 2] = ord("A")
    decoded = np.frombuffer(base64.b64decode(plain.tobytes(), validate=True), np.uint8)
    sizes = lengths // 4 * 3
    content = decoded[_byte_indices(sizes - padding, sizes)]
    column = _column(content, sizes - padding, array, pa.binary())
    if not encode_base64(column).equals(array):
        raise ValueError("base64 text is not in its one canonical form")
    return column


def _byte_indices(sizes: Lengths, rooms: Lengths) -> Lengths:
    """Return the destination of each value's bytes, at the start of a slot of its own."""
    starts = np.cumsum(rooms) - rooms
    before = np.cumsum(sizes) - sizes
    shifts: Lengths = np.repeat(starts - before, sizes)
    return shifts + np.arange(len(shifts))


def _column(data: Bytes, lengths: Lengths, like: pa.Array, kind: pa.DataType) -> pa.Array:
    buffers = [None, offsets_of(lengths).buffers()[1], pa.py_buffer(np.ascontiguousarray(data))]
    column = pa.Array.from_buffers(kind, len(lengths), buffers)
    return pc.if_else(like.is_valid(), column, None) if like.null_count else column


#: Largest number up to which doubles represent every integer.
EXACT_IN_DOUBLE = 1 << 53
_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class UnreadableError(ValueError):
    """A value does not fit the schema. The format turns this into ArtifactCorruptError."""


def readable_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that JSON itself can hold, from which `restored` makes a value of `kind`."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([readable_field(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(pa.string(), readable_type(kind.item_type))
    if types.is_list(kind):
        return pa.list_(readable_type(kind.value_type))
    if types.is_floating(kind):
        return pa.float64()
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind):
        return kind
    return pa.string()


def readable_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, readable_type(field.type))


def restored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert a column of `readable_type(kind)` to `kind`. Raises ValueError if a text is invalid."""
    if column.type == kind:
        return column
    types = pa.types
    if types.is_struct(kind):
        children = struct_children(column)
        inner = [restored(c, f.type) for c, f in zip(children, kind, strict=True)]
        return build_struct(inner, list(kind), nulls_of(column))
    if types.is_map(kind) or types.is_list(kind):
        return _restored_list(column, kind)
    if types.is_binary(kind):
        return decode_base64(column)
    if types.is_time(kind):
        stamps = _parsed(pc.binary_join_element_wise("1970-01-01T", column, ""), kind.unit)
        return stamps.cast(pa.int64()).cast(kind)
    if types.is_timestamp(kind) or types.is_date(kind):
        return _restored_date(column, kind)
    if types.is_float32(kind):
        return column.cast(kind, safe=False)
    return column.cast(kind)


def _restored_list(column: pa.Array, kind: pa.DataType) -> pa.Array:
    lists = as_list(column)
    values = lists.flatten()
    if pa.types.is_map(kind):
        items = restored(values.field(1), kind.item_type)
        inner = build_struct([values.field(0), items], [kind.key_field, kind.item_field], None)
    else:
        inner = restored(values, kind.value_type)
    return build_list(list_lengths(lists), inner, kind, nulls_of(column))


def _parsed(column: pa.Array, unit: str) -> pa.Array:
    return column.cast(pa.timestamp(unit))


def _restored_date(column: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        numbers = pc.match_substring_regex(column, "^-?[0-9]+$")
        if not pc.any(numbers).as_py():
            raise
    texts = pc.if_else(numbers, None, column).cast(kind)
    width = pa.int32() if pa.types.is_date(kind) else pa.int64()
    counts = pc.if_else(numbers, column, None).cast(width).cast(kind)
    return pc.coalesce(texts, counts)


def readable_array(values: Sequence[Any], kind: pa.DataType, path: str) -> pa.Array:
    """Convert decoded JSON values to `readable_type(kind)`. Raises UnreadableError naming the path."""
    types = set(map(type, values)) - {type(None)}
    try:
        if pa.types.is_nested(kind):
            return _readable_nested(values, kind, types, path)
        if types <= _natural(kind):
            return pa.array(values, readable_type(kind))
        made = [None if value is None else _converted(value, kind) for value in values]
        return pa.array(made, readable_type(kind))
    except (pa.ArrowInvalid, OverflowError) as error:
        raise UnreadableError(f"{path}: {error}") from None
    except TypeError as error:
        raise UnreadableError(f"{path}: {error} where the schema says {kind}") from None


def _natural(kind: pa.DataType) -> set[type]:
    """Return the Python types to which values of this type decode in nearly all files."""
    if pa.types.is_boolean(kind):
        return {bool}
    if pa.types.is_integer(kind):
        return {int}
    return {float} if pa.types.is_floating(kind) else {str}


def _readable_nested(
    values: Sequence[Any], kind: pa.DataType, types: set[type], path: str
) -> pa.Array:
    if not types <= ({list} if pa.types.is_list(kind) else {dict}):
        raise TypeError(_names(types))
    nulls = pa.array([value is None for value in values], pa.bool_())
    if pa.types.is_struct(kind):
        return _readable_struct([value or {} for value in values], kind, nulls, path)
    lengths = np.array([len(value or ()) for value in values], np.int64)
    if pa.types.is_list(kind):
        flat = [item for value in values if value for item in value]
        return build_list(
            lengths, readable_array(flat, kind.value_type, path), readable_type(kind), nulls
        )
    keys = pa.array([key for value in values if value for key in value], pa.string())
    flat = [item for value in values if value for item in value.values()]
    items = readable_array(flat, kind.item_type, path)
    entries = pa.StructArray.from_arrays([keys, items], ["key", "value"])
    return build_list(lengths, entries, readable_type(kind), nulls)


def _readable_struct(
    values: Sequence[dict[str, Any]], kind: pa.DataType, nulls: pa.Array, path: str
) -> pa.Array:
    fields = {field.name for field in kind}
    if unknown := {name for value in values for name in value if name not in fields}:
        raise UnreadableError(f"{path}: fields {sorted(unknown)} are not in the schema")
    children = [
        readable_array([value.get(f.name) for value in values], f.type, f"{path}.{f.name}")
        for f in kind
    ]
    return build_struct(children, list(readable_type(kind)), nulls)


def _names(types: set[type]) -> str:
    return " and ".join(sorted(kind.__name__ for kind in types))


def _converted(value: Any, kind: pa.DataType) -> Any:
    """Convert a value in one of the rarer forms. Raises TypeError if it has no such meaning."""
    if not isinstance(value, bool):
        if pa.types.is_integer(kind):
            return _integer(value)
        if pa.types.is_floating(kind):
            return _float(value)
        if isinstance(value, str):
            return value
        if is_decimal(kind) and isinstance(value, int | float):
            return repr(value)
    raise TypeError(type(value).__name__)


def _integer(value: object) -> int:
    """Convert to an integer. Accepts doubles and strings, for writers that lack integers."""
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_IN_DOUBLE:
        return int(value)
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii():
        return int(value)
    raise TypeError(f"{value!r}, which is not an exact integer,")


def _float(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value in _SPECIAL_FLOATS:
        return _SPECIAL_FLOATS[value]
    raise TypeError(f"{value!r}, which is not a number,")


def columns_of(
    rows: Sequence[dict[str, Any]], schema: pa.Schema, others_ignored: bool
) -> pa.RecordBatch:
    """Return the rows under `schema`. Raises UnreadableError if a value or a name does not fit it."""
    if not others_ignored:
        names = set(schema.names)
        if unknown := {name for row in rows for name in row if name not in names}:
            raise UnreadableError(f"fields {sorted(unknown)} are not in the schema")
    columns = [
        readable_array([row.get(field.name) for row in rows], field.type, field.name)
        for field in schema
    ]
    return restored_batch(columns, schema)


def restored_batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Convert columns of readable types to the schema's types."""
    made = [restored(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(made, schema=schema)
