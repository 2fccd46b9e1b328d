"""Typed protobuf, id `protobuf-typed`: exact values in messages that any language can generate.

streamfold_archive.proto, beside this module, defines the messages. The published messages, id
`protobuf`, support only doubles and text. A file never mixes the two.

Packed fixed-width fields are little-endian arrays on the wire, so nothing is encoded value by
value. A column has exactly one encoding, which reveals nothing about hidden values of null slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import (
    admitted_changes,
    admitted_rows,
    verified,
    verified_rows,
)
from streamfold.archive.formats.conforming import (
    as_list,
    build_list,
    build_struct,
    list_lengths,
    offsets_of,
    struct_children,
    values_of,
)
from streamfold.archive.formats.format import Format, FormatType
from streamfold.archive.formats.protobuf.frames import (
    BATCH,
    END,
    HEADER,
    ContentFrame,
    read_frames,
    write_frame,
)
from streamfold.archive.schema import TableSchema, is_decimal
from streamfold.errors import InvalidError, MalformedError
from streamfold.records.protobuf import DELIMITED, VARINT, delimited, fields, varint
from streamfold.undecodable import UNDECODABLE

VALIDITY, BOOLS, INTS, LONGS, UINTS, ULONGS, FLOATS, DOUBLES, DATA, LENGTHS, CHILDREN = range(1, 12)

_DTYPES: dict[int, np.dtype[Any]] = {
    INTS: np.dtype("<i4"),
    LONGS: np.dtype("<i8"),
    UINTS: np.dtype("<u4"),
    ULONGS: np.dtype("<u8"),
    FLOATS: np.dtype("<f4"),
    DOUBLES: np.dtype("<f8"),
}
Mask = npt.NDArray[np.bool_]
VERSION = 1
ROWS, CHANGES = "rows", "changes"


def tagged(number: int, content: bytes | memoryview) -> bytes:
    """Return a delimited field, or nothing if the content is empty."""
    return delimited(varint(number << 3 | DELIMITED), bytes(content))


def encode_column(column: pa.Array) -> bytes:
    """Return the values as a Column message."""
    kind, types = column.type, pa.types
    valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    head = b"" if valid is None else tagged(VALIDITY, np.packbits(valid, bitorder="little").data)
    if types.is_null(kind):
        return head
    if types.is_struct(kind):
        return head + _children(struct_children(column))
    if types.is_list(kind) or types.is_map(kind):
        lists = as_list(column)
        values = lists.flatten()
        inner = struct_children(values) if types.is_map(kind) else [values]
        return head + _lengths(list_lengths(lists)) + _children(inner)
    if types.is_string(kind) or types.is_binary(kind):
        data, lengths = values_of(column)
        return head + tagged(DATA, np.ascontiguousarray(data).data) + _lengths(lengths)
    if types.is_boolean(kind):
        bits = column.fill_null(False).cast(pa.uint8()).to_numpy(zero_copy_only=False)
        return head + tagged(BOOLS, np.ascontiguousarray(bits).data)
    number = _number_of(kind)
    raw = _fixed(column, valid)
    if number in (INTS, UINTS):
        raw = raw.astype(_DTYPES[number])
    return head + tagged(number, raw.tobytes())


def _children(columns: list[pa.Array]) -> bytes:
    encoded = [encode_column(column) for column in columns]
    tag = varint(CHILDREN << 3 | DELIMITED)
    return b"".join(part for item in encoded for part in (tag, varint(len(item)), item))


def _lengths(lengths: npt.NDArray[np.int64]) -> bytes:
    return tagged(LENGTHS, lengths.astype("<u4").tobytes())


def _number_of(kind: pa.DataType) -> int:
    types = pa.types
    if is_decimal(kind):
        return DATA
    if types.is_floating(kind):
        return FLOATS if types.is_float32(kind) else DOUBLES
    if types.is_unsigned_integer(kind):
        return ULONGS if kind.bit_width == 64 else UINTS
    return LONGS if kind.bit_width == 64 else INTS


def _dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    """Return the dtype of Arrow's buffer for this type."""
    if is_decimal(kind):
        return np.dtype(f"V{kind.bit_width // 8}")
    letter = (
        "f" if pa.types.is_floating(kind) else "u" if pa.types.is_unsigned_integer(kind) else "i"
    )
    return np.dtype(f"<{letter}{kind.bit_width // 8}")


def _fixed(column: pa.Array, valid: Mask | None) -> npt.NDArray[Any]:
    """Return the buffer of a fixed-width column, with zeros for nulls."""
    dtype = _dtype_of(column.type)
    raw = np.frombuffer(column.buffers()[1], dtype, len(column) + column.offset)[column.offset :]
    if valid is None:
        return raw
    zeroed = np.zeros(len(raw), dtype)
    zeroed[valid] = raw[valid]
    return zeroed


class ColumnMessage:
    """The fields of one Column message, located but not yet decoded."""

    __slots__ = ("_raw", "_spans", "children")

    def __init__(self, raw: bytes, start: int, end: int) -> None:
        self._raw = raw
        self._spans: dict[int, tuple[int, int]] = {}
        self.children: list[tuple[int, int]] = []
        for tag, at, after in fields(raw, start, end):
            if tag == CHILDREN << 3 | DELIMITED:
                self.children.append((at, after))
            elif tag & 7 == DELIMITED:
                self._spans[tag >> 3] = (at, after)

    def array(self, number: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Return a packed field of exactly `count` values."""
        at, after = self._spans.get(number, (0, 0))
        if after - at != count * dtype.itemsize:
            raise MalformedError(
                f"field {number} of a column has {after - at} bytes, {count} values of "
                f"{dtype.itemsize} bytes were expected"
            )
        return np.frombuffer(self._raw, dtype, count, at) if count else np.empty(0, dtype)

    def data(self) -> pa.Buffer:
        at, after = self._spans.get(DATA, (0, 0))
        return pa.py_buffer(self._raw).slice(at, after - at)

    def validity(self, rows: int) -> pa.Buffer | None:
        if VALIDITY not in self._spans:
            return None
        return pa.py_buffer(self.array(VALIDITY, np.dtype("u1"), -(-rows // 8)))


def decode_column(raw: bytes, span: tuple[int, int], kind: pa.DataType, rows: int) -> pa.Array:
    """Decode a Column message. Raises MalformedError unless it holds `rows` values of `kind`."""
    message = ColumnMessage(raw, *span)
    types = pa.types
    if types.is_null(kind):
        return pa.nulls(rows)
    if types.is_nested(kind):
        return _decode_nested(raw, message, kind, rows)
    validity = message.validity(rows)
    if types.is_string(kind) or types.is_binary(kind):
        lengths = message.array(LENGTHS, np.dtype("<u4"), rows).astype(np.int64)
        data = message.data()
        if lengths.sum() != data.size:
            raise MalformedError(f"lengths add up to {lengths.sum()} of {data.size} bytes")
        return pa.Array.from_buffers(kind, rows, [validity, offsets_of(lengths).buffers()[1], data])
    if types.is_boolean(kind):
        bits = np.packbits(message.array(BOOLS, np.dtype("?"), rows), bitorder="little")
        return pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(bits)])
    return _decode_fixed(message, kind, rows, validity)


def _decode_fixed(
    message: ColumnMessage, kind: pa.DataType, rows: int, validity: pa.Buffer | None
) -> pa.Array:
    number, stored = _number_of(kind), _dtype_of(kind)
    values = message.array(number, _DTYPES.get(number, stored), rows)
    narrow = values.astype(stored, copy=False)
    if number in (INTS, UINTS) and not np.array_equal(narrow, values):
        raise MalformedError(f"a value does not fit into {kind}")
    return pa.Array.from_buffers(kind, rows, [validity, pa.py_buffer(narrow)])


def _decode_nested(raw: bytes, message: ColumnMessage, kind: pa.DataType, rows: int) -> pa.Array:
    validity = message.validity(rows)
    nulls = None if validity is None else _nulls(validity, rows)
    inner = [kind.key_field, kind.item_field] if pa.types.is_map(kind) else list_fields(kind)
    if len(message.children) != len(inner):
        raise MalformedError(f"{len(message.children)} children where {kind} has {len(inner)}")
    if pa.types.is_struct(kind):
        return build_struct(_decoded_children(raw, message, inner, rows), inner, nulls)
    lengths = message.array(LENGTHS, np.dtype("<u4"), rows).astype(np.int64)
    children = _decoded_children(raw, message, inner, int(lengths.sum()))
    if pa.types.is_map(kind):
        return build_list(lengths, build_struct(children, inner, None), kind, nulls)
    return build_list(lengths, children[0], kind, nulls)


def list_fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)]


def _decoded_children(
    raw: bytes, message: ColumnMessage, inner: list[pa.Field], rows: int
) -> list[pa.Array]:
    return [
        decode_column(raw, span, field.type, rows)
        for span, field in zip(message.children, inner, strict=True)
    ]


def _nulls(validity: pa.Buffer, rows: int) -> pa.Array:
    return pc.invert(pa.Array.from_buffers(pa.bool_(), rows, [None, validity]))


@dataclass(frozen=True, slots=True)
class TypedProtobufFormat(Format):
    """Exact for every type. Each file holds its own schema and marks its end."""

    id = "protobuf-typed"
    compression = "none"
    extension = ".typed.pb"

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, ROWS, admitted_rows(schema, batches))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, CHANGES, admitted_changes(schema, batches))

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        stored, frames = _opened(source, ROWS)
        declared = schema or stored
        arrow = declared.arrow if columns is None else declared.select(columns)
        names = [name for name in arrow.names if name in stored.names]
        if columns is None:
            names = stored.names
        for batch in _batches(frames, stored.arrow, names):
            yield from verified_rows(batch, arrow)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        stored, frames = _opened(source, CHANGES)
        for batch in _batches(frames, stored.changes, stored.changes.names):
            yield from verified(batch, schema or stored)


def _write(
    sink: BinaryIO, schema: TableSchema, kind: str, batches: Iterable[pa.RecordBatch]
) -> int:
    header = (
        varint(1 << 3 | VARINT)
        + varint(VERSION)
        + tagged(2, kind.encode())
        + tagged(3, schema.canonical_json)
        + tagged(4, schema.id.encode())
    )
    write_frame(sink, HEADER, header)
    count = 0
    for batch in batches:
        columns = b"".join(tagged(2, encode_column(column)) for column in batch.columns)
        write_frame(sink, BATCH, _number(len(batch)) + columns)
        count += len(batch)
    write_frame(sink, END, _number(count))
    return count


def _number(value: int) -> bytes:
    return varint(1 << 3 | VARINT) + varint(value)


def _opened(source: BinaryIO, kind: str) -> tuple[TableSchema, Iterator[ContentFrame]]:
    """Return the schema in the file's header, and the frames after it."""
    source.seek(0)
    frames = read_frames(source)
    header = next(frames)
    if header.number != HEADER:
        raise ArtifactCorruptError("the file does not begin with a header: it is of another format")
    try:
        return _schema_of(header.content, kind), frames
    except (MalformedError, InvalidError, *UNDECODABLE) as error:
        raise ArtifactCorruptError(f"the header cannot be used: {error}") from None


def _schema_of(header: bytes, kind: str) -> TableSchema:
    version, texts = 0, {2: b"", 3: b"", 4: b""}
    for tag, value, after in fields(header, 0, len(header)):
        if tag == 1 << 3 | VARINT:
            version = value
        elif tag & 7 == DELIMITED:
            texts[tag >> 3] = header[value:after]
    if version != VERSION:
        raise InvalidError(f"version {version} is not {VERSION}: read it with a newer Streamfold")
    if texts[2].decode() != kind:
        raise InvalidError(f"the file holds {texts[2]!r}, not {kind!r}")
    return TableSchema.from_json(msgspec.json.decode(texts[3]))


def _batches(
    frames: Iterator[ContentFrame], schema: pa.Schema, names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the named columns, decoding no others. The end frame must state the number of rows."""
    count = 0
    for frame in frames:
        try:
            rows, spans = _batch_of(frame)
            if frame.number == END and rows != count:
                raise MalformedError(f"the file has {count} rows, its end says {rows}")
            if frame.number == END:
                continue  # reading the next frame checks that nothing follows
            if len(spans) != len(schema):
                raise MalformedError(f"{len(spans)} columns, the schema has {len(schema)}")
            batch = _decoded_batch(
                frame.content, dict(zip(schema.names, spans, strict=True)), schema, names, rows
            )
        except (MalformedError, pa.ArrowInvalid) as error:
            raise ArtifactCorruptError(f"after row {count}: {error}") from None
        yield batch
        count += rows


def _batch_of(frame: ContentFrame) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of rows, and the columns' extents, which an end frame lacks."""
    if frame.number == HEADER:
        raise MalformedError("a second header")
    rows, spans = 0, []
    for tag, value, after in fields(frame.content, 0, len(frame.content)):
        if tag == 1 << 3 | VARINT:
            rows = value
        elif tag == 2 << 3 | DELIMITED:
            spans.append((value, after))
    return rows, spans


def _decoded_batch(
    raw: bytes,
    spans: dict[str, tuple[int, int]],
    schema: pa.Schema,
    names: Sequence[str],
    rows: int,
) -> pa.RecordBatch:
    # A batch needs a column to know its number of rows, even if a newer schema shares none with it.
    stored = pa.schema([schema.field(name) for name in names or schema.names[:1]])
    columns = [decode_column(raw, spans[field.name], field.type, rows) for field in stored]
    return pa.RecordBatch.from_arrays(columns, schema=stored).select(list(names))


TYPED_PROTOBUF = FormatType(
    id="protobuf-typed",
    summary="typed columns in messages of our own, with checksums",
    open=lambda _: TypedProtobufFormat(),
    read_cost=20,
)
