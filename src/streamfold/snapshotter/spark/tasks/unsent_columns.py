"""Fills columns that a source did not send, because they did not change, from the previous table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.read.folding import KeyIndex
from streamfold.archive.schema import TableSchema

Numbers = npt.NDArray[np.int64]


def has_unsent(net: pa.Table) -> bool:
    """Return whether any change leaves a column unchanged."""
    return bool(pc.any(pc.greater(pc.list_value_length(net["unchanged"]), 0)).as_py())


def fill_unsent(net: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the net changes with every column of `after` filled; null if the table has no such row."""
    net = net.combine_chunks()
    lists, after = (net[name].chunk(0) for name in ("unchanged", "after"))
    lacking = np.flatnonzero(pc.greater(pc.list_value_length(lists), 0).to_numpy(False))
    keys = pa.Table.from_struct_array(net["key"].chunk(0).take(pa.array(lacking)))
    known = _known_rows(keys, state, schema)
    indices = np.full(len(net), -1, np.int64)
    indices[lacking] = _row_indices(keys, known, schema.key_fields)
    columns = [
        _filled(child, field.name, lists, indices, known)
        for field, child in zip(after.type, after.flatten(), strict=True)
    ]
    rows = pa.StructArray.from_arrays(columns, fields=list(after.type), mask=after.is_null())
    return net.set_column(net.schema.get_field_index("after"), net.schema.field("after"), rows)


def _known_rows(keys: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the rows of the table that the changes touch."""
    index = KeyIndex(keys.columns)
    found = [schema.arrow.empty_table()]
    for batch in state:
        rows = pa.Table.from_batches([batch])
        held = index.holds([rows[name] for name in schema.key_fields])
        found.append(rows.filter(pa.array(held)))
    return pa.concat_tables(found).combine_chunks()


def _row_indices(keys: pa.Table, known: pa.Table, key_fields: Sequence[str]) -> Numbers:
    """Return the index of each key's row in `known`; -1 without one."""
    both = [
        pa.chunked_array([*known[name].chunks, *keys[name].chunks], keys[name].type)
        for name in key_fields
    ]
    numbers = KeyIndex(both).numbers
    indices = np.full(int(numbers.max()) + 1, -1, np.int64)
    indices[numbers[: len(known)]] = np.arange(len(known))
    found: Numbers = indices[numbers[len(known) :]]
    return found


def _filled(
    column: pa.Array, name: str, lists: pa.ListArray, indices: Numbers, known: pa.Table
) -> pa.Array:
    marked = np.zeros(len(column), np.bool_)
    chosen = pc.equal(lists.flatten(), name)
    marked[pc.list_parent_indices(lists).filter(chosen).to_numpy()] = True
    if not marked.any():
        return column
    # One array of both, since no Arrow function replaces values of nested types.
    both = pa.concat_arrays([column, *(chunk.cast(column.type) for chunk in known[name].chunks)])
    takes = np.where(marked, len(column) + indices, np.arange(len(column)))
    return both.take(pa.array(takes, mask=marked & (indices < 0)))
