"""The net change of every key over a run of decoded changes; pure and deterministic.

| in order | net |
|---|---|
| insert … alive | INSERT |
| update or delete … alive | UPDATE, with `before` of the first |
| … delete | DELETE, even of a row that the run itself inserted: an extra delete is harmless |
| truncate | everything before it and deletes after it are dropped; TRUNCATE comes first |

`unchanged` names columns that no change of the run has sent: their values are those of the row before
the run. After a TRUNCATE there is no such row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.read.folding import KeyIndex
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.decoder import UNCHANGED, decoded_schema, under_schema
from streamfold.snapshotter.decoding.records import is_op

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def net_schema(schema: TableSchema) -> pa.Schema:
    """Return the Arrow schema of net changes: that of an archive's changes, and `unchanged`."""
    decoded = decoded_schema(schema)
    action = pa.field("action", pa.string(), nullable=False)
    return pa.schema([action, *(decoded.field(n) for n in ("key", "before", "after", "unchanged"))])


def net_changes(runs: Sequence[pa.Table], schema: TableSchema) -> pa.Table:
    """Return at most one change per key, a TRUNCATE first, the others sorted by key.

    `runs` are decoded changes in the order of the stream, each under `schema` or an older one.
    """
    tables = [decoded_schema(schema).empty_table(), *(under_schema(run, schema) for run in runs)]
    changes = pa.concat_tables(tables).combine_chunks()
    truncates = np.flatnonzero(is_op(changes["op"], "truncate"))
    if not len(truncates):
        return _net(changes, schema, cleared=False)
    truncate = [{"action": "TRUNCATE", "unchanged": []}]
    later = _net(changes.slice(int(truncates[-1]) + 1), schema, cleared=True)
    return pa.concat_tables([pa.Table.from_pylist(truncate, schema=net_schema(schema)), later])


@dataclass(frozen=True, slots=True)
class _Runs:
    """Changes by key: for each key, the indices of its first and last change."""

    #: For each change, the number of its key.
    keys: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def of(cls, key: pa.StructArray) -> _Runs:
        numbers = KeyIndex([pa.chunked_array([child]) for child in key.flatten()]).numbers
        indices = np.arange(len(numbers))
        first = np.zeros(numbers.max() + 1, np.int64)
        last = first.copy()
        # Of several assignments to one index the last one wins.
        last[numbers] = indices
        first[numbers[::-1]] = indices[::-1]
        return cls(numbers, first, last)

    def only(self, chosen: Numbers) -> _Runs:
        """Return the keys at these indices, in this order."""
        return _Runs(self.keys, self.first[chosen], self.last[chosen])

    def last_of(self, rows: Mask) -> Numbers:
        """Return for each key its last change among `rows`; -1 without one."""
        last = np.full(self.keys.max() + 1, -1, np.int64)
        last[self.keys[rows]] = np.flatnonzero(rows)
        chosen: Numbers = last[self.keys[self.last]]
        return chosen


def _net(changes: pa.Table, schema: TableSchema, *, cleared: bool) -> pa.Table:
    if not len(changes):
        return net_schema(schema).empty_table()
    key, before, after = (changes[name].combine_chunks() for name in ("key", "before", "after"))
    deletes = is_op(changes["op"], "delete")
    runs = _Runs.of(key)
    if cleared:
        runs = runs.only(np.flatnonzero(~deletes[runs.last]))
    runs = runs.only(_sorted_by_key(key.take(pa.array(runs.last))))
    new = is_op(changes["op"], "insert", "read")[runs.first] | cleared
    action = np.where(deletes[runs.last], "DELETE", np.where(new, "INSERT", "UPDATE"))
    rows, unchanged = _rows(changes, after, runs)
    columns = [
        pa.array(action, pa.string()),
        key.take(pa.array(runs.last)),
        before.take(pa.array(runs.first, mask=new)),
        rows,
        unchanged,
    ]
    return pa.table(columns, schema=net_schema(schema))


def _rows(changes: pa.Table, after: pa.StructArray, runs: _Runs) -> tuple[pa.Array, pa.Array]:
    """Return the last row of each key, filling unsent columns from the row before it."""
    lists = changes["unchanged"].combine_chunks()
    last = pa.array(runs.last)
    names = pc.unique(lists.flatten()).to_pylist()
    if not names:
        return after.take(last), lists.take(last)
    children = dict(zip((f.name for f in after.type), after.flatten(), strict=True))
    sent_rows = after.is_valid().to_numpy(zero_copy_only=False)
    columns = {name: child.take(last) for name, child in children.items()}
    left: list[list[str]] = [[] for _ in runs.last]
    for name in sorted(names):
        marked = _marked(lists, name, len(changes))
        source = runs.last_of(sent_rows & ~marked)
        filled = marked[runs.last]
        indices = np.where(filled, source, runs.last)
        columns[name] = children[name].take(pa.array(indices, mask=indices < 0))
        for row in np.flatnonzero(filled & (source < 0)):
            left[row].append(name)
    absent = pa.array(~sent_rows[runs.last])
    rows = pa.StructArray.from_arrays(list(columns.values()), fields=list(after.type), mask=absent)
    return rows, pa.array(left, UNCHANGED)


def _marked(lists: pa.ListArray, name: str, count: int) -> Mask:
    marked = np.zeros(count, np.bool_)
    chosen = pc.equal(lists.flatten(), name)
    marked[pc.list_parent_indices(lists).filter(chosen).to_numpy()] = True
    return marked


def _sorted_by_key(keys: pa.StructArray) -> Numbers:
    columns = {str(index): child for index, child in enumerate(keys.flatten())}
    order = pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])
    indices: Numbers = order.to_numpy().astype(np.int64)
    return indices


def has_unsent(net: pa.Table) -> bool:
    """Return whether any change leaves a column unchanged."""
    return bool(pc.any(pc.greater(pc.list_value_length(net["unchanged"]), 0)).as_py())


def fill_unsent(net: pa.Table, table: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the net changes with every column of `after` filled; null where `table` lacks the row."""
    net = net.combine_chunks()
    lists, after = (net[name].chunk(0) for name in ("unchanged", "after"))
    lacking = np.flatnonzero(pc.greater(pc.list_value_length(lists), 0).to_numpy(False))
    keys = pa.Table.from_struct_array(net["key"].chunk(0).take(pa.array(lacking)))
    rows = _touched_rows(keys, table, schema)
    indices = np.full(len(net), -1, np.int64)
    indices[lacking] = _row_indices(keys, rows, schema.key_fields)
    columns = [
        _filled(child, field.name, lists, indices, rows)
        for field, child in zip(after.type, after.flatten(), strict=True)
    ]
    images = pa.StructArray.from_arrays(columns, fields=list(after.type), mask=after.is_null())
    return net.set_column(net.schema.get_field_index("after"), net.schema.field("after"), images)


def _touched_rows(keys: pa.Table, table: Iterable[pa.RecordBatch], schema: TableSchema) -> pa.Table:
    """Return the rows of the table that have one of the keys."""
    index = KeyIndex(keys.columns)
    tables = [schema.arrow.empty_table()]
    for batch in table:
        rows = pa.Table.from_batches([batch])
        touched = index.holds([rows[name] for name in schema.key_fields])
        tables.append(rows.filter(pa.array(touched)))
    return pa.concat_tables(tables).combine_chunks()


def _row_indices(keys: pa.Table, rows: pa.Table, key_fields: Sequence[str]) -> Numbers:
    """Return the index of each key's row in `rows`; -1 without one."""
    both = [
        pa.chunked_array([*rows[name].chunks, *keys[name].chunks], keys[name].type)
        for name in key_fields
    ]
    numbers = KeyIndex(both).numbers
    indices = np.full(int(numbers.max()) + 1, -1, np.int64)
    indices[numbers[: len(rows)]] = np.arange(len(rows))
    row_indices: Numbers = indices[numbers[len(rows) :]]
    return row_indices


def _filled(
    column: pa.Array, name: str, lists: pa.ListArray, indices: Numbers, rows: pa.Table
) -> pa.Array:
    marked = _marked(lists, name, len(column))
    if not marked.any():
        return column
    # One array of both, since no Arrow function replaces values of nested types.
    both = pa.concat_arrays([column, *(chunk.cast(column.type) for chunk in rows[name].chunks)])
    takes = np.where(marked, len(column) + indices, np.arange(len(column)))
    return both.take(pa.array(takes, mask=marked & (indices < 0)))
