"""Columns as google.protobuf.Struct messages, one per row, by column operations only.

Struct knows null, bool, double, text, lists and objects. What a double cannot hold exactly is text:
integers beyond 2^53 in digits, as protobuf's own JSON mapping has them, the rest as in JSON Lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.jsonl.json_text import plain_text
from streamfold.archive.formats.jsonl.json_values import EXACT_IN_DOUBLE
from streamfold.archive.formats.nesting import (
    as_list,
    build_list,
    list_lengths,
    nulls_of,
    struct_children,
)
from streamfold.records.protobuf import varint

# Tags of google.protobuf.Value, and of the messages around it.
_NULL = b"\x08\x00"
_NUMBER, _STRING, _TRUE, _FALSE, _STRUCT, _LIST = (
    b"\x11",
    b"\x1a",
    b"\x20\x01",
    b"\x20\x00",
    b"\x2a",
    b"\x32",
)
_FIRST, _SECOND = b"\x0a", b"\x12"
_EMPTY = pa.scalar(b"")


def join(*parts: bytes | pa.Array) -> pa.Array:
    """The parts of each row put together; null where a part is null."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def sized(content: pa.Array) -> pa.Array:
    """Every value with its length as a varint before it."""
    lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False)
    distinct, which = np.unique(lengths, return_inverse=True)
    sizes = pa.array([varint(int(length)) for length in distinct], pa.binary())
    return join(sizes.take(pa.array(which)), content)


def struct_message(fields: Sequence[pa.Field], columns: Sequence[pa.Array]) -> pa.Array:
    """A serialized Struct for every row, fields in the order of the schema."""
    entries: list[bytes | pa.Array] = []
    for field, column in zip(fields, columns, strict=True):
        name = field.name.encode()
        head = _FIRST + varint(len(name)) + name + _SECOND
        entries += [_FIRST, sized(join(head, sized(value_message(column))))]
    return join(*entries)


def value_message(column: pa.Array) -> pa.Array:
    """A serialized Value for every row."""
    message = _message(column)
    return pc.fill_null(message, _NULL) if message.null_count else message


def _message(column: pa.Array) -> pa.Array:
    """A serialized Value for every row, null where the column is."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        content = struct_message(list(kind), struct_children(column))
        return join(_STRUCT, sized(pc.if_else(column.is_valid(), content, None)))
    if types.is_list(kind) or types.is_map(kind):
        return _list_message(column)
    if types.is_boolean(kind):
        return pc.if_else(column, _TRUE, _FALSE)
    if types.is_floating(kind):
        return _number(column.cast(pa.float64()))
    if types.is_integer(kind):
        return _integer(column)
    return _text(plain_text(column)[0])


def _list_message(column: pa.Array) -> pa.Array:
    lists = as_list(column)
    values = lists.flatten()
    if pa.types.is_map(column.type):
        keys, items = values.field(0).cast(pa.binary()), values.field(1)
        entry = join(_FIRST, sized(keys), _SECOND, sized(value_message(items)))
        tag, parts = _STRUCT, join(_FIRST, sized(entry))
    else:
        tag, parts = _LIST, join(_FIRST, sized(value_message(values)))
    grouped = build_list(list_lengths(lists), parts, pa.list_(pa.binary()), nulls_of(column))
    return join(tag, sized(pc.binary_join(grouped, b"")))


def _number(doubles: pa.Array) -> pa.Array:
    raw = pa.Array.from_buffers(pa.binary(8), len(doubles), doubles.buffers(), -1, doubles.offset)
    return join(_NUMBER, raw.cast(pa.binary()))


def _text(text: pa.Array) -> pa.Array:
    return join(_STRING, sized(text.cast(pa.binary())))


def _integer(column: pa.Array) -> pa.Array:
    numbers = _number(column.cast(pa.float64(), safe=False))
    if column.type.bit_width < 64:
        return numbers
    exact = pc.less_equal(column, pa.scalar(EXACT_IN_DOUBLE, column.type))
    if pa.types.is_signed_integer(column.type):
        exact = pc.and_(exact, pc.greater_equal(column, pa.scalar(-EXACT_IN_DOUBLE, column.type)))
    if pc.all(exact).as_py() is not False:
        return numbers
    return pc.if_else(exact, numbers, _text(column.cast(pa.string())))
