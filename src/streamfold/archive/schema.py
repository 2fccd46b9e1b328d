"""Schemas of archived tables: the closed list of column types, key fields, and how columns widen.

Arrow has several layouts for one kind of value (large, view and dictionary variants, freely named
list items). They hold equal values, so one of them is canonical, and each type has one textual
form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.errors import InvalidError

#: Types without parameters, by their name in a schema.
_PLAIN: dict[str, pa.DataType] = {
    # A column that has held no value yet. It widens to any type.
    "null": pa.null(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "time64[us]": pa.time64("us"),
    "time64[ns]": pa.time64("ns"),
}
_NAMES = {kind: name for name, kind in _PLAIN.items()}

_DECIMAL = re.compile(r"decimal(128|256)\((\d{1,2}), (\d{1,2})\)")
_TIMESTAMP = re.compile(r"timestamp\[(us|ns)(?:, ([A-Za-z0-9_+:/-]+))?\]")
#: Maximum decimal digits of each width.
_DIGITS_MAX = {"128": 38, "256": 76}
#: Maximum nesting of types. Bounds how deep a manifest can make a reader recurse.
_DEPTH_MAX = 32

_SUPPORTED = (
    "null, bool, int8-int64, uint8-uint64, float32, float64, decimal128, decimal256, string, binary, "
    "date32, time64, timestamp[us], timestamp[ns], list, struct, map with string keys"
)
#: Hex digits of a schema id: 128 bits, so two schemas never share one.
ID_DIGITS = 32
#: Actions of a change, as the published format names them.
ACTIONS = ("INSERT", "UPDATE", "DELETE", "TRUNCATE")


def is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal128(kind) or pa.types.is_decimal256(kind))


def is_key_type(kind: pa.DataType) -> bool:
    """Return whether values of the type compare exactly: no floats, nothing nested."""
    return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))


def canonical_field(field: pa.Field, depth: int = 0) -> pa.Field:
    """Return the field with its canonical type. Raises InvalidError for unsupported types."""
    try:
        kind = canonical_type(field.type, depth)
        return pa.field(field.name, kind, field.nullable or pa.types.is_null(kind))
    except InvalidError as error:
        raise InvalidError(f"in {field.name!r}: {error.message}") from None


def canonical_type(kind: pa.DataType, depth: int = 0) -> pa.DataType:
    """Return the canonical layout of a type's values. Raises InvalidError for unsupported types."""
    if depth > _DEPTH_MAX:
        raise InvalidError(f"types are nested more than {_DEPTH_MAX} deep: flatten the column")
    types = pa.types
    if types.is_dictionary(kind):
        return canonical_type(kind.value_type, depth + 1)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return _canonical_struct(kind, depth)
    if types.is_map(kind):
        return _canonical_map(kind, depth)
    if types.is_list(kind) or types.is_large_list(kind):
        item = canonical_field(kind.value_field, depth + 1)
        return pa.list_(item.with_name("item"))
    if kind in _NAMES or (is_decimal(kind) and 0 <= kind.scale <= kind.precision):
        return kind
    # A zone with other characters could not be parsed back from the schema.
    if types.is_timestamp(kind) and _TIMESTAMP.fullmatch(type_to_json(kind)):
        return kind
    raise InvalidError(f"type {kind} is not supported: cast it to one of {_SUPPORTED}")


def _canonical_struct(kind: pa.DataType, depth: int) -> pa.DataType:
    fields = [canonical_field(field, depth + 1) for field in kind]
    if not fields:
        raise InvalidError("a struct without fields cannot be stored: drop the column")
    names = [field.name for field in fields]
    if len(set(names)) < len(names) or "" in names:
        raise InvalidError(f"field names {names} of a struct are empty or repeated: rename them")
    return pa.struct(fields)


def _canonical_map(kind: pa.DataType, depth: int) -> pa.DataType:
    if canonical_type(kind.key_type, depth + 1) != pa.string():
        raise InvalidError(
            f"a map has keys of type {kind.key_type}: only string keys are supported"
        )
    item = canonical_field(kind.item_field, depth + 1)
    return pa.map_(pa.string(), item.with_name("value"))


def type_to_json(kind: pa.DataType) -> Any:
    """Return a canonical type as JSON: text, or an object for a nested type."""
    if kind in _NAMES:
        return _NAMES[kind]
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}, {kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]"
    if pa.types.is_struct(kind):
        return {"struct": [field_to_json(field) for field in kind]}
    if pa.types.is_map(kind):
        return {"map": _unnamed(kind.item_field)}
    if pa.types.is_list(kind):
        return {"list": _unnamed(kind.value_field)}
    return f"decimal{kind.bit_width}({kind.precision}, {kind.scale})"


def field_to_json(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": type_to_json(field.type), "nullable": field.nullable}


def _unnamed(field: pa.Field) -> dict[str, Any]:
    return {"type": type_to_json(field.type), "nullable": field.nullable}


def type_from_json(value: object, depth: int = 0) -> pa.DataType:
    """Return the type that `type_to_json` wrote. Raises InvalidError for anything else."""
    if depth > _DEPTH_MAX:
        raise InvalidError(
            f"types are nested more than {_DEPTH_MAX} deep: the schema is not usable"
        )
    if isinstance(value, str):
        return _type_from_text(value)
    match value:
        case {"list": inner}:
            return pa.list_(field_from_json(inner, depth + 1, "item"))
        case {"map": inner}:
            return pa.map_(pa.string(), field_from_json(inner, depth + 1, "value"))
        case {"struct": list(inner)}:
            return _canonical_struct(
                pa.struct([field_from_json(x, depth + 1) for x in inner]), depth
            )
    raise InvalidError(f"{value!r} is not a column type: expected one of {_SUPPORTED}")


def field_from_json(value: object, depth: int = 0, name: str | None = None) -> pa.Field:
    """Return the field that `field_to_json` wrote. List items and map values carry no name."""
    if isinstance(value, dict):
        named = name if name is not None else value.get("name")
        nullable = value.get("nullable")
        if isinstance(named, str) and isinstance(nullable, bool):
            return pa.field(named, type_from_json(value.get("type"), depth), nullable)
    raise InvalidError(
        f"{value!r} is not a column: expected an object with name, type and nullable"
    )


def _type_from_text(text: str) -> pa.DataType:
    if text in _PLAIN:
        return _PLAIN[text]
    if timestamp := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(timestamp[1], timestamp[2])
    if decimal := _DECIMAL.fullmatch(text):
        width, precision, scale = decimal[1], int(decimal[2]), int(decimal[3])
        if 1 <= precision <= _DIGITS_MAX[width] and scale <= precision:
            make = pa.decimal128 if width == "128" else pa.decimal256
            return make(precision, scale)
    raise InvalidError(f"{text!r} is not a column type: expected one of {_SUPPORTED}")


def merged_fields(
    old: Iterable[pa.Field], new: Iterable[pa.Field], path: str = ""
) -> list[pa.Field]:
    """Return the old fields in order, widened where needed, followed by the added ones."""
    arriving = {field.name: field for field in new}
    merged = []
    for field in old:
        other = arriving.pop(field.name, None)
        merged.append(
            field.with_nullable(True) if other is None else _merged_field(field, other, path)
        )
    for field in arriving.values():
        if not field.nullable:
            raise SchemaIncompatibleError(path + field.name, "absent", f"{field.type} not null")
    return merged + list(arriving.values())


def _merged_field(old: pa.Field, new: pa.Field, path: str) -> pa.Field:
    kind = _merged_type(old.type, new.type, path + old.name)
    return pa.field(old.name, kind, old.nullable or new.nullable)


def _merged_type(old: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
    """Return the wider type. A source that narrows a type still fits the column."""
    if old == new or widens(new, old):
        return old
    if widens(old, new):
        return new
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return pa.struct(merged_fields(old, new, f"{path}."))
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_merged_field(old.value_field, new.value_field, f"{path}."))
    if pa.types.is_map(old) and pa.types.is_map(new):
        return pa.map_(pa.string(), _merged_field(old.item_field, new.item_field, f"{path}."))
    raise SchemaIncompatibleError(path, str(old), str(new))


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Return whether every value of `old` is a value of `new`, of the same kind."""
    types = pa.types
    if types.is_null(old):
        return True
    if types.is_integer(old) and types.is_integer(new):
        grows = new.bit_width > old.bit_width
        return bool(grows and (types.is_signed_integer(new) or types.is_unsigned_integer(old)))
    if is_decimal(old) and is_decimal(new):
        whole_digits = new.precision - new.scale >= old.precision - old.scale
        return bool(whole_digits and new.scale >= old.scale and new.bit_width >= old.bit_width)
    return bool(types.is_float32(old) and types.is_float64(new))


@dataclass(frozen=True)
class TableSchema:
    """Columns in order, and the fields that identify a row. Equal schemas have equal ids.

    `arrow` holds only canonical types. Key fields are never null, and their types compare exactly.
    A key field of type null means that no row has been seen yet: no row fits it, and it takes the
    type of the first row. A table without key fields can be published as bases but not as diffs.
    """

    arrow: pa.Schema
    key_fields: tuple[str, ...]

    @classmethod
    def of(
        cls, columns: pa.Schema | Iterable[pa.Field], key_fields: Sequence[str] = ()
    ) -> TableSchema:
        """Return the schema of any Arrow columns.

        Raises InvalidError if a type, a name or a key is unusable.
        """
        keys = tuple(key_fields)
        fields = [canonical_field(field) for field in columns]
        fields = [_nullable(field, field.nullable and field.name not in keys) for field in fields]
        _check_names([field.name for field in fields])
        _check_keys({field.name: field for field in fields}, keys)
        return cls(pa.schema(fields), keys)

    @classmethod
    def from_json(cls, value: object) -> TableSchema:
        """Return the schema that `to_json` wrote, ignoring unknown members."""
        match value:
            case {"columns": list(columns), "key_fields": list(keys)} if all(
                isinstance(key, str) for key in keys
            ):
                return cls.of([field_from_json(column) for column in columns], keys)
        raise InvalidError("a schema is an object with the lists columns and key_fields")

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry under `schemas`. The id is the hash of exactly this."""
        return {
            "columns": [field_to_json(field) for field in self.arrow],
            "key_fields": list(self.key_fields),
        }

    @cached_property
    def canonical_json(self) -> bytes:
        """The canonical encoding of this schema: sorted keys, no white space, UTF-8."""
        return msgspec.json.encode(self.to_json(), order="sorted")

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(self.canonical_json).hexdigest()[:ID_DIGITS]

    @classmethod
    def of_keys(cls, key_fields: Sequence[str]) -> TableSchema:
        """Return the schema of a table for which only the names of the key fields are known."""
        return cls.of([pa.field(name, pa.null()) for name in key_fields], key_fields)

    @property
    def has_untyped_key(self) -> bool:
        """Whether no row has been seen yet, which leaves the key fields without a type."""
        return any(pa.types.is_null(self.arrow.field(name).type) for name in self.key_fields)

    @property
    def names(self) -> list[str]:
        return list(self.arrow.names)

    @cached_property
    def changes(self) -> pa.Schema:
        """The Arrow schema of change batches: action, key, before, after.

        Columns of `before` are nullable whatever the table's schema says: a DELETE may know only
        the key.
        """
        if not self.key_fields:
            raise InvalidError("a schema without key fields has no changes: declare key fields")
        key = pa.struct([self.arrow.field(name) for name in self.key_fields])
        before = [_nullable(f, f.name not in self.key_fields) for f in self.arrow]
        return pa.schema(
            [
                pa.field("action", pa.string(), nullable=False),
                pa.field("key", key),
                pa.field("before", pa.struct(before)),
                pa.field("after", pa.struct(list(self.arrow))),
            ]
        )

    def select(self, names: Sequence[str]) -> pa.Schema:
        """Return the Arrow schema of these columns, in the requested order."""
        unknown = [name for name in names if name not in self.arrow.names]
        if unknown or not names:
            raise InvalidError(
                f"columns {list(names)} are not all there: name some of {self.names}"
            )
        return pa.schema([self.arrow.field(name) for name in names])

    def merged(self, new: TableSchema) -> TableSchema:
        """Return the schema that fits rows of both. Rows already written keep their meaning.

        Added columns must be nullable. Types may widen: null to anything, an integer to a wider
        one, float32 to float64, a decimal to more digits. A dropped column stays and becomes
        nullable.
        """
        if new.key_fields != self.key_fields:
            raise SchemaIncompatibleError("the key", list(self.key_fields), list(new.key_fields))
        gone = [name for name in self.key_fields if name not in new.arrow.names]
        if gone:
            raise SchemaIncompatibleError(gone[0], "a key field", "no column")
        return TableSchema.of(merged_fields(self.arrow, new.arrow), self.key_fields)


def _nullable(field: pa.Field, nullable: bool) -> pa.Field:
    """Return the field with this nullability. A column of type null is always nullable."""
    return field.with_nullable(nullable or pa.types.is_null(field.type))


def _check_names(names: list[str]) -> None:
    if not names:
        raise InvalidError("a table has at least one column: this schema has none")
    if "" in names or len(set(names)) < len(names):
        raise InvalidError(f"column names {names} are empty or repeated: rename them")


def _check_keys(fields: dict[str, pa.Field], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in fields:
            raise InvalidError(f"key field {key!r} is not a column: the table has {list(fields)}")
        if not is_key_type(fields[key].type):
            raise InvalidError(
                f"key field {key!r} has type {fields[key].type}: keys are never floats or nested"
            )
    if len(set(keys)) < len(keys):
        raise InvalidError(f"key fields {list(keys)} are repeated: name each once")
