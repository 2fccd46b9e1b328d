"""Reads the rows of one bucket from layers, newest first. The first layer with a key decides.

Later changes supersede most changes of a long chain, whose rows are never decoded. Parquet files
whose hash in the manifest matches certainly hold the bytes written, so they are not checked again.
All others are read through their format, which checks every rule.

Files are read in two passes: first the keys, then only the rows that count.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streamfold.archive.buckets import bucket_numbers
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Format
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.folding import KeyIndex, columns_of, fitted
from streamfold.archive.read.layers import Layer, OpenFiles, Stack
from streamfold.archive.schema import TableSchema
from streamfold.wording import noun

Mask = npt.NDArray[np.bool_]
#: Yields a run's rows where the mask is true, under the table's schema.
Reader = Callable[[Mask], Iterator[pa.RecordBatch]]
Numbers = npt.NDArray[np.int64]
#: Files to open together: enough to hide round trips to object storage.
FILES_AT_ONCE = 8
#: Changes whose keys are looked up together, because each lookup hashes all known keys again.
KEYS_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows or changes of one file, with known and distinct keys.

    Read it while the file is open.
    """

    #: The key fields in the table's types.
    keys: pa.RecordBatch
    #: False where a change is a DELETE.
    alive: Mask
    read: Reader
    #: Whether a TRUNCATE precedes the run.
    truncates: bool = False


def base_runs(
    form: Format, stored: TableSchema, part: Part, source: BinaryIO, schema: TableSchema
) -> Iterator[Run]:
    """Yield the rows of a base's file, in runs of bounded size."""
    keys = schema.select(schema.key_fields)
    if form.reads_row_groups and part.sha256:
        file = _opened(part, source)
        for group in range(file.num_row_groups):
            yield _base_group(RowGroup(file, group, part.path), keys, schema)
        return
    for batch in form.read_rows(source, stored):
        rows = fitted(batch, schema.arrow)
        yield Run(rows.select(keys.names), np.ones(len(rows), np.bool_), _holding(rows))


def diff_runs(
    form: Format, stored: TableSchema, part: Part, source: BinaryIO, schema: TableSchema
) -> Iterator[Run]:
    """Yield the changes of a diff's file."""
    keys = schema.select(schema.key_fields)
    if form.reads_row_groups and part.sha256:
        file = _opened(part, source, coded=["action"])
        for group in range(file.num_row_groups):
            yield _diff_group(RowGroup(file, group, part.path), keys, schema)
        return
    for batch in form.read_changes(source, stored):
        changes, truncates = _without_truncate(batch)
        columns = columns_of(changes["key"], keys)
        rows = columns_of(changes["after"], schema.arrow)
        yield Run(columns, _alive(changes), _holding(rows), truncates)


def _base_group(group: RowGroup, keys: pa.Schema, schema: TableSchema) -> Run:
    rows = group.whole(keys.names)

    def read(chosen: Mask) -> Iterator[pa.RecordBatch]:
        for batch, own in group.batches(None, chosen):
            yield fitted(_filtered(batch, own), schema.arrow)

    return Run(fitted(rows, keys), np.ones(len(rows), np.bool_), read)


def _diff_group(group: RowGroup, keys: pa.Schema, schema: TableSchema) -> Run:
    changes, truncates = _without_truncate(group.whole(["action", "key"]))

    def read(chosen: Mask) -> Iterator[pa.RecordBatch]:
        mask = np.concatenate([np.zeros(int(truncates), np.bool_), chosen])
        for batch, own in group.batches(["after"], mask):
            yield _filtered(columns_of(batch["after"], schema.arrow), own)

    return Run(columns_of(changes["key"], keys), _alive(changes), read, truncates)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A Parquet file's row group. Read in one thread, since a task has one core."""

    file: pq.ParquetFile
    number: int
    path: str

    def whole(self, names: Sequence[str]) -> pa.RecordBatch:
        """Read these columns of all rows."""
        with _readable(self.path):
            table = self.file.read_row_group(self.number, columns=list(names), use_threads=False)
            # A name with a dot is also the path of a struct field, which pyarrow then reads too.
            table = table.select(list(names))
            return pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())

    def batches(
        self, names: Sequence[str] | None, chosen: Mask
    ) -> Iterator[tuple[pa.RecordBatch, Mask]]:
        """Yield batches that have chosen rows, each with its mask."""
        if not chosen.any():
            return
        average = self.file.metadata.row_group(self.number).total_byte_size // len(chosen)
        rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // max(1, average)))
        start = 0
        with _readable(self.path):
            for batch in self.file.iter_batches(
                rows, row_groups=[self.number], columns=names, use_threads=False
            ):
                mask = chosen[start : start + len(batch)]
                start += len(batch)
                if mask.any():
                    yield batch, mask


def _without_truncate(changes: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
    truncates = len(changes) > 0 and changes["action"][0].as_py() == "TRUNCATE"
    return changes.slice(int(truncates)), truncates


def _alive(changes: pa.RecordBatch) -> Mask:
    alive: Mask = pc.not_equal(changes["action"], "DELETE").to_numpy(zero_copy_only=False)
    return alive


def _holding(rows: pa.RecordBatch) -> Reader:
    """Make a reader of rows already decoded, for formats that cannot decode parts of a file."""

    def read(chosen: Mask) -> Iterator[pa.RecordBatch]:
        if chosen.any():
            yield _filtered(rows, chosen)

    return read


def _filtered(rows: pa.RecordBatch, chosen: Mask) -> pa.RecordBatch:
    return rows if chosen.all() else rows.filter(pa.array(chosen))


def _opened(part: Part, source: BinaryIO, coded: Sequence[str] = ()) -> pq.ParquetFile:
    """Open the file, whose hash is verified, reading `coded` columns as dictionaries."""
    with _readable(part.path):
        file = pq.ParquetFile(source, pre_buffer=False, read_dictionary=list(coded))
    if part.rows not in (None, file.metadata.num_rows):
        rows = file.metadata.num_rows
        raise ArtifactCorruptError(
            f"file {part.path!r} holds {rows} {noun(rows, 'row')}, the manifest says {part.rows}: "
            "restore it"
        )
    return file


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Report errors of Arrow as corruption: the hash is right, so the file was written wrong."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # storage failed: the bytes may be fine
        raise ArtifactCorruptError(f"file {path!r} cannot be read: {error}") from None


class SeenKeys:
    """The keys in newer layers."""

    def __init__(self, fields: pa.Schema) -> None:
        self._keys = fields.empty_table()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, runs: Sequence[Run]) -> list[Mask]:
        """Return which rows of each run have a new key, and add their keys."""
        keys, fresh = self._find_new(runs)
        self._keys = keys.filter(pa.array(fresh)).combine_chunks()
        return _split(fresh, runs)

    def lacks(self, runs: Sequence[Run]) -> list[Mask]:
        """Return which rows of each run have a new key."""
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
    # Of several assignments to one index the last wins, so they are made in reverse order.
    first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
    return first


def _split(fresh: Mask, runs: Sequence[Run]) -> list[Mask]:
    start = len(fresh) - sum(len(run.keys) for run in runs)
    masks = []
    for run in runs:
        masks.append(fresh[start : start + len(run.keys)])
        start += len(run.keys)
    return masks


class Changed(NamedTuple):
    """A file of changes, with its layer."""

    layer: Layer
    part: Part


@dataclass(frozen=True, slots=True)
class BucketRows:
    """One bucket's rows under `schema`, in batches. Read it in a thread other than the event loop's."""

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
        """Yield the rows that changes wrote. Returns whether the changes emptied the table first."""
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
        """Yield the base's rows that no change touches."""
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
        """Return the run without rows of other buckets, which a part for all buckets may hold."""
        if part.bucket is not None or self.stack.buckets == 1:
            return run
        numbers = bucket_numbers(run.keys.columns, self.stack.buckets)
        return replace(run, alive=run.alive & (numbers == self.bucket))


def windows(files: Iterable[Changed]) -> Iterator[list[Changed]]:
    """Yield the files in groups to open together."""
    group: list[Changed] = []
    rows = 0
    for changed in files:
        group.append(changed)
        rows += changed.part.rows or 0
        if len(group) == FILES_AT_ONCE or rows >= KEYS_AT_ONCE:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _together(runs: Iterable[Run], least: int) -> Iterator[list[Run]]:
    """Yield groups of runs with at least `least` rows in total, except the last group."""
    group: list[Run] = []
    for run in runs:
        group.append(run)
        if sum(len(one.keys) for one in group) >= least:
            yield group
            group = []
    if group:
        yield group
