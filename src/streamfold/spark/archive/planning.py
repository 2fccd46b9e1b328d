"""A table cut into parts that tasks rebuild on their own: one per key bucket, no rows on the driver.

Where not all files have a bucket, changes may be about any row, and one task rebuilds the table.
Without changes every file is a part, and a large one on a disk is several.

Buckets of other keys, and row groups without a wanted row, are skipped. This needs the writer's
statement, a field of the parts, that buckets follow the hash of `archive.buckets`. Archives that are
bucketed otherwise are read in full.

A base row that fails a filter may be dropped before changes are folded in: a change to its key
replaces the row anyway, and the new row is filtered on its own.
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

#: The most keys to look up one by one: beyond it, most buckets are wanted anyway.
KEYS_MAX = 1024
#: The most digits of a decimal in Spark.
DECIMAL_DIGITS = 38


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
    try:
        return condition.may_hold(statistics.min, statistics.max)
    except OverflowError:  # a day or an instant outside the years that Python has
        return True
    except TypeError:  # a decimal that has got more digits than Spark has since, and is text there
        return True


def _is_ordered(kind: pa.DataType) -> bool:
    """Return whether statistics and conditions have the same Python values, in one order."""
    types = pa.types
    plain = types.is_integer(kind) or types.is_string(kind) or types.is_binary(kind)
    moment = types.is_date32(kind) or (types.is_timestamp(kind) and kind.unit == "us")
    # Decimals of more digits are text in Spark.
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
        # A name with a dot is also the path of a field in a struct, which comes along then.
        yield from verified_rows(batch.select(names), columns)
    if seen != group.num_rows:
        raise ArtifactCorruptError(
            f"row group {number} has {seen} rows, the footer says {group.num_rows}"
        )


#: Bytes of a Parquet file of which a task reads its own row groups: seconds of work.
SHARE_BYTES = 128 << 20
#: The most tasks that share a file: each of them checks the hash of the whole file.
SHARES_MAX = 8


@dataclass(frozen=True, slots=True)
class TablePart:
    """What one task reads; pickled with it, so it names only the task's own files."""

    base: ChosenFiles
    diffs: tuple[ChosenFiles, ...]
    keys: tuple[str, ...]
    bucket: int | None = None
    #: Whether the first diff empties the table, even if its own files do not say so.
    clears: bool = False
    share: Share = WHOLE


def choose_all(decoding: Decoding, plan: TablePlan) -> tuple[ChosenFiles, tuple[ChosenFiles, ...]]:
    """Return the base and the diffs of a plan, each in the best format."""
    found = [slim(decoding.choose(plan.manifest, artifact)) for artifact in plan.artifacts]
    return found[0], tuple(found[1:])


def slim(chosen: ChosenFiles) -> ChosenFiles:
    """Return the same without the files of other formats, which tasks do not need."""
    bare: Artifact = msgspec.structs.replace(chosen.artifact, formats={})
    return replace(chosen, artifact=bare)


async def table_parts(
    base: ChosenFiles, diffs: tuple[ChosenFiles, ...], keys: tuple[str, ...], files: PartFiles
) -> list[TablePart]:
    """Cut a table into parts; `files` are opened only for diffs that do not say if they truncate."""
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
    # Nothing before the last diff that empties the table matters.
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
    """Return whether a diff starts with a TRUNCATE, which may be in any of its parts."""
    if any(part.extra.get(TRUNCATES) for part in diff.parts):
        return True
    return not is_hashed(diff) and await truncates(diff, files, keys)


def _by_bucket(chosen: ChosenFiles) -> dict[int | None, ChosenFiles]:
    """Split the artifact by bucket."""
    found: dict[int | None, list[Part]] = {}
    for part in chosen.parts:
        found.setdefault(part.bucket, []).append(part)
    return {bucket: _only(chosen, parts) for bucket, parts in found.items()}


def _only(chosen: ChosenFiles, parts: Sequence[Part]) -> ChosenFiles:
    return replace(chosen, parts=tuple(parts))


def _shares(base: ChosenFiles, part: Part, files: PartFiles) -> Iterator[Share]:
    """Yield shares of a file on disk; on remote storage every share would fetch the whole file."""
    local = local_folder(files.destination.uri) is not None
    large = local and base.form.reads_row_groups and part.bucket is None
    count = min(SHARES_MAX, -(-part.size_bytes // SHARE_BYTES)) if large else 1
    return (Share(number, count) for number in range(max(1, count)))
