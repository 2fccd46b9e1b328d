"""Which values of a column are in a given set, for many columns in turn.

Arrow hashes the set again for each lookup. Whole numbers, which most keys are, are looked up in
tables that are built once.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]

#: Rows per value of the set: enough that hashing the set again does not matter.
ROWS_PER_VALUE = 4
#: Spreads neighbouring numbers over the whole range: 2^64 divided by the golden ratio.
SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)
#: Slots of the filter for each value, as a power of two: one in sixteen other values passes.
FILTER_BITS = 4


class Members(Protocol):
    """A set of values without nulls."""

    #: How many rows to look up at once.
    rows_at_once: int

    def holds(self, column: pa.ChunkedArray) -> Flags:
        """Return for each value of a column of the same type whether it is in the set."""
        ...


def members_of(values: pa.Array) -> Members:
    """Return one or more values in the form that is fastest to look up."""
    if _is_whole(values.type) and not values.null_count:
        return WholeNumbers(values)
    return HashedValues(values)


class HashedValues:
    """Values of any type, hashed for each lookup: look up many rows at once."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self.rows_at_once = ROWS_PER_VALUE * len(values)

    def holds(self, column: pa.ChunkedArray) -> Flags:
        found: Flags = pc.is_in(column, value_set=self._values).to_numpy()
        return found


class WholeNumbers:
    """Integers, dates and times: a filter keeps nearly all others out, a sorted table decides."""

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
        found: Flags = self._filter[self._slots(words)]
        likely = np.flatnonzero(found)
        asked = words[likely]
        nearest = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
        found[likely] = self._sorted[nearest] == asked
        return found

    def _slots(self, words: Words) -> Words:
        places: Words = (words * SPREAD) >> self._shift
        return places


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_temporal(kind))


def _words(column: pa.Array | pa.ChunkedArray) -> Words:
    """Return the numbers in 64 bits, equal ones for equal values."""
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    numbers = column.to_numpy()
    if numbers.dtype != np.uint64:
        numbers = numbers.astype(np.int64, copy=False)
    words: Words = numbers.view(np.uint64)
    return words
