"""Columns as google.protobuf.Struct messages, one per row, and back, by column operations.

Struct knows null, bool, double, text, lists and objects. What a double cannot hold exactly is text:
integers beyond 2^53 in digits, as protobuf's own JSON mapping has them, the rest as in JSON Lines.

Writers nearly always give every row the same names in the same order. Then all rows of a block can
be read at once, name by name, with array operations. Irregular rows, and those with nested values,
are left to the slower way, which handles every legal form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.conforming import (
    as_list,
    build_list,
    list_lengths,
    nulls_of,
    struct_children,
)
from streamfold.archive.formats.jsonl.json_text import plain_text
from streamfold.archive.formats.jsonl.json_values import (
    EXACT_IN_DOUBLE,
    readable_type,
    restored_batch,
)
from streamfold.archive.formats.protobuf.frames import Block
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
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
#: Bytes of padding after a block, so that reading ahead at its end stays within the buffer.
PADDING = 16
#: Bytes of a block that 32-bit offsets and four-byte lengths can address.
BLOCK_MAX = 1 << 28
#: Bytes of a length that are looked at.
LENGTH_BYTES = 4
# Tags of google.protobuf.Value.
NULL, NUMBER, TEXT, TRUTH = 0x08, 0x11, 0x1A, 0x20
_NAME_TAG, _VALUE_TAG = 0x0A, 0x12


def join(*parts: bytes | pa.Array) -> pa.Array:
    """The parts of each row put together; null where a part is null."""
    return pc.binary_join_element_wise(*parts, b"")


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


class IrregularError(Exception):
    """The rows are not all alike, or not of the types that can be read in step."""


@dataclass(frozen=True, slots=True)
class Values:
    """One column: the kind of each value by its tag, and where its content begins and ends."""

    kinds: Bytes
    starts: Offsets
    ends: Offsets


def read_in_step(block: Block, schema: pa.Schema, others_ignored: bool) -> pa.RecordBatch:
    """Return SnapshotRows as columns of the schema.

    Raises `IrregularError`, ArrowInvalid or ValueError where the slower way has to be taken.
    """
    if len(block.data) > BLOCK_MAX:
        raise IrregularError
    data = np.frombuffer(block.data + bytes(PADDING), np.uint8)
    messages = np.array(block.starts), np.array(block.ends)
    _require(data[messages[0]] == _NAME_TAG)
    at, ends = _delimited(data, messages[0] + 1, messages[1])
    _require((at < ends) & (ends == messages[1]))
    found: dict[str, Values] = {}
    while at[0] < ends[0]:
        name, values, at = _next_entry(data, at, ends)
        if name in found:
            raise IrregularError
        found[name] = values
    _require(at == ends)
    if not others_ignored and found.keys() - set(schema.names):
        raise IrregularError
    columns = [_column(data, found.get(f.name), f.type, len(ends)) for f in schema]
    return restored_batch(columns, schema)


def _next_entry(data: Bytes, at: Offsets, ends: Offsets) -> tuple[str, Values, Offsets]:
    """Return the name that all rows have next, its values, and where the entry ends in each row."""
    _require(data[at] == _NAME_TAG)
    start, end = _delimited(data, at + 1, ends)
    _require(data[start] == _NAME_TAG)
    name_start, name_end = _delimited(data, start + 1, end)
    name = data[name_start[0] : name_end[0]]
    _require(name_end - name_start == len(name))
    for offset, byte in enumerate(name):
        _require(data[name_start + offset] == byte)
    _require(data[name_end] == _VALUE_TAG)
    value_start, value_end = _delimited(data, name_end + 1, end)
    _require(value_end == end)
    return name.tobytes().decode(), _values(data, value_start, value_end), end


def _values(data: Bytes, start: Offsets, end: Offsets) -> Values:
    kinds = data[start]
    sizes = end - start
    begins, finishes = start + 1, end.copy()
    texts = kinds == TEXT
    if texts.any():
        first, last = _delimited(data, begins[texts], end[texts])
        _require(last == end[texts])
        begins[texts], finishes[texts] = first, last
    fixed = np.where(kinds == NUMBER, 9, 2)
    known = (kinds == NULL) | (kinds == NUMBER) | (kinds == TRUTH)
    _require(texts | (known & (sizes == fixed)))
    _require((kinds != TRUTH) | (data[begins] <= 1))
    return Values(kinds, begins, finishes)


def _delimited(data: Bytes, at: Offsets, limit: Offsets) -> tuple[Offsets, Offsets]:
    """Return where the contents begin whose lengths are at `at`, and where they end."""
    _require(at < limit)
    length = (data[at] & 0x7F).astype(np.int64)
    width = np.ones(len(at), np.int64)
    more = data[at] >= 0x80
    for byte in range(1, LENGTH_BYTES):
        if not more.any():
            break
        part = data[at + byte]
        length += np.where(more, (part & 0x7F).astype(np.int64) << (7 * byte), 0)
        width += more
        more &= part >= 0x80
    _require(~more)
    start = at + width
    _require(start + length <= limit)
    return start, start + length


def _require(holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        raise IrregularError


def _column(data: Bytes, values: Values | None, kind: pa.DataType, rows: int) -> pa.Array:
    """Return the values in `readable_type(kind)`."""
    if values is None:
        return pa.nulls(rows, readable_type(kind))
    present = set(np.unique(values.kinds).tolist()) - {NULL}
    nulls = values.kinds == NULL
    if pa.types.is_null(kind) and not present:
        return pa.nulls(rows)
    if pa.types.is_boolean(kind) and present <= {TRUTH}:
        return pa.array(data[values.starts] == 1, mask=nulls)
    if pa.types.is_floating(kind) and present <= {NUMBER}:
        return pa.array(_doubles(data, values, nulls), mask=nulls)
    if pa.types.is_integer(kind) and present <= {NUMBER, TEXT}:
        return _integers(data, values, nulls, kind)
    if readable_type(kind) != pa.string() or not present <= {TEXT}:
        raise IrregularError
    return _texts(data, values, nulls).cast(pa.string())


def _doubles(data: Bytes, values: Values, nulls: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    found = data[values.starts[:, None] + np.arange(8)].view("<f8").ravel()
    return np.where(nulls, 0.0, found)


def _integers(
    data: Bytes, values: Values, nulls: npt.NDArray[np.bool_], kind: pa.DataType
) -> pa.Array:
    """Doubles that are whole and exact, and digits where they are not."""
    texts = values.kinds == TEXT
    doubles = np.where(texts, 0.0, _doubles(data, values, nulls))
    _require((np.abs(doubles) <= EXACT_IN_DOUBLE) & (np.floor(doubles) == doubles))
    numbers = pa.array(doubles.astype(np.int64), mask=nulls | texts).cast(kind)
    if not texts.any():
        return numbers
    digits = _texts(data, values, ~texts).cast(pa.string())
    if not pc.all(pc.match_substring_regex(digits, "^-?[0-9]+$")).as_py():
        raise IrregularError
    return pc.coalesce(numbers, digits.cast(kind))


def _texts(data: Bytes, values: Values, nulls: npt.NDArray[np.bool_]) -> pa.Array:
    """Return contents without copying: every second value of a column over the whole block."""
    bounds = np.empty(2 * len(nulls), np.int32)
    bounds[0::2], bounds[1::2] = values.starts, values.ends
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    every = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)
    return every.take(pa.array(np.arange(0, len(bounds), 2), mask=nulls))
