"""Computes the net change of every key over a run of decoded changes; pure and deterministic.

| in order | net |
|---|---|
| insert … alive | INSERT |
| update or delete … alive | UPDATE, with `before` of the first |
| … delete | DELETE, also of a row that the run itself inserted: an extra delete is harmless |
| truncate | everything before it is dropped, TRUNCATE comes first; deletes after it are dropped, too |

`unchanged` names columns that no change of the run has sent: their values are those of the row before
the run. After a TRUNCATE there is no such row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.read.folding import KeyIndex
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.decoder import UNCHANGED, decoded_schema, under_schema

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def net_schema(schema: TableSchema) -> pa.Schema:
    """Return the Arrow schema of net changes: an archive's changes, and the columns to fill in."""
    decoded = decoded_schema(schema)
    action = pa.field("action", pa.string(), nullable=False)
    return pa.schema([action, *(decoded.field(n) for n in ("key", "before", "after", "unchanged"))])


def net_changes(runs: Sequence[pa.Table], schema: TableSchema) -> pa.Table:
    """Return at most one change per key, a TRUNCATE first, the others sorted by key.

    `runs` are decoded changes in the order of the stream, each under `schema` or an older one.
    """
    changes = _joined(runs, schema)
    ops = changes["op"]
    truncates = np.flatnonzero(pc.equal(ops, "truncate").to_numpy(zero_copy_only=False))
    cleared = len(truncates) > 0
    if cleared:
        changes = changes.slice(int(truncates[-1]) + 1)
    net = _net(changes, schema, cleared) if len(changes) else net_schema(schema).empty_table()
    return pa.concat_tables([_truncate(schema), net]) if cleared else net


def _joined(runs: Sequence[pa.Table], schema: TableSchema) -> pa.Table:
    wanted = decoded_schema(schema)
    tables = [wanted.empty_table(), *(under_schema(run, schema) for run in runs)]
    return pa.concat_tables(tables).combine_chunks()


def _truncate(schema: TableSchema) -> pa.Table:
    row: dict[str, object] = {
        "action": "TRUNCATE",
        "key": None,
        "before": None,
        "after": None,
        "unchanged": [],
    }
    return pa.Table.from_pylist([row], schema=net_schema(schema))


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
        found = np.full(self.keys.max() + 1, -1, np.int64)
        found[self.keys[rows]] = np.flatnonzero(rows)
        chosen: Numbers = found[self.keys[self.last]]
        return chosen


def _net(changes: pa.Table, schema: TableSchema, cleared: bool) -> pa.Table:
    key, before, after = (_whole(changes[name]) for name in ("key", "before", "after"))
    ops = changes["op"]
    deletes = _among(ops, "delete")
    runs = _Runs.of(key)
    if cleared:
        runs = runs.only(np.flatnonzero(~deletes[runs.last]))
    runs = runs.only(_sorted_by_key(key.take(pa.array(runs.last))))
    gone = deletes[runs.last]
    new = _among(ops, "insert", "read")[runs.first] | cleared
    action = np.where(gone, "DELETE", np.where(new, "INSERT", "UPDATE"))
    firsts = pa.array(runs.first, mask=new)
    rows, unchanged = _rows(changes, after, runs)
    return pa.table(
        [
            pa.array(action, pa.string()),
            key.take(pa.array(runs.last)),
            before.take(firsts),
            rows,
            unchanged,
        ],
        schema=net_schema(schema),
    )


def _rows(changes: pa.Table, after: pa.StructArray, runs: _Runs) -> tuple[pa.Array, pa.Array]:
    """Return the last row of each key, filling unsent columns from the row before it."""
    lists = _whole(changes["unchanged"])
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
        wanted = marked[runs.last]
        indices = np.where(wanted, source, runs.last)
        columns[name] = children[name].take(pa.array(indices, mask=indices < 0))
        for row in np.flatnonzero(wanted & (source < 0)):
            left[row].append(name)
    absent = pa.array(~sent_rows[runs.last])
    rows = pa.StructArray.from_arrays(list(columns.values()), fields=list(after.type), mask=absent)
    return rows, pa.array(left, UNCHANGED)


def _marked(lists: pa.ListArray, name: str, count: int) -> Mask:
    marked = np.zeros(count, np.bool_)
    chosen = pc.equal(lists.flatten(), name)
    marked[pc.list_parent_indices(lists).filter(chosen).to_numpy()] = True
    return marked


def _among(ops: pa.ChunkedArray, *names: str) -> Mask:
    found: Mask = pc.is_in(ops, value_set=pa.array(names)).to_numpy(zero_copy_only=False)
    return found


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _sorted_by_key(keys: pa.StructArray) -> Numbers:
    columns = {str(index): child for index, child in enumerate(keys.flatten())}
    order = pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])
    found: Numbers = order.to_numpy().astype(np.int64)
    return found
