"""Reads column types from Kafka Connect schemas, as Debezium writes them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from streamfold.snapshotter.decoding.json_values import Hint

_PLAIN = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bytes": pa.binary(),
}

_CONNECT, _DEBEZIUM = "org.apache.kafka.connect.data", "io.debezium.time"
_TIMES = {
    f"{_CONNECT}.Date": Hint(pa.date32()),
    f"{_CONNECT}.Time": Hint(pa.time64("us"), "ms"),
    f"{_CONNECT}.Timestamp": Hint(pa.timestamp("us"), "ms"),
    f"{_DEBEZIUM}.Date": Hint(pa.date32()),
    f"{_DEBEZIUM}.Time": Hint(pa.time64("us"), "ms"),
    f"{_DEBEZIUM}.MicroTime": Hint(pa.time64("us"), "us"),
    f"{_DEBEZIUM}.NanoTime": Hint(pa.time64("ns"), "ns"),
    f"{_DEBEZIUM}.Timestamp": Hint(pa.timestamp("us"), "ms"),
    f"{_DEBEZIUM}.MicroTimestamp": Hint(pa.timestamp("us"), "us"),
    f"{_DEBEZIUM}.NanoTimestamp": Hint(pa.timestamp("ns"), "ns"),
    f"{_DEBEZIUM}.ZonedTimestamp": Hint(pa.timestamp("us", "UTC")),
}
_DECIMAL = f"{_CONNECT}.Decimal"
#: Digits of a decimal whose source does not say: all that 128 bits hold.
_DIGITS_DEFAULT = 38
#: A decimal with a scale in every value, such as a `numeric` of PostgreSQL without one: Spark's
#: default. More digits widen it.
_VARIABLE = "io.debezium.data.VariableScaleDecimal"
_VARIABLE_TYPE = pa.decimal128(_DIGITS_DEFAULT, 18)


def hints_of(schema: Any) -> dict[str, Hint]:
    """Return hints by column from the schema of an envelope; none for what is not understood."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    for image in fields if isinstance(fields, list) else ():
        if isinstance(image, dict) and image.get("field") in ("after", "before"):
            columns = image.get("fields") or ()
            if found := dict(_hint(c) for c in columns if isinstance(c, dict) and "field" in c):
                return found
    return {}


def _hint(column: dict[str, Any]) -> tuple[str, Hint]:
    name, kind = column.get("name"), column.get("type")
    if name in _TIMES:
        return str(column["field"]), _TIMES[name]
    if name == _DECIMAL and kind == "bytes":
        return str(column["field"]), _decimal(column.get("parameters") or {})
    return str(column["field"]), Hint(_kind(column))


def _kind(declared: Any) -> pa.DataType | None:
    """Return the type of a column, an item or a field; None for what is not understood."""
    if not isinstance(declared, dict):
        return None
    match declared.get("name"), declared.get("type"):
        case (name, _) if name == _VARIABLE:
            return _VARIABLE_TYPE
        case (name, _) if name in _TIMES or name == _DECIMAL:
            return None  # numbers in a list or an object, whose unit would be lost
        case (_, "array"):
            item = _kind(declared.get("items"))
            return None if item is None else pa.list_(item)
        case (_, "map"):
            return _map_type(declared)
        case (_, "struct"):
            return _struct_type(declared.get("fields"))
        case (_, kind):
            return _PLAIN.get(str(kind))
    return None


def _map_type(declared: dict[str, Any]) -> pa.DataType | None:
    keys, values = _kind(declared.get("keys")), _kind(declared.get("values"))
    return pa.map_(keys, values) if keys == pa.string() and values is not None else None


def _struct_type(declared: Any) -> pa.DataType | None:
    fields = [field for field in declared or () if isinstance(field, dict)]
    kinds = {str(field.get("field")): _kind(field) for field in fields}
    if not kinds or len(kinds) < len(fields) or None in kinds.values():
        return None
    return pa.struct([pa.field(name, kind) for name, kind in kinds.items()])


def _decimal(parameters: dict[str, Any]) -> Hint:
    scale = int(parameters.get("scale", 0))
    digits = int(parameters.get("connect.decimal.precision", _DIGITS_DEFAULT))
    if 0 <= scale <= digits <= _DIGITS_DEFAULT:
        return Hint(pa.decimal128(digits, scale), packed_scale=scale)
    return Hint(packed_scale=scale)
