"""Reads JSON rows value by value: slower than Arrow, but it finds new columns, wider types, and values
that do not fit.

Every column that a source declares or a row names exists, with the declared type or that of its
values. Text stays text. A column that holds only nulls or empty objects has type `null`, which widens
to any other; an empty list is a list of nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError
from streamfold.archive.schema import TableSchema, is_decimal, widens
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, Images, RowReading
from streamfold.snapshotter.decoding.json_values import (
    Hint,
    decode_exact,
    is_empty,
    typed_array,
    variable_decimal,
)

_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
#: Digits that 128 and 256 bits hold.
_DIGITS_128, _DIGITS_256 = 38, 76


def learned_fields(
    learned: Sequence[pa.Field], objects: Iterable[dict[str, Any]], hints: dict[str, Hint]
) -> list[pa.Field]:
    """Return the known fields, widened for the values, then declared and new ones.

    Values that fit no wider type change nothing; reading them then fails.
    """
    values: dict[str, list[Any]] = {name: [] for name in hints if name}
    for item in objects:
        for name, value in item.items():
            if name:
                column = values.setdefault(name, [])
                if value is not None:
                    column.append(value)

    def kind_of(name: str, kind: pa.DataType) -> pa.DataType:
        declared = hints[name].kind if name in hints else None
        untyped = pa.types.is_null(kind) and declared is not None
        return _widened(declared if untyped else kind, values.pop(name, []))

    fields = [field.with_type(kind_of(field.name, field.type)) for field in learned]
    return fields + [pa.field(name, kind_of(name, pa.null())) for name in list(values)]


def learned_type(values: Sequence[Any]) -> pa.DataType:
    """Return the type of non-null values; `null` if they show none."""
    types = set(map(type, values))
    if types == {bool}:
        return pa.bool_()
    if types == {int}:
        return _integer_type(min(values), max(values))
    if types and types <= {int, Decimal}:
        return pa.float64()
    if types == {str}:
        return pa.string()
    if types == {list}:
        items = [item for value in values for item in value if item is not None]
        return pa.list_(learned_type(items))
    if types == {dict}:
        fields = learned_fields([], values, {})
        # No format holds an object without fields.
        return pa.struct(fields) if fields else pa.null()
    if not types:
        return pa.null()
    # No type fits all: use that of the first value, and the others are reported.
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
    """Return the digits before and after the point; None if it is not a number."""
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
    # normalize() would round to the digits of Python's context.
    _, digits, exponent = number.as_tuple()
    written = "".join(map(str, digits)).rstrip("0")
    if not written:
        return 0, 0
    whole = len(digits) + int(exponent)
    return max(whole, 0), max(len(written) - whole, 0)


def _variable_digits(value: dict[str, Any]) -> tuple[int, int] | None:
    """Return the digits of a decimal that holds its own scale."""
    try:
        return _digits(variable_decimal(value, ""))
    except UnreadableError:
        return None


def _decimal_type(precision: int, scale: int, bits: int) -> pa.DataType:
    narrow = precision <= _DIGITS_128 and bits == 128
    return pa.decimal128(precision, scale) if narrow else pa.decimal256(precision, scale)


@dataclass(slots=True)
class ValueReader:
    """Reads rows value by value; `unfit` says for each row which columns do not fit, and are null."""

    reading: RowReading
    rows: list[dict[str, Any] | None] = field(default_factory=list)
    unsent: list[tuple[int, str]] = field(default_factory=list)
    unfit: dict[int, list[str]] = field(default_factory=dict)
    #: Rows that are not JSON objects.
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, raws: Sequence[msgspec.Raw]) -> None:
        for raw in raws:
            index = len(self.rows)
            try:
                self.rows.append(None if raw == ABSENT else self._object(index, raw))
            except UnreadableError as error:
                self.rows.append(None)
                self.broken[index] = str(error)

    def _object(self, index: int, raw: msgspec.Raw) -> dict[str, Any]:
        value = decode_exact(raw)
        if not isinstance(value, dict):
            raise UnreadableError(f"a row must be an object, not {type(value).__name__}")
        if self.reading.marker is not None:
            for name, item in value.items():
                if self._is_unsent(item):
                    self.unsent.append((index, name))
                    value[name] = None
        return value

    def _is_unsent(self, item: Any) -> bool:
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        elif isinstance(item, dict) and len(item) == 1:
            item = next(iter(item))
        return isinstance(item, str) and item in self.reading.markers

    def keep_only(self, names: Sequence[str]) -> None:
        """Reject rows with other fields, whose meaning is unknown."""
        for index, row in enumerate(self.rows):
            if row and (
                others := [n for n, v in row.items() if n not in names and not is_empty(v)]
            ):
                self.broken[index] = (
                    f"the key has fields {others}: the key fields are {list(names)}"
                )
                self.rows[index] = None

    def columns(self, fields: Sequence[pa.Field]) -> dict[str, pa.Array]:
        """Return the rows under these fields, and note in `unfit` what does not fit."""
        self._refuse_unknown({f.name for f in fields})
        return {f.name: self._column(f) for f in fields}

    def _refuse_unknown(self, names: set[str]) -> None:
        for index, row in enumerate(self.rows):
            if row and (unknown := [n for n in row if n not in names and not is_empty(row[n])]):
                self.unfit.setdefault(index, []).append(f"fields {unknown} are not columns")

    def _column(self, column: pa.Field) -> pa.Array:
        hint, name = self.reading.hint(column), column.name
        values = [None if row is None else row.get(name) for row in self.rows]
        try:
            return typed_array(values, column.type, hint, name)
        except UnreadableError:
            return self._fitting(values, column, hint)

    def _fitting(self, values: list[Any], column: pa.Field, hint: Hint) -> pa.Array:
        for index, value in enumerate(values):
            try:
                typed_array([value], column.type, hint, column.name)
            except UnreadableError as error:
                self.unfit.setdefault(index, []).append(str(error))
                values[index] = None
        return typed_array(values, column.type, hint, column.name)

    def images(self, columns: dict[str, pa.Array], start: int, count: int) -> Images:
        """Return `count` of the added rows from `start` on."""
        present = np.fromiter(
            (r is not None for r in self.rows[start : start + count]), np.bool_, count
        )
        images = Images({n: c.slice(start, count) for n, c in columns.items()}, present)
        for index, name in self.unsent:
            if start <= index < start + count and name in columns:
                marks = images.unsent.setdefault(name, np.zeros(count, np.bool_))
                marks[index - start] = True
        return images


def learned_schema(
    schema: TableSchema | None, key_fields: Sequence[str], readers: Sequence[ValueReader]
) -> TableSchema | None:
    """Return the schema widened for all rows; None while no row shows the key.

    Raises SchemaIncompatibleError if the rows are incompatible with `schema`.
    """
    columns = list(schema.arrow) if schema else []
    rows = (row for reader in readers for row in reader.rows if row)
    fields = learned_fields(columns, rows, readers[0].reading.hints)
    typed = {f.name for f in fields if not pa.types.is_null(f.type)}
    if schema is None and not typed.issuperset(key_fields):
        return None
    learned = TableSchema.of(fields, key_fields)
    return schema.merged(learned) if schema else learned
