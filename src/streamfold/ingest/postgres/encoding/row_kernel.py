"""Kernels that write a row of pgoutput as the body of a record; importing this module needs numba.

They check every value, and understand what nearly all of them look like. For any other message they
return -1: `RowEncoder` writes the same bytes, or says what is wrong. See
`streamfold.records.record_kernel` for the rules of numba.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from streamfold.ingest.postgres.encoding.copy_kernel import TEXT, _bytes, _put_typed
from streamfold.records.compiling import inner
from streamfold.records.json_kernel import _put, _put_text
from streamfold.records.record_kernel import (
    U8,
    U64,
    Bytes,
    Offsets,
    Values,
    _copy,
    _signed,
)

#: Columns of `Layout.tables`.
T_STREAM, T_COLUMN, T_KEY, T_TEXT, T_INDEX, TABLE_FIELDS = range(6)
#: Texts of a table before those of its columns: how bodies of inserts, updates and deletes begin.
OPENINGS = 3
#: Instead of a table: it is not followed, or `ChangeRecords` must see the message.
NOT_FOLLOWED, NOT_DESCRIBED = -1, -2
#: Kinds of messages, and of rows in them.
INSERT, UPDATE, DELETE = U8(73), U8(85), U8(68)
NEW_ROW, OLD_KEY, OLD_ROW = U8(78), U8(75), U8(79)
#: Bytes before the first row of a message: its kind and its relation.
ROWS_AT = 5
#: Bytes that a body may have for one of its message, because a value of the old row may be in all
#: images, and be written with six bytes for one; the number of images; bytes for a column in each
#: beside its texts; and beside.
GROWTH, IMAGES, VALUE_BYTES, BODY_BYTES = 18, 3, 8, 128
#: Bytes that must follow the messages: values are read up to the byte after them.
PADDING: Final = bytes(4)

#: Images of a body, in order.
_KEY_IMAGE, _NEW_IMAGE, _OLD_IMAGE = range(IMAGES)
_NULL_SIZE, _UNCHANGED_SIZE = -1, -2
_QUOTE, _COMMA, _CLOSE = U8(34), U8(44), U8(125)
_NULL, _BRACKET = _bytes(b"null"), _bytes(b"]")
_AFTER, _BEFORE = _bytes(b',"after":{'), _bytes(b',"before":{')
_UNCHANGED = _bytes(b',"unchanged":[')


class Layout(NamedTuple):
    """The tables that PostgreSQL has described."""

    #: Number of a relation, in order, and its table.
    relations: Offsets
    #: And one row more: columns, keys and texts of a table end where those of the next start.
    tables: Offsets
    #: By table: LSN of the last change in its stream; T_INDEX is its index.
    positions: Values
    #: By column.
    kinds: Bytes
    #: Columns of keys, counted within their tables.
    keys: Offsets
    texts: Bytes
    text_offsets: Offsets


class Scratch(NamedTuple):
    """Room to work in."""

    #: For one body.
    body: Bytes
    #: Offsets and sizes of the values of the new and the old row.
    starts: Offsets
    sizes: Offsets


@inner
def _number(raw: Bytes, at: int, size: int) -> U64:
    value = U64(0)
    for offset in range(at, at + size):
        value = value << U64(8) | U64(raw[offset])
    return value


@inner
def _read_row(raw: Bytes, at: int, end: int, count: int, starts: Offsets, sizes: Offsets) -> int:
    """Fill where the values of the row at `at` are; returns the offset after it, or -1."""
    if at + 2 > end or _signed(_number(raw, at, 2)) != count:
        return -1
    at += 2
    for column in range(count):
        if at >= end:
            return -1
        kind = raw[at]
        at += 1
        if kind == 116:  # t
            if at + 4 > end:
                return -1
            size = _signed(_number(raw, at, 4))
            at += 4
            if size > end - at:
                return -1
            starts[column], sizes[column] = at, size
            at += size
        elif kind == 110:  # n
            sizes[column] = _NULL_SIZE
        elif kind == 117:  # u
            sizes[column] = _UNCHANGED_SIZE
        else:
            return -1
    return at


@inner
def _put_named(out: Bytes, at: int, layout: Layout, text: int) -> int:
    """Write one of the texts of the layout."""
    start, size = (
        layout.text_offsets[text],
        layout.text_offsets[text + 1] - layout.text_offsets[text],
    )
    _copy(out, U64(at), layout.texts, U64(start), U64(size))
    return int(at + size)


@inner
def _column_count(layout: Layout, table: int) -> int:
    return int(layout.tables[table + 1, T_COLUMN] - layout.tables[table, T_COLUMN])


@inner
def _put_image(
    out: Bytes, at: int, raw: Bytes, layout: Layout, table: int, starts: Offsets, sizes: Offsets,
    of_key: bool,
) -> int:  # fmt: skip
    """Write the values that were sent, or the key, and a brace; -1 if one cannot be written."""
    first, written = layout.tables[table, T_KEY], 0
    count = layout.tables[table + 1, T_KEY] - first if of_key else _column_count(layout, table)
    for order in range(count):
        column = layout.keys[first + order] if of_key else order
        start, size = starts[column], sizes[column]
        if size == _UNCHANGED_SIZE and not of_key:
            continue
        if written:
            out[at] = _COMMA
            at += 1
        written += 1
        at = _put_named(out, at, layout, layout.tables[table, T_TEXT] + OPENINGS + column)
        kind = _signed(U64(layout.kinds[layout.tables[table, T_COLUMN] + column]))
        if size < 0:
            at = _put(out, at, _NULL)
        elif kind == TEXT:
            out[at] = _QUOTE
            at = _put_text(out, at + 1, raw, start, start + size)
            if at >= 0:
                out[at] = _QUOTE
                at += 1
        else:
            at = _put_typed(out, at, raw, start, start + size, kind)
        if at < 0:
            return -1
    out[at] = _CLOSE
    return at + 1


@inner
def _put_unchanged(out: Bytes, at: int, layout: Layout, table: int, sizes: Offsets) -> int:
    """Write the names of columns whose values were not sent, if there are any."""
    written = 0
    for column in range(_column_count(layout, table)):
        if sizes[column] != _UNCHANGED_SIZE:
            continue
        if written:
            out[at] = _COMMA
            at += 1
        else:
            at = _put(out, at, _UNCHANGED)
        written += 1
        name = layout.tables[table, T_TEXT] + OPENINGS + column
        at = _put_named(out, at, layout, name) - 1  # without the colon
    return _put(out, at, _BRACKET) if written else at


@inner
def _read_images(
    raw: Bytes, at: int, end: int, layout: Layout, table: int, starts: Offsets, sizes: Offsets
) -> int:
    """Fill where the values of new and old row are; returns the kind of the old one, 0 or -1."""
    count, kind = _column_count(layout, table), raw[at]
    at += ROWS_AT
    if at >= end:
        return -1
    old = 0
    if kind != INSERT and (raw[at] == OLD_KEY or raw[at] == OLD_ROW):
        old = _signed(U64(raw[at]))
        at = _read_row(raw, at + 1, end, count, starts[1], sizes[1])
        if at < 0:
            return -1
    if kind == DELETE:
        return old if old and at == end else -1
    if at >= end or raw[at] != NEW_ROW:
        return -1
    return old if _read_row(raw, at + 1, end, count, starts[0], sizes[0]) == end else -1


@inner
def _put_body(raw: Bytes, at: int, end: int, layout: Layout, table: int, scratch: Scratch) -> int:
    """Write the body for a message, without its transaction; returns its size, or -1."""
    out, starts, sizes = scratch.body, scratch.starts, scratch.sizes
    text, count = layout.tables[table, T_TEXT], _column_count(layout, table)
    names = layout.text_offsets[layout.tables[table + 1, T_TEXT]] - layout.text_offsets[text]
    if GROWTH * (end - at) + IMAGES * (names + VALUE_BYTES * count) + BODY_BYTES > len(out):
        return -1
    old = _read_images(raw, at, end, layout, table, starts, sizes)
    if old < 0:
        return -1
    kind = raw[at]
    if kind == UPDATE and old == OLD_ROW:
        for column in range(count):
            if sizes[0, column] == _UNCHANGED_SIZE:
                starts[0, column], sizes[0, column] = starts[1, column], sizes[1, column]
    size = _put_named(out, 0, layout, text + (0 if kind == INSERT else 1 if kind == UPDATE else 2))
    for image in range(IMAGES):
        if image == _KEY_IMAGE:
            row, wanted = 1 if old else 0, kind != INSERT
        elif image == _NEW_IMAGE:
            row, wanted = 0, kind != DELETE
        else:
            row, wanted = 1, kind == UPDATE and old == OLD_ROW
        if not wanted:
            continue
        if image == _OLD_IMAGE:
            size = _put(out, size, _BEFORE)
        elif image == _NEW_IMAGE and kind == UPDATE:
            size = _put(out, size, _AFTER)
        size = _put_image(
            out, size, raw, layout, table, starts[row], sizes[row], image == _KEY_IMAGE
        )
        if size < 0:
            return -1
    return _put_unchanged(out, size, layout, table, sizes[0]) if kind == UPDATE else size


@inner
def _must_look_up(
    raw: Bytes, at: int, end: int, layout: Layout, table: int, scratch: Scratch
) -> bool:
    """Return whether the message changes a key, and lacks values that only the old row has."""
    if raw[at] != UPDATE or at + ROWS_AT >= end or raw[at + ROWS_AT] != OLD_KEY:
        return False
    missing = _read_images(raw, at, end, layout, table, scratch.starts, scratch.sizes) < 0
    for column in range(_column_count(layout, table)):
        missing = missing or scratch.sizes[0, column] == _UNCHANGED_SIZE
    return missing


@inner
def _table_of(relations: Offsets, wanted: int) -> int:
    low, high = 0, len(relations)
    while low < high:
        middle = (low + high) // 2
        if relations[middle, 0] < wanted:
            low = middle + 1
        else:
            high = middle
    if low < len(relations) and relations[low, 0] == wanted:
        return int(relations[low, 1])
    return NOT_DESCRIBED
