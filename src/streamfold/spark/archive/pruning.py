"""Skips what a read does not need: buckets of other keys, row groups without a wanted row.

This needs the writer's statement, a field of the parts, that buckets follow the hash of
`spark.buckets`. Archives that are bucketed otherwise are read in full.

A base row that fails a filter may be dropped before changes are folded in: a change to its key
replaces the row anyway, and the new row is filtered on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from streamfold.archive.formats.published_changes import verified_rows
from streamfold.archive.manifest.model import Part
from streamfold.archive.read.decoding import ChosenFiles
from streamfold.archive.schema import TableSchema, is_decimal
from streamfold.spark.archive.filters import Condition
from streamfold.spark.buckets import BUCKETING, SPLITMIX64, bucket_numbers

#: The most keys to look up one by one: beyond it, most buckets are wanted anyway.
KEYS_MAX = 1024


def is_hashed(artifact: ChosenFiles) -> bool:
    """Return whether the writer states that our hash chose the parts' buckets."""
    return all(
        part.bucket is not None and part.extra.get(BUCKETING) == SPLITMIX64
        for part in artifact.parts
    )


def wanted_buckets(
    conditions: Sequence[Condition], schema: TableSchema, artifacts: Sequence[ChosenFiles]
) -> set[int] | None:
    """Return the buckets that hold all keys that pass; None if any bucket may.

    `artifacts` are the base and its diffs.
    """
    base = {part.bucket for part in artifacts[0].parts}
    count = len(base)
    known = base == set(range(count)) and count & (count - 1) == 0
    if not known or not all(map(is_hashed, artifacts)):
        return None
    keys = _wanted_keys(conditions, schema)
    if keys is None:
        return None
    return set(bucket_numbers(keys, count).tolist())


def _wanted_keys(conditions: Sequence[Condition], schema: TableSchema) -> list[pa.Array] | None:
    """Return the key fields of all keys that pass, column by column."""
    listed = {c.column: c.values for c in conditions if c.values is not None}
    choices = [listed.get(name) for name in schema.key_fields]
    size = 1
    for choice in choices:
        size *= KEYS_MAX + 1 if choice is None else len(choice)
    if not choices or size > KEYS_MAX:
        return None
    keys = list(product(*(choice or () for choice in choices)))
    kinds = [schema.arrow.field(name).type for name in schema.key_fields]
    try:
        return [_column([key[i] for key in keys], kind) for i, kind in enumerate(kinds)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None  # Spark's type for the column does not convert back to the key's


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    whole = pa.types.is_integer(kind)
    return pa.array([int(value) for value in values] if whole else values, kind)


@dataclass(frozen=True, slots=True)
class Share:
    """The `number`-th of `count` equal shares of a file's row groups."""

    number: int = 0
    count: int = 1

    def of(self, groups: int) -> range:
        return range(groups * self.number // self.count, groups * (self.number + 1) // self.count)


WHOLE = Share()


def read_row_groups(
    part: Part,
    source: BinaryIO,
    columns: pa.Schema,
    conditions: Sequence[Condition],
    share: Share = WHOLE,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a share, skipping row groups without a row that passes all conditions."""
    try:
        source.seek(0)
        file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
        if part.rows not in (None, file.metadata.num_rows):
            raise ArtifactCorruptError(
                f"it holds {file.metadata.num_rows} rows, the manifest says {part.rows}"
            )
        for number in share.of(file.num_row_groups):
            if may_match(file.metadata.row_group(number), conditions, columns):
                yield from _read(file, number, columns)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # storage failed: the bytes may be fine
        raise ArtifactCorruptError(f"file {part.path!r} cannot be read: {error}") from None
    except ArtifactCorruptError as error:
        raise ArtifactCorruptError(
            f"file {part.path!r}: {error.message}: restore it, or read another format of it"
        ) from None


def may_match(
    group: pq.RowGroupMetaData, conditions: Sequence[Condition], columns: pa.Schema
) -> bool:
    """Return false only if the group's statistics show that a condition fails for all rows."""
    indices = {group.column(i).path_in_schema: i for i in range(group.num_columns)}
    for condition in conditions:
        index = indices.get(condition.column)
        # A column's name with a dot looks like the path of a field in a struct.
        if index is None or "." in condition.column:
            continue
        statistics = group.column(index).statistics
        kind = columns.field(condition.column).type
        if statistics is not None and not _may_match(statistics, group.num_rows, condition, kind):
            return False
    return True


def _may_match(
    statistics: pq.Statistics, rows: int, condition: Condition, kind: pa.DataType
) -> bool:
    if condition.test == "is null":
        return not statistics.has_null_count or statistics.null_count > 0
    if statistics.has_null_count and statistics.null_count == rows:
        return False
    if not statistics.has_min_max or not _is_ordered(kind):
        return True
    return condition.may_hold(statistics.min, statistics.max)


def _is_ordered(kind: pa.DataType) -> bool:
    """Return whether statistics and conditions have the same Python values, in one order."""
    types = pa.types
    plain = types.is_integer(kind) or types.is_string(kind) or types.is_binary(kind)
    moment = types.is_date32(kind) or (types.is_timestamp(kind) and kind.unit == "us")
    return bool(plain or moment or is_decimal(kind))


def _read(file: pq.ParquetFile, number: int, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    group = file.metadata.row_group(number)
    names = [name for name in columns.names if name in file.schema_arrow.names]
    average = max(1, group.total_byte_size // max(1, group.num_rows))
    rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // average))
    seen = 0
    for batch in file.iter_batches(rows, row_groups=[number], columns=names):
        seen += len(batch)
        yield from verified_rows(batch, columns)
    if seen != group.num_rows:
        raise ArtifactCorruptError(
            f"row group {number} has {seen} rows, the footer says {group.num_rows}"
        )
