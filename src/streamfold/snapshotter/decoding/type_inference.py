"""Learns types from values, and widens types until they hold them.

Text is always text. Every column that a source declares or a row names exists, with the declared type
or else the type of its values. While it holds only null or empty objects its type is `null`, which
widens to any other; an empty list is a list of nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError
from streamfold.archive.schema import is_decimal, widens
from streamfold.snapshotter.decoding.json_values import Hint, variable_decimal

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
#: Digits that 128 and 256 bits hold.
_DIGITS_128, _DIGITS_256 = 38, 76


def learned_fields(
    known: Sequence[pa.Field], objects: Iterable[dict[str, Any]], hints: dict[str, Hint]
) -> list[pa.Field]:
    """Return the known fields, widened as values need it, then the declared and the new ones.

    Values that fit no wider type change nothing: reading them with these fields fails.
    """
    # A column must have a name.
    values: dict[str, list[Any]] = {name: [] for name in hints if name}
    for item in objects:
        for name, value in item.items():
            if name:
                found = values.setdefault(name, [])
                if value is not None:
                    found.append(value)

    def kind_of(name: str, kind: pa.DataType) -> pa.DataType:
        declared = hints[name].kind if name in hints else None
        untyped = pa.types.is_null(kind) and declared is not None
        return _widened(declared if untyped else kind, values.pop(name, []))

    fields = [field.with_type(kind_of(field.name, field.type)) for field in known]
    return fields + [pa.field(name, kind_of(name, pa.null())) for name in list(values)]


def learned_type(values: Sequence[Any]) -> pa.DataType:
    """Return the type of values that are not null; `null` if they show none."""
    found = set(map(type, values))
    if found == {bool}:
        return pa.bool_()
    if found == {int}:
        return _integer_type(min(values), max(values))
    if found and found <= {int, Decimal}:
        return pa.float64()
    if found == {str}:
        return pa.string()
    if found == {list}:
        items = [item for value in values for item in value if item is not None]
        return pa.list_(learned_type(items))
    if found == {dict}:
        fields = learned_fields([], values, {})
        # No format holds an object without fields, so it is null until it has one.
        return pa.struct(fields) if fields else pa.null()
    if not found:
        return pa.null()
    # No type fits all: use that of the first; the others are then reported one by one.
    return learned_type([value for value in values if type(value) is type(values[0])])


def _integer_type(least: int, greatest: int) -> pa.DataType:
    if least >= -(2**63) and greatest < 2**63:
        return pa.int64()
    if least >= 0 and greatest < 2**64:
        return pa.uint64()
    digits = max(len(str(abs(least))), len(str(abs(greatest))))
    return _decimal_type(min(digits, _DIGITS_256), 0, 128)


def _widened(kind: pa.DataType, values: Sequence[Any]) -> pa.DataType:
    types = pa.types
    if types.is_null(kind):
        return learned_type(values)
    if types.is_integer(kind):
        return _wider_integer(kind, [v for v in values if type(v) is int])
    if is_decimal(kind):
        return _wider_decimal(kind, values)
    if types.is_struct(kind):
        return pa.struct(learned_fields(list(kind), _of(values, dict), {}))
    if types.is_list(kind):
        items = [item for value in _of(values, list) for item in value if item is not None]
        return pa.list_(kind.value_field.with_type(_widened(kind.value_type, items)))
    if types.is_map(kind):
        items = [x for value in _of(values, dict) for x in value.values() if x is not None]
        return pa.map_(pa.string(), kind.item_field.with_type(_widened(kind.item_type, items)))
    return kind


def _of(values: Iterable[Any], kind: type) -> list[Any]:
    return [value for value in values if isinstance(value, kind)]


def _wider_integer(kind: pa.DataType, values: Sequence[int]) -> pa.DataType:
    if not values:
        return kind
    least, greatest = min(values), max(values)
    candidates = [kind, *(k for k in (*_UNSIGNED, *_SIGNED) if widens(kind, k))]
    return next((k for k in candidates if _holds(k, least, greatest)), kind)


def _holds(kind: pa.DataType, least: int, greatest: int) -> bool:
    bits: int = kind.bit_width
    if pa.types.is_unsigned_integer(kind):
        return bool(least >= 0 and greatest < 2**bits)
    return bool(-(2 ** (bits - 1)) <= least and greatest < 2 ** (bits - 1))


def _wider_decimal(kind: pa.DataType, values: Sequence[Any]) -> pa.DataType:
    scale, whole = kind.scale, kind.precision - kind.scale
    for value in values:
        digits = _digits(value)
        if digits is not None:
            whole, scale = max(whole, digits[0]), max(scale, digits[1])
    if whole + scale > _DIGITS_256 or (scale, whole) == (kind.scale, kind.precision - kind.scale):
        return kind
    return _decimal_type(whole + scale, scale, kind.bit_width)


def _digits(value: Any) -> tuple[int, int] | None:
    """Return the digits that a number needs before and after the point; None if it is not a number."""
    if isinstance(value, dict) and set(value) == {"scale", "value"}:
        return _variable_digits(value)
    if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
        return None
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    # Not by normalize(), which rounds to the digits of Python's context.
    _, digits, exponent = number.as_tuple()
    written = "".join(map(str, digits)).rstrip("0")
    if not written:
        return 0, 0
    whole = len(digits) + int(exponent)
    return max(whole, 0), max(len(written) - whole, 0)


def _variable_digits(value: dict[str, Any]) -> tuple[int, int] | None:
    """Return the digits of a decimal whose source sends its scale with every value."""
    try:
        return _digits(variable_decimal(value, ""))
    except UnreadableError:
        return None


def _decimal_type(precision: int, scale: int, bits: int) -> pa.DataType:
    narrow = precision <= _DIGITS_128 and bits == 128
    return pa.decimal128(precision, scale) if narrow else pa.decimal256(precision, scale)
