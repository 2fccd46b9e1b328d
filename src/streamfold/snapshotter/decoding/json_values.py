"""Converts JSON values to the form from which the archive's reader makes typed columns.

Fractions are Decimals with all digits. Values that a column cannot hold exactly are rejected, not
rounded.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError, readable_array, restored
from streamfold.archive.schema import is_decimal

#: Nanoseconds per unit of time in sources.
NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}

#: Largest power of ten in a number: beyond doubles and decimals, and still short when written out.
_EXPONENT_MAX = 400
#: Characters of a value in a message.
_SHOWN = 100
#: Nested lists and objects: the limit of column types.
_DEPTH_MAX = 30


def _exact(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except ArithmeticError:  # its exponent is beyond those of decimals
        number = None
    if number is None or abs(number.adjusted()) > _EXPONENT_MAX:
        raise ValueError(f"the number {text[:40]} is too large or too small for any column")
    return number


_decoder = msgspec.json.Decoder(float_hook=_exact)


def decode_exact(raw: bytes | msgspec.Raw) -> Any:
    """Decode JSON with all digits of numbers; UnreadableError if it is invalid."""
    try:
        value = _decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableError(str(error)) from None
    if is_deeper(value, _DEPTH_MAX):
        raise UnreadableError(
            f"values are nested more than {_DEPTH_MAX} deep: no column holds them"
        )
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep."""
    if not isinstance(value, list | dict):
        return False
    inner = value if isinstance(value, list) else value.values()
    return levels == 0 or any(is_deeper(item, levels - 1) for item in inner)


@dataclass(frozen=True, slots=True)
class Hint:
    """What a source declares about a column."""

    #: Its type.
    kind: pa.DataType | None = None
    #: The unit of times; None for text.
    unit: str | None = None
    #: Scale of decimals that are base64 of a big-endian integer.
    packed_scale: int | None = None


PLAIN = Hint()


def typed_array(values: list[Any], kind: pa.DataType, hint: Hint, path: str) -> pa.Array:
    """Return a column of decoded values; UnreadableError names the value that does not fit."""
    try:
        plain = [None if value is None else _plain(value, kind, hint, path) for value in values]
        return restored(readable_array(plain, kind, path), kind)
    except UnreadableError:
        raise
    except (pa.ArrowException, ValueError, OverflowError) as error:
        # The caller then tries each value alone.
        which = repr(values[0])[:_SHOWN] if len(values) == 1 else "a value"
        raise UnreadableError(f"{path}: {which} does not fit {kind} ({error})") from None


def _plain(value: Any, kind: pa.DataType, hint: Hint, path: str) -> Any:
    if isinstance(value, bool):
        return value
    types = pa.types
    if types.is_null(kind) and is_empty(value):
        return None
    if is_decimal(kind):
        return _decimal_text(value, hint, path)
    if types.is_temporal(kind) and isinstance(value, int):
        return _temporal_text(value, kind, hint, path)
    if types.is_floating(kind) and isinstance(value, int | Decimal):
        return _double(value, path)
    if isinstance(value, Decimal):
        return _whole(value, kind, path)
    if types.is_list(kind) and isinstance(value, list):
        return [None if x is None else _plain(x, kind.value_type, PLAIN, path) for x in value]
    if types.is_map(kind) and isinstance(value, dict):
        return {
            name: None if x is None else _plain(x, kind.item_type, PLAIN, path)
            for name, x in value.items()
        }
    if types.is_struct(kind) and isinstance(value, dict):
        return _plain_struct(value, kind, path)
    return value


def _plain_struct(value: dict[str, Any], kind: pa.DataType, path: str) -> dict[str, Any]:
    kinds = {field.name: field.type for field in kind}
    return {
        name: x
        if x is None or name not in kinds
        else _plain(x, kinds[name], PLAIN, f"{path}.{name}")
        for name, x in value.items()
        if name in kinds or not is_empty(x)
    }


def is_empty(value: Any) -> bool:
    """Return whether a value shows no type: null, or lists and objects of only nulls."""
    if isinstance(value, list):
        return all(map(is_empty, value))
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None


def _double(value: int | Decimal, path: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise UnreadableError(f"{path}: {value} is too large for a double")
    return number


def _whole(value: Decimal, kind: pa.DataType, path: str) -> int:
    if pa.types.is_integer(kind) and value == value.to_integral_value():
        return int(value)
    raise UnreadableError(f"{path}: {value} is a number with a fraction, the column is {kind}")


def _decimal_text(value: Any, hint: Hint, path: str) -> Any:
    if isinstance(value, dict) and set(value) == {"scale", "value"}:
        return format(variable_decimal(value, path), "f")
    if isinstance(value, str) and hint.packed_scale is not None:
        return format(_unpacked(value, hint.packed_scale, path), "f")
    return format(Decimal(value), "f") if isinstance(value, int | Decimal) else value


def variable_decimal(value: dict[str, Any], path: str) -> Decimal:
    """Decode a Debezium decimal that holds its own scale."""
    try:
        scale = int(value["scale"])
    except (TypeError, ValueError):
        raise UnreadableError(f"{path}: {value['scale']!r} is not the scale of a decimal") from None
    return _unpacked(value["value"], scale, path)


def _unpacked(text: object, scale: int, path: str) -> Decimal:
    try:
        number = int.from_bytes(base64.b64decode(str(text), validate=True), "big", signed=True)
    except binascii.Error:
        raise UnreadableError(f"{path}: {text!r} is not a decimal in base64") from None
    sign, digits = (1, str(-number)) if number < 0 else (0, str(number))
    return Decimal((sign, tuple(map(int, digits)), -scale))


def _temporal_text(value: int, kind: pa.DataType, hint: Hint, path: str) -> str:
    """Return a count since 1970 in the form that the archive's reader takes."""
    if pa.types.is_date(kind):
        return str(value)
    if hint.unit is None:
        raise UnreadableError(
            f"{path}: {value} is a number, the column is {kind}: write times as text, or configure "
            "the decoder's time_unit"
        )
    counted = value * NANOSECONDS[hint.unit]
    whole, rest = divmod(counted, NANOSECONDS[kind.unit])
    if rest:
        raise UnreadableError(f"{path}: {value} {hint.unit} is not a whole number of {kind.unit}")
    if pa.types.is_time(kind):
        seconds, rest = divmod(counted, 10**9)
        return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{rest:09}"[
            : 15 if kind.unit == "us" else 18
        ]
    return str(whole)
