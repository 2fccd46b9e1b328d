"""Reads files of a bucket in two passes: first the keys, then only the rows that count.

Later changes supersede most changes of a long chain: their rows are never decoded. Parquet files with
a hash in the manifest are known to hold what was written, so they are not checked again; all others
are read through their format, which checks every rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Format
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.folding import columns_of, fitted
from streamfold.archive.schema import TableSchema

Mask = npt.NDArray[np.bool_]
#: Yields the rows of a run where the mask is true, under the table's schema.
Reader = Callable[[Mask], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows or changes of one file with known, distinct keys.

    Read it while the file is open.
    """

    #: The key fields in the types of the table.
    keys: pa.RecordBatch
    #: False where the change is a DELETE.
    alive: Mask
    read: Reader
    #: Whether a TRUNCATE precedes it.
    truncates: bool = False


def base_runs(
    form: Format, stored: TableSchema, part: Part, source: BinaryIO, schema: TableSchema
) -> Iterator[Run]:
    """Yield the rows of a file of a base, in runs of bounded size."""
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
    """Yield the changes of a file of a diff."""
    keys = schema.select(schema.key_fields)
    if form.reads_row_groups and part.sha256:
        file = _opened(part, source, coded=["action"])
        for group in range(file.num_row_groups):
            yield _diff_group(RowGroup(file, group, part.path), keys, schema)
        return
    for batch in form.read_changes(source, stored):
        changes, truncates = _without_truncate(batch)
        found = columns_of(changes["key"], keys)
        rows = columns_of(changes["after"], schema.arrow)
        yield Run(found, _alive(changes), _holding(rows), truncates)


def _base_group(group: RowGroup, keys: pa.Schema, schema: TableSchema) -> Run:
    found = group.whole(keys.names)

    def read(wanted: Mask) -> Iterator[pa.RecordBatch]:
        for batch, own in group.batches(None, wanted):
            yield fitted(_filtered(batch, own), schema.arrow)

    return Run(fitted(found, keys), np.ones(len(found), np.bool_), read)


def _diff_group(group: RowGroup, keys: pa.Schema, schema: TableSchema) -> Run:
    changes, truncates = _without_truncate(group.whole(["action", "key"]))

    def read(wanted: Mask) -> Iterator[pa.RecordBatch]:
        mask = np.concatenate([np.zeros(int(truncates), np.bool_), wanted])
        for batch, own in group.batches(["after"], mask):
            yield _filtered(columns_of(batch["after"], schema.arrow), own)

    return Run(columns_of(changes["key"], keys), _alive(changes), read, truncates)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a Parquet file; read in one thread, since a task has one core."""

    file: pq.ParquetFile
    number: int
    path: str

    def whole(self, names: Sequence[str]) -> pa.RecordBatch:
        """Read these columns of all rows."""
        with _readable(self.path):
            table = self.file.read_row_group(self.number, columns=list(names), use_threads=False)
            return pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())

    def batches(
        self, names: Sequence[str] | None, wanted: Mask
    ) -> Iterator[tuple[pa.RecordBatch, Mask]]:
        """Yield batches with wanted rows, and the mask of each."""
        if not wanted.any():
            return
        average = self.file.metadata.row_group(self.number).total_byte_size // len(wanted)
        rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // max(1, average)))
        start = 0
        with _readable(self.path):
            for batch in self.file.iter_batches(
                rows, row_groups=[self.number], columns=names, use_threads=False
            ):
                mask = wanted[start : start + len(batch)]
                start += len(batch)
                if mask.any():
                    yield batch, mask


def _without_truncate(changes: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
    truncates = len(changes) > 0 and changes["action"][0].as_py() == "TRUNCATE"
    return changes.slice(int(truncates)), truncates


def _alive(changes: pa.RecordBatch) -> Mask:
    found: Mask = pc.not_equal(changes["action"], "DELETE").to_numpy(zero_copy_only=False)
    return found


def _holding(rows: pa.RecordBatch) -> Reader:
    """Make a reader of rows that are already decoded, for formats that cannot decode in part."""

    def read(wanted: Mask) -> Iterator[pa.RecordBatch]:
        if wanted.any():
            yield _filtered(rows, wanted)

    return read


def _filtered(rows: pa.RecordBatch, wanted: Mask) -> pa.RecordBatch:
    return rows if wanted.all() else rows.filter(pa.array(wanted))


def _opened(part: Part, source: BinaryIO, coded: Sequence[str] = ()) -> pq.ParquetFile:
    """Open the file, reading `coded` columns as dictionaries; its hash is already verified."""
    with _readable(part.path):
        file = pq.ParquetFile(source, pre_buffer=False, read_dictionary=list(coded))
    if part.rows not in (None, file.metadata.num_rows):
        raise ArtifactCorruptError(
            f"file {part.path!r} holds {file.metadata.num_rows} rows, the manifest says "
            f"{part.rows}: restore it"
        )
    return file


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Report what Arrow cannot read as corrupt: the hash is right, so it was written wrong."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # storage failed: the bytes may be fine
        raise ArtifactCorruptError(f"file {path!r} cannot be read: {error}") from None
