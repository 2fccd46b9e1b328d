"""Brings batches into exactly the layout of a schema, or rejects them. Values never change.

Used where batches arrive from a caller, and where files of an older schema are read under a newer
one: absent nullable columns become null, and narrower types widen.

Arrow lets null slots hide values and slices share buffers. The arrays returned here do neither:
lengths are zero where a list is null, and hidden values are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.errors import InvalidError

Bytes = npt.NDArray[np.uint8]

Lengths = npt.NDArray[np.int64]


def as_list(array: pa.Array) -> pa.Array:
    """Return a map as its list of structs, and a list unchanged."""
    if not pa.types.is_map(array.type):
        return array
    kind = array.type
    entry = pa.struct([pa.field("key", pa.string(), nullable=False), kind.item_field])
    return array.cast(pa.list_(entry))


def list_lengths(array: pa.Array) -> Lengths:
    """Return the length of every list, zero where it is null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    counts: Lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return counts


def offsets_of(lengths: Lengths) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:], dtype=np.int32)
    return pa.array(offsets)


def build_list(
    lengths: Lengths, values: pa.Array, kind: pa.DataType, nulls: pa.Array | None
) -> pa.Array:
    """Return a list or map with these lengths. `values` of a map are structs of key and value."""
    offsets = offsets_of(lengths)
    if pa.types.is_map(kind):
        keys, items = values.field(0), values.field(1)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=nulls)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=nulls)


def struct_children(array: pa.Array) -> list[pa.Array]:
    """Return the struct's children, null wherever the struct is."""
    return list(array.flatten())


def build_struct(
    children: list[pa.Array], fields: list[pa.Field], nulls: pa.Array | None
) -> pa.Array:
    return pa.StructArray.from_arrays(children, fields=fields, mask=nulls)


def nulls_of(array: pa.Array) -> pa.Array | None:
    """Return a mask of the null values, or None if there are none."""
    return array.is_null() if array.null_count else None


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch under `schema`. Raises InvalidError naming the unfit column and the reason."""
    if batch.schema.names != schema.names or batch.schema.types != schema.types:
        batch = cast_batch(batch, schema)
    elif batch.schema != schema or batch.schema.metadata:
        batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    try:
        batch.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise InvalidError(f"a batch breaks Arrow's rules: {error}") from None
    for field, column in zip(schema, batch.columns, strict=True):
        check_values(column, field, 0, field.name)
    if any(has_map(field.type) for field in schema):
        batch = pa.RecordBatch.from_arrays(list(map(sorted_maps, batch.columns)), schema=schema)
    return batch


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the schema's columns and types. Does not check nullability or map keys."""
    children = _matching(batch.schema, batch.columns, schema, len(batch), "")
    return pa.RecordBatch.from_arrays(children, schema=schema)


def _matching(
    have: Sequence[pa.Field],
    columns: Sequence[pa.Array],
    want: Sequence[pa.Field],
    rows: int,
    path: str,
) -> list[pa.Array]:
    """Return a column for every wanted field, by name. Rejects other columns."""
    column_of = {field.name: column for field, column in zip(have, columns, strict=True)}
    names = {field.name for field in want}
    if unknown := [path + name for name in column_of if name not in names]:
        raise InvalidError(f"columns {unknown} are not in the schema: merge the schema first")
    return [
        _cast_array(column_of[f.name], f.type, path + f.name)
        if f.name in column_of
        else pa.nulls(rows, f.type)
        for f in want
    ]


def _cast_array(array: pa.Array, kind: pa.DataType, path: str) -> pa.Array:
    if array.type == kind:
        return array
    have, types = array.type, pa.types
    if types.is_struct(have) and types.is_struct(kind):
        children = _matching(list(have), struct_children(array), list(kind), len(array), f"{path}.")
        return build_struct(children, list(kind), nulls_of(array))
    if types.is_map(have) and types.is_map(kind):
        return _cast_list(as_list(array), pa.struct([kind.key_field, kind.item_field]), kind, path)
    if (types.is_list(have) or types.is_large_list(have)) and types.is_list(kind):
        return _cast_list(array, kind.value_type, kind, path)
    if types.is_null(have):
        return pa.nulls(len(array), kind)
    if types.is_nested(have) or types.is_nested(kind):
        raise InvalidError(f"column {path!r} has type {have}, the schema says {kind}")
    try:
        return array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise InvalidError(
            f"column {path!r} has type {have}, the schema says {kind}: {error}"
        ) from None


def _cast_list(array: pa.Array, inner: pa.DataType, kind: pa.DataType, path: str) -> pa.Array:
    values = array.flatten()
    if pa.types.is_struct(inner) and pa.types.is_struct(values.type):
        # Map entries may have different field names, but always the same order.
        fields = _renamed(values.type, inner, kind)
        values = build_struct(struct_children(values), fields, nulls_of(values))
    return build_list(list_lengths(array), _cast_array(values, inner, path), kind, nulls_of(array))


def _renamed(have: pa.DataType, want: pa.DataType, kind: pa.DataType) -> list[pa.Field]:
    if not pa.types.is_map(kind):
        return list(have)
    return [f.with_name(w.name) for f, w in zip(have, want, strict=True)]


def check_values(array: pa.Array, field: pa.Field, excused: int, path: str) -> None:
    """Reject nulls in fields that are not nullable, and maps with a repeated key.

    `excused` nulls are allowed because the struct around them is null.
    """
    if not field.nullable and array.null_count > excused:
        raise InvalidError(
            f"column {path!r} is not nullable and holds {array.null_count - excused} nulls: "
            "fill them, or declare the column nullable"
        )
    kind = field.type
    if pa.types.is_struct(kind) and _has_rules(kind):
        for inner, child in zip(kind, struct_children(array), strict=True):
            check_values(child, inner, array.null_count, f"{path}.{inner.name}")
    elif pa.types.is_map(kind) and _has_rules(kind):
        check_values(as_list(array).flatten().field(1), kind.item_field, 0, path)
    elif pa.types.is_list(kind) and _has_rules(kind):
        check_values(array.flatten(), kind.value_field, 0, path)


def _has_rules(kind: pa.DataType) -> bool:
    inner = kind.item_field if pa.types.is_map(kind) else None
    fields = [inner] if inner else [kind.field(i) for i in range(kind.num_fields)]
    return any(not field.nullable or _has_rules(field.type) for field in fields)


def has_map(kind: pa.DataType) -> bool:
    """Return whether the type contains a map."""
    fields = [kind.field(i) for i in range(kind.num_fields)]
    return pa.types.is_map(kind) or any(has_map(field.type) for field in fields)


def sorted_maps(array: pa.Array) -> pa.Array:
    """Return the same values with every map sorted by key, so that equal maps give equal bytes.

    Rejects repeated keys: in JSON, and in most languages, one of them would win.
    """
    kind = array.type
    if not has_map(kind):
        return array
    if pa.types.is_struct(kind):
        children = [sorted_maps(child) for child in struct_children(array)]
        return build_struct(children, list(kind), nulls_of(array))
    lists = as_list(array)
    values = lists.flatten()
    inner = _sorted_entries(lists, values, kind) if pa.types.is_map(kind) else sorted_maps(values)
    return build_list(list_lengths(lists), inner, kind, nulls_of(array))


def _sorted_entries(lists: pa.Array, entries: pa.Array, kind: pa.DataType) -> pa.Array:
    lengths = list_lengths(lists)
    owners = pa.array(np.repeat(np.arange(len(lengths)), lengths))
    owned = pa.table({"map": owners, "key": entries.field(0)})
    order = pc.sort_indices(owned, sort_keys=[("map", "ascending"), ("key", "ascending")])
    owned = owned.take(order).combine_chunks()
    repeats = pc.and_(*(pc.equal(column[1:], column[:-1]) for column in owned.columns))
    if pc.any(repeats).as_py():
        raise InvalidError("a map has a key twice: keep one of them")
    children = [entries.field(0).take(order), sorted_maps(entries.field(1)).take(order)]
    return build_struct(children, [kind.key_field, kind.item_field], None)


def values_of(array: pa.Array) -> tuple[Bytes, Lengths]:
    """Return the concatenated bytes of a string or binary column's values, and the values' lengths."""
    filled = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    _, offsets, data = filled.buffers()
    bounds = np.frombuffer(offsets, np.int32)[filled.offset : filled.offset + len(filled) + 1]
    view = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return view[bounds[0] : bounds[-1]], np.diff(bounds).astype(np.int64)
