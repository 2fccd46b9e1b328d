"""Published protobuf, id `protobuf`: the messages that readers of the published format understand.

Length-delimited SnapshotRow and DiffChange messages with google.protobuf.Struct inside. With the
schema, every value reads back exactly. Without it there are only doubles and text. `protobuf-typed`
has real types.

Struct supports null, bool, double, text, lists and objects. Values that a double cannot hold
exactly become text: integers beyond 2^53 as digits, as in protobuf's own JSON mapping, others as in
JSON Lines.

The messages, of package laredo.snapshotter.v1, are built at run time:

    message SnapshotRow { google.protobuf.Struct row = 1; }
    message DiffChange { string action = 1; string key = 2; google.protobuf.Struct old = 3;
                         google.protobuf.Struct new = 4; }
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import (
    PieceLimits,
    admitted_changes,
    admitted_rows,
    published_schema,
    verified_changes,
    verified_rows,
)
from streamfold.archive.formats.conforming import (
    as_list,
    build_list,
    list_lengths,
    nulls_of,
    struct_children,
    values_of,
)
from streamfold.archive.formats.format import Format, FormatType
from streamfold.archive.formats.jsonl.json_text import key_text, plain_text
from streamfold.archive.formats.jsonl.json_values import EXACT_IN_DOUBLE, columns_of
from streamfold.archive.formats.protobuf.frames import read_groups
from streamfold.archive.formats.published_rows import (
    check_published_rows,
    check_published_size,
    inferred_batch,
    inferred_changes,
    inferred_schema,
    published_key_text,
    selected,
)
from streamfold.archive.schema import TableSchema
from streamfold.records.protobuf import varint

# Tags of google.protobuf.Value, and of its enclosing messages.
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
_PACKAGE = "laredo.snapshotter.v1"
_STRUCT_TYPE = ".google.protobuf.Struct"
#: Bytes from which on Laredo's reader rejects a message: its library's default limit is 4 MiB.
PUBLISHED_MESSAGE_MAX = 4 << 20
#: Messages per batch. Python values take far more memory than the columns they become.
MESSAGES_AT_ONCE = PieceLimits(rows=8192, size=4 << 20)


def _messages() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="laredo/snapshotter/v1/snapshotter.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto"],
    )
    _declare(file.message_type.add(name="SnapshotRow"), row=_STRUCT_TYPE)
    _declare(
        file.message_type.add(name="DiffChange"),
        action=None,
        key=None,
        old=_STRUCT_TYPE,
        new=_STRUCT_TYPE,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    names = ("SnapshotRow", "DiffChange")
    row, change = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in names)
    return message_factory.GetMessageClass(row), message_factory.GetMessageClass(change)


def _declare(message: Any, **kinds: str | None) -> None:
    """Declare fields numbered from 1, each of the named message type, or text."""
    kind = descriptor_pb2.FieldDescriptorProto
    for number, (name, type_name) in enumerate(kinds.items(), 1):
        field = message.field.add(name=name, number=number, label=kind.LABEL_OPTIONAL)
        field.type = kind.TYPE_MESSAGE if type_name else kind.TYPE_STRING
        if type_name:
            field.type_name = type_name


SnapshotRow, DiffChange = _messages()


def read_row(message: bytes) -> dict[str, Any]:
    """Return a row as Python values. Raises ArtifactCorruptError if it is not a SnapshotRow."""
    row = struct_values(_parsed(SnapshotRow, message).row)
    if not row:
        raise ArtifactCorruptError("a row without columns: the file is of another format")
    return row


def read_change(message: bytes) -> dict[str, Any]:
    """Return a change as `action, key, old, new`, without absent fields."""
    change = _parsed(DiffChange, message)
    fields: dict[str, Any] = {"action": change.action}
    if change.key:
        fields["key"] = change.key
    for name in ("old", "new"):
        if change.HasField(name):
            fields[name] = struct_values(getattr(change, name))
    return fields


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise ArtifactCorruptError(
            f"these bytes are not a {kind.DESCRIPTOR.name}: {error}"
        ) from None


def struct_values(struct: Any) -> dict[str, Any]:
    return {name: _value(value) for name, value in struct.fields.items()}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    content = getattr(value, kind)
    if kind == "struct_value":
        return struct_values(content)
    return [_value(item) for item in content.values] if kind == "list_value" else content


@dataclass(frozen=True, slots=True)
class ProtobufFormat(Format):
    """Exact for every type if there is a schema."""

    #: Whether to write keys so that Laredo's reader can distinguish them.
    published: bool = False

    id = "protobuf"
    compression = "none"
    extension = ".pb"

    def for_published_readers(self) -> ProtobufFormat:
        return replace(self, published=True)

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        admitted = admitted_rows(schema, batches)
        return self._write(sink, (self._row_message(schema, batch) for batch in admitted))

    def _row_message(self, schema: TableSchema, rows: pa.RecordBatch) -> pa.Array:
        if self.published:
            check_published_rows(schema, rows, exact=True)
        return _join(b"\x0a", _sized(_struct_message(list(schema.arrow), rows.columns)))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return self._write(sink, map(self._change_message, admitted_changes(schema, batches)))

    def _change_message(self, changes: pa.RecordBatch) -> pa.Array:
        key = changes["key"]
        text = published_key_text(key, exact=True) if self.published else key_text(key)
        parts = [
            b"\x0a",
            _sized(changes["action"].cast(pa.binary())),
            _optional(b"\x12", text.cast(pa.binary())),
        ]
        for tag, name in ((b"\x1a", "before"), (b"\x22", "after")):
            image = changes[name]
            content = _struct_message(list(image.type), image.flatten())
            parts.append(_optional(tag, pc.if_else(image.is_valid(), content, None)))
        return _join(*parts)

    def _write(self, sink: BinaryIO, messages: Iterable[pa.Array]) -> int:
        count = 0
        for column in messages:
            if self.published:
                check_published_size(column, PUBLISHED_MESSAGE_MAX, self.id)
            sink.write(values_of(_sized(column))[0].data)
            count += len(column)
        return count

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            inferred = selected(inferred_schema(_objects(source, read_row)), columns)
            for rows in _objects(source, read_row):
                yield inferred_batch(rows, inferred)
            return
        arrow = schema.arrow if columns is None else schema.select(columns)
        count = 0
        for rows in _objects(source, read_row):
            yield from verified_rows(_typed(rows, arrow, columns is not None, count), arrow)
            count += len(rows)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            yield from inferred_changes(lambda: _objects(source, read_change))
            return
        published, count = published_schema(schema), 0
        for changes in _objects(source, read_change):
            yield from verified_changes(_typed(changes, published, False, count), schema)
            count += len(changes)


def _optional(tag: bytes, content: pa.Array) -> pa.Array:
    return pc.fill_null(_join(tag, _sized(content)), b"")


def _objects(
    source: BinaryIO, read: Callable[[bytes], dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    source.seek(0)
    for messages in read_groups(source, MESSAGES_AT_ONCE):
        yield [read(message) for message in messages]


def _typed(
    rows: list[dict[str, Any]], schema: pa.Schema, others_ignored: bool, count: int
) -> pa.RecordBatch:
    """Return the rows as columns. `count` rows precede them in the file."""
    try:
        return columns_of(rows, schema, others_ignored)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ArtifactCorruptError(f"after message {count}: {error}") from None


def _join(*parts: bytes | pa.Array) -> pa.Array:
    """Return the parts of each row concatenated, or null where a part is null."""
    return pc.binary_join_element_wise(*parts, b"")


def _sized(content: pa.Array) -> pa.Array:
    """Return every value prefixed with its length as a varint."""
    lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False)
    distinct, which = np.unique(lengths, return_inverse=True)
    sizes = pa.array([varint(int(length)) for length in distinct], pa.binary())
    return _join(sizes.take(pa.array(which)), content)


def _struct_message(fields: Sequence[pa.Field], columns: Sequence[pa.Array]) -> pa.Array:
    """Return a serialized Struct for every row, with fields in schema order."""
    entries: list[bytes | pa.Array] = []
    for field, column in zip(fields, columns, strict=True):
        name = field.name.encode()
        head = _FIRST + varint(len(name)) + name + _SECOND
        entries += [_FIRST, _sized(_join(head, _sized(_value_message(column))))]
    return _join(*entries)


def _value_message(column: pa.Array) -> pa.Array:
    """Return a serialized Value for every row."""
    message = _present_value(column)
    return pc.fill_null(message, _NULL) if message.null_count else message


def _present_value(column: pa.Array) -> pa.Array:
    """Return a serialized Value for every row, null where the column is null."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        content = _struct_message(list(kind), struct_children(column))
        return _join(_STRUCT, _sized(pc.if_else(column.is_valid(), content, None)))
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
        entry = _join(_FIRST, _sized(keys), _SECOND, _sized(_value_message(items)))
        tag, parts = _STRUCT, _join(_FIRST, _sized(entry))
    else:
        tag, parts = _LIST, _join(_FIRST, _sized(_value_message(values)))
    grouped = build_list(list_lengths(lists), parts, pa.list_(pa.binary()), nulls_of(column))
    return _join(tag, _sized(pc.binary_join(grouped, b"")))


def _number(doubles: pa.Array) -> pa.Array:
    raw = pa.Array.from_buffers(pa.binary(8), len(doubles), doubles.buffers(), -1, doubles.offset)
    return _join(_NUMBER, raw.cast(pa.binary()))


def _text(text: pa.Array) -> pa.Array:
    return _join(_STRING, _sized(text.cast(pa.binary())))


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


PROTOBUF = FormatType(
    id="protobuf",
    summary="the published messages, each with its length before it",
    open=lambda _: ProtobufFormat(),
    read_cost=40,
)
