"""Reads the rows of one bucket: layers from the newest to the oldest, the first with a key decides."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamfold.archive.manifest.model import Part
from streamfold.archive.read.folding import KeyIndex
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.spark.tasks.layers import Layer, Stack
from streamfold.snapshotter.spark.tasks.open_files import OpenFiles
from streamfold.snapshotter.spark.tasks.runs import Mask, Run, base_runs, diff_runs
from streamfold.spark.buckets import bucket_numbers

Numbers = npt.NDArray[np.int64]


class SeenKeys:
    """The keys that newer layers hold."""

    def __init__(self, fields: pa.Schema) -> None:
        self._keys = fields.empty_table()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, runs: Sequence[Run]) -> list[Mask]:
        """Return for each run the rows whose key is new, and add their keys."""
        keys, fresh = self._find_new(runs)
        self._keys = keys.filter(pa.array(fresh)).combine_chunks()
        return _split(fresh, runs)

    def lacks(self, runs: Sequence[Run]) -> list[Mask]:
        """Return for each run the rows whose key is new."""
        return _split(self._find_new(runs)[1], runs)

    def _find_new(self, runs: Sequence[Run]) -> tuple[pa.Table, Mask]:
        keys = pa.concat_tables([self._keys, *(pa.Table.from_batches([run.keys]) for run in runs)])
        fresh = np.zeros(len(keys), np.bool_)
        fresh[first_indices(keys.columns)] = True
        return keys, fresh


def first_indices(columns: Sequence[pa.ChunkedArray]) -> Numbers:
    """Return the index of each key's first row, in no order."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    numbers = KeyIndex(columns).numbers
    first = np.zeros(numbers.max() + 1, np.int64)
    # Of several assignments to one index the last one wins, so they are made from the end.
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return first


def _split(fresh: Mask, runs: Sequence[Run]) -> list[Mask]:
    start = len(fresh) - sum(len(run.keys) for run in runs)
    found = []
    for run in runs:
        found.append(fresh[start : start + len(run.keys)])
        start += len(run.keys)
    return found


#: Files to open together: enough to hide the round trips to object storage.
FILES_AT_ONCE = 8
#: Changes whose keys are looked up together: the known keys are hashed once for all of them.
KEYS_AT_ONCE = 1 << 18


class Changed(NamedTuple):
    """A file of changes, and its layer."""

    layer: Layer
    part: Part


@dataclass(frozen=True, slots=True)
class BucketRows:
    """The rows of one bucket under `schema`, in batches; read it in a thread beside the loop."""

    stack: Stack
    bucket: int
    schema: TableSchema
    files: OpenFiles

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        seen = SeenKeys(self.schema.select(self.schema.key_fields))
        cleared = yield from self._changed(seen)
        if not cleared:
            yield from self._untouched(seen)

    def _changed(self, seen: SeenKeys) -> Generator[pa.RecordBatch, None, bool]:
        """Yield the rows that changes wrote; returns whether they emptied the table first."""
        clearing: Layer | None = None
        for window in windows(self._newest_first()):
            if clearing is not None and window[0].layer is not clearing:
                break
            runs: list[Run] = []
            for changed, source in zip(window, self._open(window), strict=True):
                if clearing is not None and changed.layer is not clearing:
                    break  # older than the TRUNCATE
                layer, part = changed
                for run in diff_runs(layer.form, layer.schema, part, source, self.schema):
                    runs.append(self._own(run, part))
                    clearing = layer if run.truncates else clearing
            for run, fresh in zip(runs, seen.add(runs), strict=True):
                yield from run.read(fresh & run.alive)
        return clearing is not None or any(diff.clears for diff in self.stack.diffs)

    def _untouched(self, seen: SeenKeys) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the base that no change touches."""
        base = self.stack.base
        for part in base.of_bucket(self.bucket) if base else ():
            assert base is not None  # noqa: S101 - the part is the base's
            [source] = self.files.open([part])
            rows = base_runs(base.form, base.schema, part, source, self.schema)
            for runs in _together(rows, min(len(seen), KEYS_AT_ONCE)):
                for run, lacking in zip(runs, seen.lacks(runs), strict=True):
                    yield from run.read(lacking)

    def _newest_first(self) -> Iterator[Changed]:
        for diff in reversed(self.stack.diffs):
            yield from (Changed(diff, part) for part in diff.of_bucket(self.bucket))
            if diff.clears:
                return

    def _open(self, window: list[Changed]) -> list[BinaryIO]:
        return self.files.open([changed.part for changed in window])

    def _own(self, run: Run, part: Part) -> Run:
        """Return the run without the rows of other buckets, if a part holds those of all."""
        if part.bucket is not None or self.stack.buckets == 1:
            return run
        numbers = bucket_numbers(run.keys.columns, self.stack.buckets)
        return replace(run, alive=run.alive & (numbers == self.bucket))


def windows(files: Iterable[Changed]) -> Iterator[list[Changed]]:
    """Yield the files in groups to open together."""
    held: list[Changed] = []
    rows = 0
    for changed in files:
        held.append(changed)
        rows += changed.part.rows or 0
        if len(held) == FILES_AT_ONCE or rows >= KEYS_AT_ONCE:
            yield held
            held, rows = [], 0
    if held:
        yield held


def _together(runs: Iterable[Run], least: int) -> Iterator[list[Run]]:
    """Yield groups of runs with at least `least` rows together."""
    held: list[Run] = []
    for run in runs:
        held.append(run)
        if sum(len(one.keys) for one in held) >= least:
            yield held
            held = []
    if held:
        yield held
