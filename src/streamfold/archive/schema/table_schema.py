"""The schema of an archived table: ordered columns, key fields, one stable id, and how it may widen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.archive.schema.column_types import (
    canonical_field,
    field_from_json,
    field_to_json,
    is_decimal,
    is_key_type,
)
from streamfold.errors import InvalidError


def merged_fields(
    old: Iterable[pa.Field], new: Iterable[pa.Field], path: str = ""
) -> list[pa.Field]:
    """The old fields in their order, widened where need be, and the added ones after them."""
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
    """The wider of the two: a source that narrows a type still fits the column."""
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
    """True when every value of `old` is a value of `new`, of the same kind."""
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


#: Hex digits of a schema id: 128 bits, so that two schemas never share one.
ID_DIGITS = 32

#: What a change may be, in the words of the published format.
ACTIONS = ("INSERT", "UPDATE", "DELETE", "TRUNCATE")


@dataclass(frozen=True)
class TableSchema:
    """Columns in order and the fields that identify a row; equal schemas have equal ids.

    `arrow` holds canonical types only. Key fields are never null and of types whose equality is
    exact. A key field of type null means that no row was seen yet: no row fits it, and it takes the
    type of the first one. A table without key fields can be published as bases, not as
    diffs.
    """

    arrow: pa.Schema
    key_fields: tuple[str, ...]

    @classmethod
    def of(
        cls, columns: pa.Schema | Iterable[pa.Field], key_fields: Sequence[str] = ()
    ) -> TableSchema:
        """The schema of any Arrow columns; refused when a type, a name or a key is not usable."""
        keys = tuple(key_fields)
        fields = [canonical_field(field) for field in columns]
        fields = [_nullable(field, field.nullable and field.name not in keys) for field in fields]
        _check_names([field.name for field in fields])
        _check_keys({field.name: field for field in fields}, keys)
        return cls(pa.schema(fields), keys)

    @classmethod
    def from_json(cls, value: object) -> TableSchema:
        """The schema that `to_json` wrote, without parts that are unknown here."""
        match value:
            case {"columns": list(columns), "key_fields": list(keys)} if all(
                isinstance(key, str) for key in keys
            ):
                return cls.of([field_from_json(column) for column in columns], keys)
        raise InvalidError("a schema is an object with the lists columns and key_fields")

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds under `schemas`; the id is the hash of exactly this."""
        return {
            "columns": [field_to_json(field) for field in self.arrow],
            "key_fields": list(self.key_fields),
        }

    @cached_property
    def canonical_json(self) -> bytes:
        """The one text of this schema: keys sorted, no white space, UTF-8."""
        return msgspec.json.encode(self.to_json(), order="sorted")

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(self.canonical_json).hexdigest()[:ID_DIGITS]

    @classmethod
    def of_keys(cls, key_fields: Sequence[str]) -> TableSchema:
        """The schema of a table of which only the names of the key fields are known."""
        return cls.of([pa.field(name, pa.null()) for name in key_fields], key_fields)

    @property
    def has_untyped_key(self) -> bool:
        """Whether no row was seen yet, so that the key fields have no type."""
        return any(pa.types.is_null(self.arrow.field(name).type) for name in self.key_fields)

    @property
    def names(self) -> list[str]:
        return list(self.arrow.names)

    @cached_property
    def changes(self) -> pa.Schema:
        """The Arrow schema of change batches: action, key, before, after.

        Columns of `before` may be null whatever the table says: a DELETE knows the key at least.
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
        """The Arrow schema of these columns, in the order asked for."""
        unknown = [name for name in names if name not in self.arrow.names]
        if unknown or not names:
            raise InvalidError(f"columns {list(names)} are asked for: name some of {self.names}")
        return pa.schema([self.arrow.field(name) for name in names])

    def merged(self, new: TableSchema) -> TableSchema:
        """The schema under which rows of both can be written; nothing written loses its meaning.

        Added columns must be nullable. Types may widen: null to anything, an integer to a wider
        one, float32 to float64, a decimal to more digits. A column that is gone stays, and is
        nullable from then on.
        """
        if new.key_fields != self.key_fields:
            raise SchemaIncompatibleError("the key", list(self.key_fields), list(new.key_fields))
        gone = [name for name in self.key_fields if name not in new.arrow.names]
        if gone:
            raise SchemaIncompatibleError(gone[0], "a key field", "no column")
        return TableSchema.of(merged_fields(self.arrow, new.arrow), self.key_fields)


def _nullable(field: pa.Field, nullable: bool) -> pa.Field:
    """The field with that promise, which a column of type null cannot give."""
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
