"""Batches cut again, at boundaries that only the rows determine.

Writers of the same rows get the same bytes however the rows arrived, and hold a bounded amount of
them: a piece ends with the row that reaches the limit of rows or of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from streamfold.archive.formats.nesting import Lengths, as_list, list_lengths, struct_children


class Limits(NamedTuple):
    """Rows, and bytes of their values without Arrow's own overhead, that a piece may reach."""

    rows: int = BATCH_ROWS_MAX
    size: int = BATCH_BYTES_MAX


#: Limits of every batch that a reader yields, and what formats write at once by default.
BATCH = Limits()


def pieces(batches: Iterable[pa.RecordBatch], limits: Limits = BATCH) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, in pieces that are never empty."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        sizes = running_size(batch)
        start = 0
        while start < len(batch):
            end = _end(sizes, start, limits.rows - rows, limits.size - size)
            held.append(batch.slice(start, end - start))
            rows, size = rows + end - start, size + int(sizes[end] - sizes[start])
            start = end
            if rows >= limits.rows or size >= limits.size:
                yield _joined(held)
                held, rows, size = [], 0, 0
    if held:
        yield _joined(held)


def bounded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch for a reader: as it is where it is small, in pieces otherwise, nothing if empty."""
    if not 0 < len(batch) <= BATCH.rows or batch.nbytes > BATCH.size:
        yield from pieces([batch])
    else:
        yield batch


def _end(sizes: Lengths, start: int, rows: int, size: int) -> int:
    """The offset after the row that reaches either limit, or after the last row."""
    reached = int(np.searchsorted(sizes, sizes[start] + size))
    return max(start + 1, min(start + rows, reached, len(sizes) - 1))


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)


def running_size(batch: pa.RecordBatch) -> Lengths:
    """Bytes of the values before each row, and after the last one."""
    total = np.zeros(len(batch) + 1, np.int64)
    for column in batch.columns:
        total += _running(column)
    return total


def _running(array: pa.Array) -> Lengths:
    kind, count = array.type, len(array)
    if pa.types.is_struct(kind):
        return sum((_running(child) for child in struct_children(array)), _ramp(count, 1))
    if pa.types.is_map(kind) or pa.types.is_list(kind):
        lists = as_list(array)
        return _running(lists.flatten())[_summed(list_lengths(lists))] + _ramp(count, 4)
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        lengths = pc.fill_null(pc.binary_length(array), 0)
        return _summed(lengths.to_numpy(zero_copy_only=False)) + _ramp(count, 4)
    if pa.types.is_null(kind):
        return _ramp(count, 1)
    return _ramp(count, max(1, kind.bit_width // 8))


def _ramp(count: int, step: int) -> Lengths:
    return np.arange(count + 1, dtype=np.int64) * step


def _summed(lengths: Lengths) -> Lengths:
    total = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=total[1:])
    return total
