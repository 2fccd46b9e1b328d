"""Parquet, which analytical engines read directly, by column and row group.

Pages are zstd with checksums, row groups have statistics, and the file's metadata has the table's
schema. The footer depends only on the rows, the schema and the version of pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import (
    PieceLimits,
    admitted_changes,
    admitted_rows,
    verified,
    verified_rows,
)
from streamfold.archive.formats.conforming import cast_batch
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Format, FormatType
from streamfold.archive.schema import TableSchema, is_decimal
from streamfold.errors import InvalidError
from streamfold.undecodable import UNDECODABLE

#: Maximum rows and bytes of values in a row group, which a writer holds in memory and a reader can
#: skip by statistics.
ROW_GROUP = PieceLimits(rows=128 << 10, size=32 << 20)

#: Maximum digits that Parquet files read back as decimal128.
DECIMAL128_DIGITS = 38

#: Rows examined to choose how a column is encoded.
SAMPLE_ROWS = 4096

#: Parsed schemas to cache. Nearly all files of a table have the same.
SCHEMAS_KEPT = 64

#: Metadata keys of the file's schema, in the manifest's form, and of the schema's id.
SCHEMA_KEY, SCHEMA_ID_KEY = b"streamfold.schema", b"streamfold.schema_id"


@dataclass(frozen=True, slots=True)
class ParquetFormat(Format):
    """Exact for every type. Each file holds its own schema."""

    #: Whether a reader checks page checksums. Unnecessary if the file's hash was checked.
    page_checksums: bool = True

    id = "parquet"
    compression = "none"  # of the file as a whole: pages are compressed inside
    extension = ".parquet"
    reads_row_groups = True

    def for_hashed_file(self) -> Format:
        return replace(self, page_checksums=False)

    def write_rows(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, schema.arrow, admitted_rows(schema, batches, ROW_GROUP))

    def write_changes(
        self, sink: BinaryIO, schema: TableSchema, batches: Iterable[pa.RecordBatch]
    ) -> int:
        return _write(sink, schema, schema.changes, admitted_changes(schema, batches, ROW_GROUP))

    def read_rows(
        self, source: BinaryIO, schema: TableSchema | None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        with _opened(source, self.page_checksums) as file:
            stored = _stored_schema(file)
            if stored is not None:
                _check_types(file, stored.arrow)
            arrow = _arrow_of(file, schema or stored)
            chosen = arrow if columns is None else _selected(arrow, columns)
            missing = _check_columns(file, arrow)
            names = [name for name in chosen.names if name not in missing]
            for batch in _batches(file, names):
                yield from verified_rows(batch, chosen)

    def read_changes(
        self, source: BinaryIO, schema: TableSchema | None
    ) -> Iterator[pa.RecordBatch]:
        with _opened(source, self.page_checksums) as file:
            stored = _stored_schema(file)
            if stored is not None:
                _check_types(file, stored.changes)
            schema = schema or stored
            if schema is None:
                raise InvalidError("this Parquet file names no schema: give the table's schema")
            names = schema.changes.names
            if missing := [name for name in names if name not in file.schema_arrow.names]:
                raise ArtifactCorruptError(
                    f"the Parquet file of changes lacks the columns {missing}"
                )
            for batch in _batches(file, names):
                yield from verified(batch, schema)


def _write(
    sink: BinaryIO, schema: TableSchema, arrow: pa.Schema, groups: Iterator[pa.RecordBatch]
) -> int:
    metadata = {SCHEMA_KEY: schema.canonical_json, SCHEMA_ID_KEY: schema.id.encode()}
    stored = pa.schema([pa.field(f.name, loosened(f.type), f.nullable) for f in arrow])
    first = next(groups, None)
    count = 0
    with pq.ParquetWriter(
        sink,
        stored,
        compression="zstd",
        use_dictionary=[] if first is None else list(repeating(first.to_struct_array())),
        write_statistics=True,
        write_page_checksum=True,
        store_schema=False,  # pyarrow's own form of the schema, which no other reader understands
        version="2.6",
    ) as writer:
        for group in chain([] if first is None else [first], groups):
            table = pa.table(cast_batch(group, stored).columns, stored)
            writer.write_table(table, row_group_size=len(group))
            count += len(group)
        writer.add_key_value_metadata(metadata)
    return count


def loosened(kind: pa.DataType) -> pa.DataType:
    """Return the type with nullable parts: pyarrow cannot write required fields below a null struct."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, loosened(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), loosened(kind.item_type))
    return pa.list_(loosened(kind.value_type)) if pa.types.is_list(kind) else kind


def repeating(rows: pa.Array, path: str = "") -> Iterator[str]:
    """Yield the text columns for which a dictionary pays off, judged by the first rows.

    For other columns it would be built, found too large, and dropped, in one row group after
    another.
    """
    for field, column in zip(rows.type, rows.slice(0, SAMPLE_ROWS).flatten(), strict=True):
        if pa.types.is_struct(field.type):
            yield from repeating(column, f"{path}{field.name}.")
        elif field.type in (pa.string(), pa.binary()) and _repeats(column):
            yield path + field.name


def _repeats(column: pa.Array) -> bool:
    return bool(pc.count_distinct(column).as_py() <= (len(column) - column.null_count) // 2)


@contextmanager
def _opened(source: BinaryIO, checked: bool) -> Iterator[pq.ParquetFile]:
    """Open the file. Any Arrow error while reading it means that its bytes are corrupt."""
    try:
        source.seek(0)
        yield pq.ParquetFile(source, page_checksum_verification=checked, pre_buffer=False)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None or isinstance(error, MemoryError):
            raise  # storage or memory failed, not the file
        raise ArtifactCorruptError(f"the Parquet file cannot be read: {error}") from None


def _batches(file: pq.ParquetFile, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield one row group after another, in batches that are small however wide the rows are."""
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    _check_count("file", file.metadata.num_rows, sum(group.num_rows for group in groups))
    for number, group in enumerate(groups):
        average = max(1, group.total_byte_size // max(1, group.num_rows))
        rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // average))
        seen = 0
        for batch in file.iter_batches(rows, row_groups=[number], columns=list(names)):
            seen += len(batch)
            # A name with a dot is also the path of a struct field, which pyarrow then reads too.
            yield batch.select(list(names))
        _check_count(f"row group {number}", group.num_rows, seen)


def _check_count(what: str, said: int, rows: int) -> None:
    if said != rows:
        raise ArtifactCorruptError(f"the {what} has {rows} rows, the Parquet footer says {said}")


def _check_types(file: pq.ParquetFile, arrow: pa.Schema) -> None:
    """Check the columns against the file's own schema, which page checksums do not cover."""
    types = [(field.name, visible(field.type)) for field in file.schema_arrow]
    if types != [(field.name, visible(loosened(field.type))) for field in arrow]:
        raise ArtifactCorruptError("the columns of the Parquet file are not those of its schema")


def visible(kind: pa.DataType) -> pa.DataType:
    """Return the part of a type that Parquet itself stores: whether there is a zone, but not which."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC" if kind.tz else None)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, visible(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), visible(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(visible(kind.value_type))
    if is_decimal(kind) and kind.precision <= DECIMAL128_DIGITS:
        return pa.decimal128(kind.precision, kind.scale)
    return kind


def _check_columns(file: pq.ParquetFile, arrow: pa.Schema) -> set[str]:
    """Return the columns that the file lacks. Raises ArtifactCorruptError if it has unknown ones."""
    have = file.schema_arrow.names
    if unknown := [name for name in have if name not in arrow.names]:
        raise ArtifactCorruptError(f"columns {unknown} of the file are not in the schema")
    return {name for name in arrow.names if name not in have}


def _selected(arrow: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    if not columns or any(name not in arrow.names for name in columns):
        raise InvalidError(f"columns {list(columns)} are not all there: name some of {arrow.names}")
    return pa.schema([arrow.field(name) for name in columns])


def _stored_schema(file: pq.ParquetFile) -> TableSchema | None:
    """Return the schema in the file's metadata, or None in files of other writers."""
    metadata = file.metadata.metadata or {}
    if SCHEMA_KEY not in metadata:
        return None
    try:
        schema = _parsed_schema(metadata[SCHEMA_KEY])
    except (InvalidError, *UNDECODABLE) as error:
        raise ArtifactCorruptError(f"the schema in the Parquet file: {error}") from None
    if schema.id.encode() != metadata.get(SCHEMA_ID_KEY):
        raise ArtifactCorruptError("the schema in the Parquet file does not match its id")
    return schema


@lru_cache(maxsize=SCHEMAS_KEPT)
def _parsed_schema(data: bytes) -> TableSchema:
    return TableSchema.from_json(msgspec.json.decode(data))


def _arrow_of(file: pq.ParquetFile, schema: TableSchema | None) -> pa.Schema:
    return schema.arrow if schema else TableSchema.of(file.schema_arrow).arrow


PARQUET = FormatType(
    id="parquet",
    summary="columns that analytical engines read directly, with zstd and checksums inside",
    open=lambda _: ParquetFormat(),
    read_cost=10,
)
