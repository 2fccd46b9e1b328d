"""The closed list of column types: what every format can write and read back exactly.

Arrow has several layouts for one kind of value (large, view and dictionary variants, freely named
list items). They hold equal values, so one layout stands for all of them, and a type has one text.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from streamfold.errors import InvalidError

#: Types without parameters, by their name in a schema.
_PLAIN: dict[str, pa.DataType] = {
    # A column that has held no value yet: it widens to any type.
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
#: Decimal digits that each width holds at most.
_DIGITS_MAX = {"128": 38, "256": 76}
#: Types within types; a bound on what a manifest may make a reader recurse into.
_DEPTH_MAX = 32

_SUPPORTED = (
    "null, bool, int8-int64, uint8-uint64, float32, float64, decimal128, decimal256, string, binary, "
    "date32, time64, timestamp[us], timestamp[ns], list, struct, map with string keys"
)


def is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal128(kind) or pa.types.is_decimal256(kind))


def is_key_type(kind: pa.DataType) -> bool:
    """True for types whose equality is exact: no floats, nothing nested."""
    return not (pa.types.is_nested(kind) or pa.types.is_floating(kind))


def canonical_field(field: pa.Field, depth: int = 0) -> pa.Field:
    """The field in the one layout that stands for its values; an unsupported type is refused."""
    try:
        kind = canonical_type(field.type, depth)
        return pa.field(field.name, kind, field.nullable or pa.types.is_null(kind))
    except InvalidError as error:
        raise InvalidError(f"in {field.name!r}: {error.message}") from None


def canonical_type(kind: pa.DataType, depth: int = 0) -> pa.DataType:
    """The one layout that stands for values of this type; an unsupported type is refused."""
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
    if kind in _NAMES or (is_decimal(kind) and kind.scale >= 0):
        return kind
    if types.is_timestamp(kind) and kind.unit in ("us", "ns"):
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
    """A canonical type as JSON: text, or an object for a nested type."""
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
    """The type that `type_to_json` wrote; anything else is refused."""
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
    """The field that `field_to_json` wrote; list items and map values bring no name."""
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
    if found := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(found[1], found[2])
    if found := _DECIMAL.fullmatch(text):
        width, precision, scale = found[1], int(found[2]), int(found[3])
        if 1 <= precision <= _DIGITS_MAX[width] and scale <= precision:
            make = pa.decimal128 if width == "128" else pa.decimal256
            return make(precision, scale)
    raise InvalidError(f"{text!r} is not a column type: expected one of {_SUPPORTED}")
