"""Published protobuf, id `protobuf`: the messages that readers of the published format know.

Length-delimited SnapshotRow and DiffChange with google.protobuf.Struct inside. With the schema
every value reads back exactly; without it there are doubles and text. `protobuf-typed` has real
types.

The messages, of package laredo.snapshotter.v1, are built at run time:

    message SnapshotRow { google.protobuf.Struct row = 1; }
    message DiffChange { string action = 1; string key = 2; google.protobuf.Struct old = 3;
                         google.protobuf.Struct new = 4; }
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import (
    Limits,
    admitted_changes,
    admitted_rows,
    published_schema,
    verified_changes,
    verified_rows,
)
from streamfold.archive.formats.conforming import values_of
from streamfold.archive.formats.format import Format, FormatType
from streamfold.archive.formats.inference import (
    inferred_batch,
    inferred_changes,
    inferred_schema,
    selected,
)
from streamfold.archive.formats.jsonl.json_text import key_text
from streamfold.archive.formats.jsonl.json_values import columns_of
from streamfold.archive.formats.protobuf.frames import read_blocks
from streamfold.archive.formats.protobuf.structs import (
    IrregularError,
    join,
    read_in_step,
    sized,
    struct_message,
)
from streamfold.archive.formats.published_keys import (
    check_published_rows,
    check_published_size,
    published_key_text,
)
from streamfold.archive.schema import TableSchema

_PACKAGE = "laredo.snapshotter.v1"
_STRUCT = ".google.protobuf.Struct"
#: Bytes of a message that Laredo's reader does not take any more: the default of its library is 4 MiB.
PUBLISHED_MESSAGE_MAX = 4 << 20
#: Messages that become one batch: Python values take far more room than the columns they become.
MESSAGES_AT_ONCE = Limits(rows=8192, size=4 << 20)


def _messages() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="laredo/snapshotter/v1/snapshotter.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=["google/protobuf/struct.proto"],
    )
    _declare(file.message_type.add(name="SnapshotRow"), row=_STRUCT)
    _declare(
        file.message_type.add(name="DiffChange"), action=None, key=None, old=_STRUCT, new=_STRUCT
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    names = ("SnapshotRow", "DiffChange")
    row, change = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in names)
    return message_factory.GetMessageClass(row), message_factory.GetMessageClass(change)


def _declare(message: Any, **kinds: str | None) -> None:
    """Fields numbered from 1: of the named message type, or text."""
    kind = descriptor_pb2.FieldDescriptorProto
    for number, (name, type_name) in enumerate(kinds.items(), 1):
        field = message.field.add(name=name, number=number, label=kind.LABEL_OPTIONAL)
        field.type = kind.TYPE_MESSAGE if type_name else kind.TYPE_STRING
        if type_name:
            field.type_name = type_name


SnapshotRow, DiffChange = _messages()


def read_row(message: bytes) -> dict[str, Any]:
    """A row as Python values; ArtifactCorruptError when the bytes are not a SnapshotRow."""
    row = struct_values(_parsed(SnapshotRow, message).row)
    if not row:
        raise ArtifactCorruptError("a row without columns: the file is of another format")
    return row


def read_change(message: bytes) -> dict[str, Any]:
    """A change as `action, key, old, new`, without absent fields."""
    change = _parsed(DiffChange, message)
    found: dict[str, Any] = {"action": change.action}
    if change.key:
        found["key"] = change.key
    for name in ("old", "new"):
        if change.HasField(name):
            found[name] = struct_values(getattr(change, name))
    return found


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
    found = getattr(value, kind)
    if kind == "struct_value":
        return struct_values(found)
    return [_value(item) for item in found.values] if kind == "list_value" else found


@dataclass(frozen=True, slots=True)
class ProtobufFormat(Format):
    """Exact for every type, given the schema."""

    #: Whether Laredo's reader must tell the keys apart.
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
        return join(b"\x0a", sized(struct_message(list(schema.arrow), rows.columns)))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return self._write(sink, map(self._change_message, admitted_changes(schema, batches)))

    def _change_message(self, changes: pa.RecordBatch) -> pa.Array:
        key = changes["key"]
        text = published_key_text(key, exact=True) if self.published else key_text(key)
        parts = [
            b"\x0a",
            sized(changes["action"].cast(pa.binary())),
            _optional(b"\x12", text.cast(pa.binary())),
        ]
        for tag, name in ((b"\x1a", "before"), (b"\x22", "after")):
            image = changes[name]
            content = struct_message(list(image.type), image.flatten())
            parts.append(_optional(tag, pc.if_else(image.is_valid(), content, None)))
        return join(*parts)

    def _write(self, sink: BinaryIO, messages: Iterable[pa.Array]) -> int:
        count = 0
        for column in messages:
            if self.published:
                check_published_size(column, PUBLISHED_MESSAGE_MAX, self.id)
            sink.write(values_of(sized(column))[0].data)
            count += len(column)
        return count

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        if schema is None:
            found = selected(inferred_schema(_objects(source, read_row)), columns)
            for rows in _objects(source, read_row):
                yield inferred_batch(rows, found)
            return
        wanted = schema.arrow if columns is None else schema.select(columns)
        for batch in _rows(source, wanted, columns is not None):
            yield from verified_rows(batch, wanted)

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
    return pc.fill_null(join(tag, sized(content)), b"")


def _objects(
    source: BinaryIO, read: Callable[[bytes], dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    source.seek(0)
    for block in read_blocks(source, MESSAGES_AT_ONCE):
        for messages in block.messages(MESSAGES_AT_ONCE.rows):
            yield [read(message) for message in messages]


def _rows(source: BinaryIO, schema: pa.Schema, others_ignored: bool) -> Iterator[pa.RecordBatch]:
    """Read regular rows in step, and all others value by value."""
    source.seek(0)
    count = 0
    for block in read_blocks(source, MESSAGES_AT_ONCE):
        try:
            alike = read_in_step(block, schema, others_ignored)
        except (IrregularError, pa.ArrowInvalid, ValueError):
            for messages in block.messages(MESSAGES_AT_ONCE.rows):
                rows = [read_row(message) for message in messages]
                yield _typed(rows, schema, others_ignored, count)
                count += len(rows)
        else:
            yield alike
            count += len(alike)


def _typed(
    rows: list[dict[str, Any]], schema: pa.Schema, others_ignored: bool, count: int
) -> pa.RecordBatch:
    """The rows as columns; `count` rows precede them in the file."""
    try:
        return columns_of(rows, schema, others_ignored)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ArtifactCorruptError(f"after message {count}: {error}") from None


PROTOBUF = FormatType(
    id="protobuf",
    summary="the published messages, each with its length before it",
    open=lambda _: ProtobufFormat(),
    read_cost=40,
)
