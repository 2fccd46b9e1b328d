"""How columns may change over a table's life without changing what was written."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from streamfold.archive.errors import SchemaIncompatibleError
from streamfold.archive.schema.column_types import is_decimal


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
    """The wider of the two: a source that narrows a type still fits into what is there."""
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
