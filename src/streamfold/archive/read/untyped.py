"""Rows and changes of writers that record no schema. Types are declared or inferred.

Keys come from the images. Files of one archive may differ in their types: a column may be null
everywhere in one, or an integer written as a double. The resulting columns fit all of them.

The published writer takes rows from PostgreSQL. Its baseline has typed values and its stream has
text, so a column may be a number in one file and a string in the next. Declared types reconcile
both, and keep decimals exact. A column of unknown type stays as found.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.conforming import build_struct, nulls_of, struct_children
from streamfold.archive.manifest.model import Manifest
from streamfold.archive.read.folding import Delta, columns_of, fitted
from streamfold.archive.schema import is_decimal
from streamfold.errors import InvalidError

#: Decimal digits that fit 128 and 256 bits.
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
#: A length or a number of fractional digits, which do not affect the type.
_MODIFIER = re.compile(r"\(\d+\)")
_TRUE, _FALSE = ("t", "true"), ("f", "false")


@dataclass(frozen=True, slots=True)
class DeclaredTypes:
    """The types in a manifest's `columns`, by name, as PostgreSQL names them."""

    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> DeclaredTypes:
        columns = [c for c in manifest.columns or [] if isinstance(c, dict)]
        return cls(
            {str(c["Name"]): str(c["Type"]) for c in columns if c.get("Name") and c.get("Type")}
        )

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with every column in its declared type."""
        if self.names.keys().isdisjoint(batch.schema.names):
            return batch
        return pa.RecordBatch.from_struct_array(self._image(batch.to_struct_array()))

    def changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the changes with every column of `before` and `after` in its declared type."""
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
        if numeric := _NUMERIC.fullmatch(text):
            return _numeric(column, numeric[1], numeric[2])
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
        # Arrow rejects casts that would lose digits. A float4 became a double on the way.
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
    """Decode base64, as in the baseline, or hexadecimal digits, as in the stream."""
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
    """Return exact decimals with the declared digits, or else as many as the values need."""
    if is_decimal(column.type):
        return column
    # A double's text is the shortest that reads back as the same double, so it is the writer's.
    values = [None if v is None else Decimal(str(v)) for v in column.to_pylist()]
    if precision is not None:
        return pa.array(values, decimal_type(int(precision), int(scale or 0)))
    present = [value for value in values if value is not None]
    if not present:
        return pa.nulls(len(column))
    whole, fraction = digits_of(present)
    return pa.array(values, decimal_type(max(1, whole + fraction), fraction))


def digits_of(values: Iterable[Decimal]) -> tuple[int, int]:
    """Return the digits before and after the point that suffice for all values."""
    whole = fraction = 0
    for value in values:
        if not value.is_finite():
            raise ValueError(f"{value} is not a number that a decimal can hold")
        whole = max(whole, value.adjusted() + 1)
        fraction = max(fraction, -int(value.as_tuple().exponent))
    return whole, fraction


def decimal_type(precision: int, scale: int) -> pa.DataType:
    """Return the decimal type with these digits. Raises ValueError if there are too many."""
    if precision > _DIGITS_256:
        raise ValueError(f"{precision} digits are more than the {_DIGITS_256} that a decimal holds")
    return (
        pa.decimal128(precision, scale)
        if precision <= _DIGITS_128
        else pa.decimal256(precision, scale)
    )


def with_keys(changes: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Return changes of unknown schema with typed keys, from the images or from the key's text."""
    text = changes["key"].flatten()[0]
    images = changes["after"].type
    key_columns = [f for f in images if f.name in keys]
    key_schema = pa.schema([pa.field(f.name, f.type) for f in key_columns])
    sides = [columns_of(changes[side], key_schema) for side in ("after", "before")]
    values = {f.name: pc.coalesce(*(s[f.name] for s in sides)) for f in key_columns}
    if len(keys) == 1 and (keys[0] in values or not images.num_fields):
        # A published DELETE may have no image. The text of a single key is its value.
        value = values.get(keys[0], pa.nulls(len(changes), pa.string()))
        values[keys[0]] = pc.coalesce(value, _parsed(text, value.type))
    truncates = pc.equal(changes["action"], "TRUNCATE")
    if not images.num_fields and pc.all(truncates).as_py():
        values = {name: pa.nulls(len(changes)) for name in keys}  # no change has a key or a column
    for name in keys:
        if name not in values:
            names = [field.name for field in images]
            raise InvalidError(
                f"{name!r} is assumed to be the key field, but no change has a column of that name: "
                f"give --key (key_fields in Python) with the key among {names}",
                code="key_fields_unknown",
            )
        if values[name].null_count > pc.sum(truncates).as_py():
            raise ArtifactCorruptError(
                f"a change has no value for key field {name!r}: name the key fields of the table"
            )
    key = pa.StructArray.from_arrays([values[name] for name in keys], list(keys), mask=truncates)
    return pa.RecordBatch.from_arrays(
        [changes["action"], key, changes["before"], changes["after"]],
        ["action", "key", "before", "after"],
    )


def _parsed(text: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return text.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ArtifactCorruptError(f"the key of a change is not of type {kind}: {error}") from None


def fold_untyped(
    rows: Sequence[pa.RecordBatch], diffs: Sequence[Sequence[pa.RecordBatch]], keys: Sequence[str]
) -> pa.Table:
    """Return rows with changes applied, where each file has its own columns."""
    changes = [batch for diff in diffs for batch in diff]
    columns = unified([*map(_row_types, rows), *map(_image_types, changes)])
    delta = Delta(columns, _key_columns(columns, changes, keys))
    for diff in diffs:
        delta.begin()
        for batch in diff:
            delta.add(batch)
    untouched = delta.untouched(fitted(batch, columns) for batch in rows)
    return pa.concat_tables([columns.empty_table(), *untouched, delta.rows()])


def _row_types(rows: pa.RecordBatch) -> pa.Schema:
    return _types(rows.schema, ([column] for column in rows.columns))


def _image_types(changes: pa.RecordBatch) -> pa.Schema:
    images = (struct_children(changes[side]) for side in ("before", "after"))
    return _types(changes["after"].type, zip(*images, strict=True))


def _types(fields: Iterable[pa.Field], columns: Iterable[Sequence[pa.Array]]) -> pa.Schema:
    """Return the fields, with type null for columns without values.

    Such columns were inferred as strings, but fit any type.
    """
    return pa.schema(
        [
            pa.field(f.name, pa.null())
            if pa.types.is_string(f.type) and all(a.null_count == len(a) for a in arrays)
            else f
            for f, arrays in zip(fields, columns, strict=True)
        ]
    )


def unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return columns that fit the values of all schemas."""
    try:
        merged = pa.unify_schemas([pa.schema([]), *schemas], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ArtifactCorruptError(
            f"no type fits a column in all files, give the table's schema: {error}"
        ) from None
    return pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in merged])


def _key_columns(
    columns: pa.Schema, changes: Sequence[pa.RecordBatch], keys: Sequence[str]
) -> pa.Schema:
    if not changes:
        return pa.schema([])
    if not columns.names:  # only deletions, of rows that do not exist
        return pa.schema([pa.field(name, pa.string()) for name in keys])
    if unknown := [name for name in keys if name not in columns.names]:
        raise InvalidError(
            f"key fields {unknown} are not columns: give key fields among {columns.names}"
        )
    return pa.schema([columns.field(name) for name in keys])
