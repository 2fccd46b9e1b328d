"""Lists, maps and structs taken apart and put together, whatever slice or layout they come in.

Arrow lets null slots hide values and slices share buffers. What these functions return has neither:
lengths are zero where a list is null, and hidden values are dropped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Lengths = npt.NDArray[np.int64]


def as_list(array: pa.Array) -> pa.Array:
    """A map as the list of structs that it is; a list as it is."""
    if not pa.types.is_map(array.type):
        return array
    kind = array.type
    entry = pa.struct([pa.field("key", pa.string(), nullable=False), kind.item_field])
    return array.cast(pa.list_(entry))


def list_lengths(array: pa.Array) -> Lengths:
    """The length of every list, zero where it is null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    found: Lengths = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def offsets_of(lengths: Lengths) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:], dtype=np.int32)
    return pa.array(offsets)


def build_list(
    lengths: Lengths, values: pa.Array, kind: pa.DataType, nulls: pa.Array | None
) -> pa.Array:
    """The list or map of these lengths; `values` of a map are structs of key and value."""
    offsets = offsets_of(lengths)
    if pa.types.is_map(kind):
        keys, items = values.field(0), values.field(1)
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=nulls)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=nulls)


def struct_children(array: pa.Array) -> list[pa.Array]:
    """The children, null wherever the struct is."""
    return list(array.flatten())


def build_struct(
    children: list[pa.Array], fields: list[pa.Field], nulls: pa.Array | None
) -> pa.Array:
    return pa.StructArray.from_arrays(children, fields=fields, mask=nulls)


def nulls_of(array: pa.Array) -> pa.Array | None:
    """Which values are null; None without nulls."""
    return array.is_null() if array.null_count else None
