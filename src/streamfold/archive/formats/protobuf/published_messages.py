"""The published protobuf messages, package laredo.snapshotter.v1, built at run time.

message SnapshotRow { google.protobuf.Struct row = 1; }
message DiffChange { string action = 1; string key = 2; google.protobuf.Struct old = 3;
google.protobuf.Struct new = 4; }
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from streamfold.archive.errors import ArtifactCorruptError

_PACKAGE = "laredo.snapshotter.v1"
_STRUCT = ".google.protobuf.Struct"


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
