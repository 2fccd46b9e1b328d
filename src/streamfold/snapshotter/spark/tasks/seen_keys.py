"""Which change of a key counts, when layers are looked at from the newest to the oldest: the first.

Keys are compared by the values of their fields, in the types of the table. Memory holds each key
once, however often it was changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamfold.archive.read.folding import KeyIndex
from streamfold.snapshotter.spark.tasks.runs import Mask, Run

Numbers = npt.NDArray[np.int64]


class SeenKeys:
    """The keys that newer layers have decided about."""

    def __init__(self, fields: pa.Schema) -> None:
        self._keys = fields.empty_table()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, runs: Sequence[Run]) -> list[Mask]:
        """For each run the rows whose key was not seen before; from now on it was."""
        keys, fresh = self._look(runs)
        self._keys = keys.filter(pa.array(fresh)).combine_chunks()
        return _split(fresh, runs)

    def lacks(self, runs: Sequence[Run]) -> list[Mask]:
        """For each run the rows whose key was not seen."""
        return _split(self._look(runs)[1], runs)

    def _look(self, runs: Sequence[Run]) -> tuple[pa.Table, Mask]:
        keys = pa.concat_tables([self._keys, *(pa.Table.from_batches([run.keys]) for run in runs)])
        fresh = np.zeros(len(keys), np.bool_)
        fresh[first_places(keys.columns)] = True
        return keys, fresh


def first_places(columns: Sequence[pa.ChunkedArray]) -> Numbers:
    """Where each key comes first, in no order."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    numbers = KeyIndex(columns).numbers
    first = np.zeros(numbers.max() + 1, np.int64)
    # Of several assignments to one place the last one stays, so they are made from the end.
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return first


def _split(fresh: Mask, runs: Sequence[Run]) -> list[Mask]:
    start = len(fresh) - sum(len(run.keys) for run in runs)
    found = []
    for run in runs:
        found.append(fresh[start : start + len(run.keys)])
        start += len(run.keys)
    return found
