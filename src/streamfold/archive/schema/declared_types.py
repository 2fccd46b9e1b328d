"""Types that a published manifest declares in `columns`, for files that come without a schema.

The published writer takes rows from PostgreSQL: its baseline has typed values and its stream has text,
so a column may be a number in one file and a string in the next. Declared types bring both together,
and keep decimals what they are. A column of an unknown type stays as it was found.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.nesting import build_struct, nulls_of, struct_children
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.schema.column_types import is_decimal

#: Decimal digits that 128 and 256 bits hold.
_DIGITS_128, _DIGITS_256 = 38, 76
_INTEGERS = {
    pa.int16(): ("int2", "smallint", "smallserial"),
    pa.int32(): ("int4", "integer", "int", "serial"),
    pa.int64(): ("int8", "bigint", "bigserial", "oid"),
}
_FLOATS = {pa.float32(): ("float4", "real"), pa.float64(): ("float8", "double precision")}
_OTHERS: dict[pa.DataType, tuple[str, ...]] = {
    pa.bool_(): ("bool", "boolean"),
    pa.string(): (
        "text",
        "varchar",
        "character varying",
        "bpchar",
        "character",
        "char",
        "uuid",
    ),
    pa.binary(): ("bytea",),
    pa.date32(): ("date",),
    pa.time64("us"): ("time", "time without time zone"),
    pa.timestamp("us"): ("timestamp", "timestamp without time zone"),
    pa.timestamp("us", "UTC"): ("timestamptz", "timestamp with time zone"),
}
_KINDS = {
    name: kind for kind, names in {**_INTEGERS, **_FLOATS, **_OTHERS}.items() for name in names
}
_NUMERIC = re.compile(r"(?:numeric|decimal)(?:\((\d+)(?:, ?(\d+))?\))?")
#: A length, or digits of a second, which say nothing about the type.
_MODIFIER = re.compile(r"\(\d+\)")
_TRUE, _FALSE = ("t", "true"), ("f", "false")


@dataclass(frozen=True, slots=True)
class DeclaredTypes:
    """The types of a manifest's `columns`, by name, as PostgreSQL calls them."""

    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> DeclaredTypes:
        columns = [c for c in manifest.columns or [] if isinstance(c, dict)]
        return cls(
            {str(c["Name"]): str(c["Type"]) for c in columns if c.get("Name") and c.get("Type")}
        )

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with every column in its declared type."""
        if self.names.keys().isdisjoint(batch.schema.names):
            return batch
        return pa.RecordBatch.from_struct_array(self._image(batch.to_struct_array()))

    def changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The changes with every column of `before` and `after` in its declared type."""
        for name in ("before", "after"):
            index = batch.schema.get_field_index(name)
            batch = batch.set_column(index, name, self._image(batch[name]))
        return batch

    def _image(self, structs: pa.StructArray) -> pa.StructArray:
        names = [field.name for field in structs.type]
        columns = [
            _typed(column, name, self.names[name]) if name in self.names else column
            for name, column in zip(names, struct_children(structs), strict=True)
        ]
        fields = [pa.field(name, c.type) for name, c in zip(names, columns, strict=True)]
        return build_struct(columns, fields, nulls_of(structs))


def _typed(column: pa.Array, name: str, declared: str) -> pa.Array:
    text = declared.strip().lower()
    try:
        if found := _NUMERIC.fullmatch(text):
            return _numeric(column, found[1], found[2])
        kind = _KINDS.get(_MODIFIER.sub("", text).strip())
        return column if kind is None else _cast(column, kind)
    except (pa.ArrowException, ValueError, InvalidOperation) as error:
        raise ArtifactCorruptError(
            f"column {name!r} is declared as {declared} in the manifest, and holds another value "
            f"({error}): correct the manifest, or give a schema of your own"
        ) from None


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.null_count == len(column):
        return pa.nulls(len(column), kind)
    if not pa.types.is_string(column.type):
        # Arrow refuses casts that would lose digits. A float4 became a double on the way.
        return column.cast(kind, safe=not pa.types.is_float32(kind))
    if pa.types.is_boolean(kind):
        return _each(column, kind, _truth)
    if pa.types.is_binary(kind):
        return _each(column, kind, _bytes)
    if pa.types.is_temporal(kind):
        return _moments(column, kind)
    return column.cast(kind)


def _each(column: pa.Array, kind: pa.DataType, read: Callable[[str], Any]) -> pa.Array:
    return pa.array([None if v is None else read(v) for v in column.to_pylist()], kind)


def _truth(text: str) -> bool:
    if text in _TRUE + _FALSE:
        return text in _TRUE
    raise ValueError(f"{text!r} is neither true nor false")


def _bytes(text: str) -> bytes:
    """Base64, as the baseline has them, or hexadecimal digits, as the stream has them."""
    try:
        return (
            bytes.fromhex(text[2:])
            if text.startswith("\\x")
            else base64.b64decode(text, validate=True)
        )
    except binascii.Error:
        raise ValueError(f"{text!r} is neither base64 nor hexadecimal") from None


def _moments(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind) and kind.tz:
        return column.cast(kind)
    # Values without a zone are published as RFC 3339 in UTC.
    bare = pc.replace_substring_regex(column, "(Z|[+]00(:?00)?)$", "")
    if pa.types.is_time(kind):
        stamps = pc.binary_join_element_wise("1970-01-01T", bare, "").cast(pa.timestamp("us"))
        return stamps.cast(pa.int64()).cast(kind)
    if pa.types.is_date(kind):
        return pc.utf8_slice_codeunits(bare, 0, 10).cast(kind)
    return bare.cast(kind)


def _numeric(column: pa.Array, precision: str | None, scale: str | None) -> pa.Array:
    """Exact decimals: of the declared digits, else of as many as the values need."""
    if is_decimal(column.type):
        return column
    # The text of a double is the shortest that is the same double: what its writer had.
    values = [None if v is None else Decimal(str(v)) for v in column.to_pylist()]
    if precision is not None:
        return pa.array(values, decimal_type(int(precision), int(scale or 0)))
    known = [value for value in values if value is not None]
    if not known:
        return pa.nulls(len(column))
    whole, fraction = digits_of(known)
    return pa.array(values, decimal_type(max(1, whole + fraction), fraction))


def digits_of(values: Iterable[Decimal]) -> tuple[int, int]:
    """The digits before and after the point that hold all of these."""
    whole = fraction = 0
    for value in values:
        if not value.is_finite():
            raise ValueError(f"{value} is not a number that a decimal can hold")
        whole = max(whole, value.adjusted() + 1)
        fraction = max(fraction, -int(value.as_tuple().exponent))
    return whole, fraction


def decimal_type(precision: int, scale: int) -> pa.DataType:
    """The decimal of these digits; ValueError if it has too many."""
    if precision > _DIGITS_256:
        raise ValueError(f"{precision} digits are more than the {_DIGITS_256} that a decimal holds")
    return (
        pa.decimal128(precision, scale)
        if precision <= _DIGITS_128
        else pa.decimal256(precision, scale)
    )
