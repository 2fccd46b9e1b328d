"""Columns that a source did not send because they did not change, filled from the table as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.read.folding import KeyIndex
from streamfold.archive.schema.table_schema import TableSchema

Numbers = npt.NDArray[np.int64]


def has_unsent(net: pa.Table) -> bool:
    """Whether any change leaves a column as it was before."""
    return bool(pc.any(pc.greater(pc.list_value_length(net["unchanged"]), 0)).as_py())


def fill_unsent(net: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """The net changes with every column of `after` known; null where the table has no such row."""
    net = net.combine_chunks()
    lists, after = (net[name].chunk(0) for name in ("unchanged", "after"))
    lacking = np.flatnonzero(pc.greater(pc.list_value_length(lists), 0).to_numpy(False))
    keys = pa.Table.from_struct_array(net["key"].chunk(0).take(pa.array(lacking)))
    known = _known_rows(keys, state, schema)
    places = np.full(len(net), -1, np.int64)
    places[lacking] = _row_indices(keys, known, schema.key_fields)
    columns = [
        _filled(child, field.name, lists, places, known)
        for field, child in zip(after.type, after.flatten(), strict=True)
    ]
    rows = pa.StructArray.from_arrays(columns, fields=list(after.type), mask=after.is_null())
    return net.set_column(net.schema.get_field_index("after"), net.schema.field("after"), rows)


def _known_rows(keys: pa.Table, state: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """The rows of the table that the changes are about."""
    index = KeyIndex(keys.columns)
    found = [schema.arrow.empty_table()]
    for batch in state:
        rows = pa.Table.from_batches([batch])
        held = index.holds([rows[name] for name in schema.key_fields])
        found.append(rows.filter(pa.array(held)))
    return pa.concat_tables(found).combine_chunks()


def _row_indices(keys: pa.Table, known: pa.Table, key_fields: Sequence[str]) -> Numbers:
    """Where in `known` the row of each key is; -1 where it is not."""
    both = [
        pa.chunked_array([*known[name].chunks, *keys[name].chunks], keys[name].type)
        for name in key_fields
    ]
    numbers = KeyIndex(both).numbers
    places = np.full(int(numbers.max()) + 1, -1, np.int64)
    places[numbers[: len(known)]] = np.arange(len(known))
    found: Numbers = places[numbers[len(known) :]]
    return found


def _filled(
    column: pa.Array, name: str, lists: pa.ListArray, places: Numbers, known: pa.Table
) -> pa.Array:
    marked = np.zeros(len(column), np.bool_)
    chosen = pc.equal(lists.flatten(), name)
    marked[pc.list_parent_indices(lists).filter(chosen).to_numpy()] = True
    if not marked.any():
        return column
    # One array of both, since no function replaces values of nested types.
    both = pa.concat_arrays([column, *(chunk.cast(column.type) for chunk in known[name].chunks)])
    takes = np.where(marked, len(column) + places, np.arange(len(column)))
    return both.take(pa.array(takes, mask=marked & (places < 0)))
