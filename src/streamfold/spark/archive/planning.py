"""Splits a table into parts that tasks rebuild independently, one per key bucket.

The driver reads no rows. If some file has no bucket, a change may affect any row, so one task
rebuilds the whole table. Without diffs, every file is a part, and a large file on local disk
becomes several parts.

Filters skip buckets that hold no matching key, and row groups that hold no matching row. Skipping
buckets requires that the writer declared, in a field of each part, that buckets follow the hash of
`archive.buckets`. Archives bucketed any other way are read in full.

Dropping a base row that fails a filter before folding in changes is safe: a change to its key
replaces the row anyway, and the new row is filtered separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from streamfold.archive.buckets import BUCKETING, SPLITMIX64, TRUNCATES, bucket_numbers
from streamfold.archive.destinations.destination import local_folder
from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import verified_rows
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from streamfold.archive.manifest.model import Artifact, Part
from streamfold.archive.read.decoding import ChosenFiles, Decoding
from streamfold.archive.read.part_files import PartFiles
from streamfold.archive.read.plan import TablePlan
from streamfold.archive.read.rebuild import truncates
from streamfold.archive.schema import TableSchema, is_decimal
from streamfold.spark.archive.filters import Condition
from streamfold.wording import noun

#: Maximum keys to hash individually. With more, most buckets match anyway.
KEYS_MAX = 1024
#: Maximum digits of a Spark decimal.
DECIMAL_DIGITS = 38


def is_hashed(artifact: ChosenFiles) -> bool:
    """Return whether the writer declared that our hash assigned the parts to buckets."""
    return all(
        part.bucket is not None and part.extra.get(BUCKETING) == SPLITMIX64
        for part in artifact.parts
    )


def wanted_buckets(
    conditions: Sequence[Condition], schema: TableSchema, artifacts: Sequence[ChosenFiles]
) -> set[int] | None:
    """Return the buckets of all keys that pass, or None if any bucket may hold one.

    `artifacts` are the base and its diffs.
    """
    base = {part.bucket for part in artifacts[0].parts}
    count = len(base)
    numbered = base == set(range(count)) and count & (count - 1) == 0
    if not numbered or not all(map(is_hashed, artifacts)):
        return None
    keys = _wanted_keys(conditions, schema)
    if keys is None:
        return None
    return set(bucket_numbers(keys, count).tolist())


def _wanted_keys(conditions: Sequence[Condition], schema: TableSchema) -> list[pa.Array] | None:
    """Return all keys that pass, as one array per key field, or None if they cannot be enumerated."""
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
        return None  # the column's Spark type does not convert back to the key's type


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    whole = pa.types.is_integer(kind)
    return pa.array([int(value) for value in values] if whole else values, kind)


@dataclass(frozen=True, slots=True)
class RowGroupShare:
    """The `number`-th of `count` equal shares of a file's row groups."""

    number: int = 0
    count: int = 1

    def of(self, groups: int) -> range:
        return range(groups * self.number // self.count, groups * (self.number + 1) // self.count)


WHOLE = RowGroupShare()


def read_row_groups(
    part: Part,
    source: BinaryIO,
    columns: pa.Schema,
    conditions: Sequence[Condition],
    share: RowGroupShare = WHOLE,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a share, skipping row groups whose statistics rule out every row."""
    try:
        source.seek(0)
        file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False)
        if part.rows not in (None, file.metadata.num_rows):
            rows = file.metadata.num_rows
            raise ArtifactCorruptError(
                f"it holds {rows} {noun(rows, 'row')}, the manifest says {part.rows}"
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
    """Return False only if the group's statistics prove that some condition fails for every row."""
    indices = {group.column(i).path_in_schema: i for i in range(group.num_columns)}
    for condition in conditions:
        index = indices.get(condition.column)
        # A column name with a dot looks like the path of a struct field.
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
    try:
        return condition.may_hold(statistics.min, statistics.max)
    except OverflowError:  # a date or timestamp outside Python's year range
        return True
    except TypeError:  # the decimal has since outgrown Spark's digits and is text there
        return True


def _is_ordered(kind: pa.DataType) -> bool:
    """Return whether statistics and conditions use the same Python types with the same order."""
    types = pa.types
    plain = types.is_integer(kind) or types.is_string(kind) or types.is_binary(kind)
    moment = types.is_date32(kind) or (types.is_timestamp(kind) and kind.unit == "us")
    # Decimals with more digits are text in Spark.
    number = is_decimal(kind) and kind.precision <= DECIMAL_DIGITS
    return bool(plain or moment or number)


def _read(file: pq.ParquetFile, number: int, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    group = file.metadata.row_group(number)
    names = [name for name in columns.names if name in file.schema_arrow.names]
    average = max(1, group.total_byte_size // max(1, group.num_rows))
    rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES_MAX // average))
    seen = 0
    for batch in file.iter_batches(rows, row_groups=[number], columns=names):
        seen += len(batch)
        # A name with a dot may also match a struct field's path, which pyarrow then reads too.
        yield from verified_rows(batch.select(names), columns)
    if seen != group.num_rows:
        raise ArtifactCorruptError(
            f"row group {number} has {seen} rows, the footer says {group.num_rows}"
        )


#: Bytes of a Parquet file per task, read as a share of its row groups: seconds of work.
SHARE_BYTES = 128 << 20
#: Maximum tasks per file. Each task verifies the hash of the whole file.
SHARES_MAX = 8


@dataclass(frozen=True, slots=True)
class TablePart:
    """One task's input. Pickled with the task, so it names only that task's files."""

    base: ChosenFiles
    diffs: tuple[ChosenFiles, ...]
    keys: tuple[str, ...]
    bucket: int | None = None
    #: Whether the first diff empties the table, even if this part's files do not show it.
    clears: bool = False
    share: RowGroupShare = WHOLE


def choose_all(decoding: Decoding, plan: TablePlan) -> tuple[ChosenFiles, tuple[ChosenFiles, ...]]:
    """Return the plan's base and diffs, each in its best format."""
    files = [slim(decoding.choose(plan.manifest, artifact)) for artifact in plan.artifacts]
    return files[0], tuple(files[1:])


def slim(chosen: ChosenFiles) -> ChosenFiles:
    """Return `chosen` without its files in other formats, which tasks do not need."""
    bare: Artifact = msgspec.structs.replace(chosen.artifact, formats={})
    return replace(chosen, artifact=bare)


async def table_parts(
    base: ChosenFiles, diffs: tuple[ChosenFiles, ...], keys: tuple[str, ...], files: PartFiles
) -> list[TablePart]:
    """Split a table into parts. Opens only diffs that do not declare whether they truncate."""
    if not diffs:
        return [
            TablePart(_only(base, [part]), (), keys, part.bucket, share=share)
            for part in base.parts
            for share in _shares(base, part, files)
        ]
    buckets = [part.bucket for chosen in (base, *diffs) for part in chosen.parts]
    if None in buckets:
        return [TablePart(base, diffs, keys)]
    clears = False
    # Only the last diff that empties the table and the diffs after it matter.
    for number in reversed(range(len(diffs))):
        if await empties(diffs[number], files, keys):
            base, diffs, clears = _only(base, []), diffs[number:], True
            break
    own = [_by_bucket(chosen) for chosen in (base, *diffs)]
    return [
        TablePart(
            own[0].get(bucket, _only(base, [])),
            tuple(diff[bucket] for diff in own[1:] if bucket in diff),
            keys,
            bucket,
            clears,
        )
        for bucket in sorted({b for b in buckets if b is not None})
    ]


async def empties(diff: ChosenFiles, files: PartFiles, keys: Sequence[str]) -> bool:
    """Return whether a diff starts with a TRUNCATE, which any of its parts may hold."""
    if any(part.extra.get(TRUNCATES) for part in diff.parts):
        return True
    return not is_hashed(diff) and await truncates(diff, files, keys)


def _by_bucket(chosen: ChosenFiles) -> dict[int | None, ChosenFiles]:
    """Split an artifact's parts by bucket."""
    parts_of: dict[int | None, list[Part]] = {}
    for part in chosen.parts:
        parts_of.setdefault(part.bucket, []).append(part)
    return {bucket: _only(chosen, parts) for bucket, parts in parts_of.items()}


def _only(chosen: ChosenFiles, parts: Sequence[Part]) -> ChosenFiles:
    return replace(chosen, parts=tuple(parts))


def _shares(base: ChosenFiles, part: Part, files: PartFiles) -> Iterator[RowGroupShare]:
    """Yield a file's shares: several only on local disk, as each share would download the file."""
    local = local_folder(files.destination.uri) is not None
    large = local and base.form.reads_row_groups and part.bucket is None
    count = min(SHARES_MAX, -(-part.size_bytes // SHARE_BYTES)) if large else 1
    return (RowGroupShare(number, count) for number in range(max(1, count)))
