"""Folds net changes into rows, one column at a time. No row is ever a Python object.

Rows are compared by the values of their key fields, in the table's types. A fold holds the
changes in memory and streams the rows.

Arrow hashes a set of keys again for each lookup. Integers, which most keys are, are looked up
in tables that are built once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.conforming import cast_batch

Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

#: Rows per value in the set: enough to make the cost of hashing the set again insignificant.
ROWS_PER_VALUE = 4
#: Spreads neighbouring numbers over the whole range: 2^64 divided by the golden ratio.
SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)
#: Filter slots per value, as a power of two: one in sixteen other values passes.
FILTER_BITS = 4
Numbers = npt.NDArray[np.int64]
#: Maximum bytes of rows to look up at once.
LOOKUP_BYTES = 64 << 20
#: Maximum pending changes before those with the same key are merged.
MERGE_CHANGES = 1 << 18


class Members(Protocol):
    """A set of values without nulls."""

    #: Number of rows to look up at once.
    rows_at_once: int

    def holds(self, column: pa.ChunkedArray) -> Flags:
        """Return which values of a column of the same type are in the set."""
        ...


def members_of(values: pa.Array) -> Members:
    """Return one or more values in the form that is fastest to look up."""
    if _is_whole(values.type) and not values.null_count:
        return WholeNumbers(values)
    return HashedValues(values)


class HashedValues:
    """Values of any type, hashed for each lookup, so look up many rows at once."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self.rows_at_once = ROWS_PER_VALUE * len(values)

    def holds(self, column: pa.ChunkedArray) -> Flags:
        flags: Flags = pc.is_in(column, value_set=self._values).to_numpy()
        return flags


class WholeNumbers:
    """Integers, dates and times. A filter rejects nearly all others, a sorted table decides."""

    def __init__(self, values: pa.Array) -> None:
        self.rows_at_once = 1
        self._hashed = HashedValues(values)
        self._sorted = np.sort(_words(values))
        bits = int(len(values) - 1).bit_length() + FILTER_BITS
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)
        self._filter[self._slots(self._sorted)] = True

    def holds(self, column: pa.ChunkedArray) -> Flags:
        if column.null_count:
            return self._hashed.holds(column)
        words = _words(column)
        flags: Flags = self._filter[self._slots(words)]
        likely = np.flatnonzero(flags)
        asked = words[likely]
        nearest = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
        flags[likely] = self._sorted[nearest] == asked
        return flags

    def _slots(self, words: Words) -> Words:
        slots: Words = (words * SPREAD) >> self._shift
        return slots


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_temporal(kind))


def _words(column: pa.Array | pa.ChunkedArray) -> Words:
    """Return the numbers in 64 bits. Equal values give equal numbers."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    numbers = column.to_numpy()
    if numbers.dtype != np.uint64:
        numbers = numbers.astype(np.int64, copy=False)
    words: Words = numbers.view(np.uint64)
    return words


class KeyIndex:
    """Numbers one or more keys: equal numbers for equal key fields."""

    def __init__(self, columns: Sequence[pa.ChunkedArray]) -> None:
        self._values: list[pa.Array] = []
        self._pairs: list[Numbers] = []
        for column in columns:
            values, codes = _encoded(column)
            if not self._values:
                pair_codes, self.numbers = np.arange(len(values)), codes
            else:
                # Renumbered for each field, so no product of their sizes can overflow.
                pairs = self.numbers * len(values) + codes
                pair_codes, self.numbers = np.unique(pairs, return_inverse=True)
            self._values.append(values)
            self._pairs.append(pair_codes)

    @cached_property
    def _members(self) -> Members:
        return members_of(self._values[0])

    @property
    def rows_at_once(self) -> int:
        """Number of rows to look up at once."""
        return self._members.rows_at_once if len(self._values) == 1 else len(self.numbers)

    def holds(self, columns: Sequence[pa.ChunkedArray]) -> Flags:
        """Return which rows have an indexed key."""
        if len(columns) == 1:
            return self._members.holds(columns[0])
        flags = np.ones(len(columns[0]), np.bool_)
        numbers = np.zeros(len(columns[0]), np.int64)
        for column, values, pair_codes in zip(columns, self._values, self._pairs, strict=True):
            codes = _numbers(column, values)
            pairs = numbers * len(values) + codes
            numbers = np.minimum(np.searchsorted(pair_codes, pairs), len(pair_codes) - 1)
            flags &= (codes >= 0) & (pair_codes[numbers] == pairs)
        return flags

    def last_of_each(self) -> Numbers:
        """Return the index of each key's last row, in row order."""
        last = np.zeros(self.numbers.max(initial=-1) + 1, np.int64)
        # Of several assignments to one index, the last wins.
        last[self.numbers] = np.arange(len(self.numbers))
        return np.sort(last)


def _encoded(column: pa.ChunkedArray) -> tuple[pa.Array, Numbers]:
    """Return the distinct values, and the index of each row's value among them."""
    whole = column.combine_chunks().dictionary_encode("encode")
    if isinstance(whole, pa.ChunkedArray):  # too much text for one array
        whole = whole.unify_dictionaries()
        numbers = [chunk.indices.to_numpy() for chunk in whole.chunks]
        return whole.chunk(0).dictionary, np.concatenate(numbers).astype(np.int64)
    return whole.dictionary, whole.indices.to_numpy().astype(np.int64)


def _numbers(column: pa.ChunkedArray, values: pa.Array) -> Numbers:
    indices = pc.fill_null(pc.index_in(column, value_set=values), -1)
    numbers: Numbers = indices.to_numpy().astype(np.int64)
    return numbers


class Delta:
    """The combined effect of several diffs on a table: rows to replace, and keys to remove."""

    def __init__(self, columns: pa.Schema, keys: pa.Schema) -> None:
        #: Columns of the resulting rows.
        self.columns = columns
        self._keys = keys
        self._changed = keys.empty_table()
        self._alive = np.zeros(0, np.bool_)
        self._rows = columns.empty_table()
        #: Number of changes, and of rows among them, at the start of the current diff.
        self._mark = (0, 0)
        self._merged: KeyIndex | None = None
        #: Whether a TRUNCATE removed all rows of the base.
        self.clears = False

    def begin(self, *, clears: bool = False) -> None:
        """Begin the next diff, whose changes supersede earlier ones with the same key."""
        if len(self._changed) - self._mark[0] > MERGE_CHANGES:
            self._index()
        self._mark = (len(self._changed), len(self._rows))
        if clears:
            self._truncate()

    def add(self, changes: pa.RecordBatch) -> None:
        """Add changes of the current diff, whose `key` has the key fields."""
        if len(changes) and changes["action"][0].as_py() == "TRUNCATE":
            self._truncate()
            changes = changes.slice(1)
        if not len(changes):
            return
        alive = pc.not_equal(changes["action"], "DELETE")
        images = changes["after"] if alive.false_count == 0 else changes["after"].filter(alive)
        rows = columns_of(images, self.columns)
        keys = columns_of(changes["key"], self._keys)
        self._changed = pa.concat_tables([self._changed, pa.Table.from_batches([keys])])
        self._rows = pa.concat_tables([self._rows, pa.Table.from_batches([rows])])
        self._alive = np.concatenate([self._alive, alive.to_numpy(zero_copy_only=False)])
        self._merged = None

    def _truncate(self) -> None:
        """Drop everything before the current diff."""
        changes, rows = self._mark
        self._changed, self._alive = self._changed.slice(changes), self._alive[changes:]
        self._rows = self._rows.slice(rows)
        self._mark = (0, 0)
        self._merged = None
        self.clears = True

    def _index(self) -> KeyIndex:
        """Retain only the last change of each key, and return the index of the keys."""
        if self._merged:
            return self._merged
        index = KeyIndex(self._changed.columns)
        last = index.last_of_each()
        if len(last) < len(self._changed):
            row_numbers = np.cumsum(self._alive) - 1
            self._rows = self._rows.take(pa.array(row_numbers[last[self._alive[last]]]))
            self._changed = self._changed.take(pa.array(last))
            self._alive = self._alive[last]
            index = KeyIndex(self._changed.columns)
        self._merged = index
        return index

    def untouched(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield the rows that no change affects. Batches must include the key fields."""
        if self.clears:
            return
        if not len(self._changed):
            yield from (pa.Table.from_batches([b]).select(self.columns.names) for b in batches)
            return
        index = self._index()
        for group in _groups(batches, index.rows_at_once):
            rows = pa.Table.from_batches(group)
            untouched = ~index.holds([rows[name] for name in self._keys.names])
            rows = rows.select(self.columns.names)
            yield rows if untouched.all() else rows.filter(pa.array(untouched))

    def rows(self) -> pa.Table:
        """Return the rows that the changes wrote."""
        if len(self._changed):
            self._index()
        return self._rows


def columns_of(structs: pa.StructArray, schema: pa.Schema) -> pa.RecordBatch:
    """Return the fields of `structs` that are in `schema`, in its types. Missing ones are null."""
    children = dict(zip((f.name for f in structs.type), structs.flatten(), strict=True))
    fields = [f for f in structs.type if f.name in schema.names]
    columns = pa.RecordBatch.from_arrays(
        [children[f.name] for f in fields], schema=pa.schema(fields)
    )
    return fitted(columns, schema) if fields else nulls(schema, len(structs))


def nulls(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Return rows of nulls."""
    return pa.RecordBatch.from_arrays([pa.nulls(rows, f.type) for f in schema], schema=schema)


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch under the same or a newer schema. Columns that it lacks become null."""
    return batch if batch.schema.equals(schema) else cast_batch(batch, schema)


def _groups(batches: Iterable[pa.RecordBatch], least: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield groups of batches with `least` rows, or with as many as may be held at once."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= least or size >= LOOKUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group
