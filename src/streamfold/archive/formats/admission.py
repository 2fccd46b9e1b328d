"""Checks everything written and read: the schema, the rules of diffs, and bounded batch sizes.

Every format admits and stores the same values, which makes formats interchangeable. An update or
insert has the row after it. A delete names the row. A truncate comes first and has only its action.

Writers of the same rows produce the same bytes however the rows arrive, and hold a bounded amount
of them: a piece ends with the row that reaches the limit of rows or of bytes.

JSON Lines and plain protobuf messages are two notations of the published form of changes, `action,
key, old, new`. The key text serves readers that identify rows by it. The key's values are taken
from the images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.conforming import (
    Lengths,
    as_list,
    build_struct,
    conform,
    list_lengths,
    struct_children,
)
from streamfold.archive.formats.format import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from streamfold.archive.formats.jsonl.json_values import restored
from streamfold.archive.schema import ACTIONS, TableSchema
from streamfold.errors import InvalidError


class PieceLimits(NamedTuple):
    """Maximum rows in a piece, and maximum bytes of their values, without Arrow's own overhead."""

    rows: int = BATCH_ROWS_MAX
    size: int = BATCH_BYTES_MAX


#: Limits of every batch that a reader yields, and what formats write at once by default.
BATCH = PieceLimits()


def pieces(
    batches: Iterable[pa.RecordBatch], limits: PieceLimits = BATCH
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in the same order, in pieces that are never empty."""
    batch_slices: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        sizes = running_size(batch)
        start = 0
        while start < len(batch):
            end = _end(sizes, start, limits.rows - rows, limits.size - size)
            batch_slices.append(batch.slice(start, end - start))
            rows, size = rows + end - start, size + int(sizes[end] - sizes[start])
            start = end
            if rows >= limits.rows or size >= limits.size:
                yield _joined(batch_slices)
                batch_slices, rows, size = [], 0, 0
    if batch_slices:
        yield _joined(batch_slices)


def bounded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the batch for a reader: unchanged if small, otherwise in pieces. Omits an empty one."""
    if not 0 < len(batch) <= BATCH.rows or batch.nbytes > BATCH.size:
        yield from pieces([batch])
    else:
        yield batch


def _end(sizes: Lengths, start: int, rows: int, size: int) -> int:
    """Return the offset after the row that reaches either limit, or after the last row."""
    reached = int(np.searchsorted(sizes, sizes[start] + size))
    return max(start + 1, min(start + rows, reached, len(sizes) - 1))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def running_size(batch: pa.RecordBatch) -> Lengths:
    """Return the bytes of the values before each row, and after the last one."""
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


def admitted_rows(
    schema: TableSchema, batches: Iterable[pa.RecordBatch], limits: PieceLimits = BATCH
) -> Iterator[pa.RecordBatch]:
    """Yield rows with exactly `schema.arrow`, in pieces that depend only on the rows."""
    return pieces((conform(batch, schema.arrow) for batch in batches), limits)


def admitted_changes(
    schema: TableSchema, batches: Iterable[pa.RecordBatch], limits: PieceLimits = BATCH
) -> Iterator[pa.RecordBatch]:
    """Yield changes with exactly `schema.changes`, in pieces that depend only on the changes."""
    return pieces(_checked(schema, batches), limits)


def _checked(schema: TableSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    first = True
    for batch in batches:
        if len(batch):
            _check_truncate(batch, first)
            yield check_changes(schema, batch)
            first = False


def check_changes(schema: TableSchema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch under `schema.changes`. Raises InvalidError if it breaks a rule of diffs."""
    changes = conform(batch, schema.changes)
    _check_actions(changes["action"])
    _check_presence(changes)
    changes = with_named_deletes(schema, changes)
    for image in ("before", "after"):
        _check_key(schema, changes, image)
    return changes


def _check_actions(actions: pa.Array) -> None:
    if not pc.all(pc.is_in(actions, pa.array(ACTIONS))).as_py():
        unknown = pc.unique(actions).to_pylist()
        raise InvalidError(f"actions {unknown} are unknown: use {', '.join(ACTIONS)}")


def _check_truncate(batch: pa.RecordBatch, first: bool) -> None:
    if "action" not in batch.schema.names:
        return  # the schema check names the missing column
    rest = batch["action"].slice(1) if first else batch["action"]
    if pc.any(pc.equal(rest, "TRUNCATE")).as_py():
        raise InvalidError("a TRUNCATE does not come first: it would undo changes before it")


def _check_presence(changes: pa.RecordBatch) -> None:
    """Check which of key, before and after are present, depending on the action."""
    rules = (
        ("key", ("INSERT", "UPDATE", "DELETE"), ("TRUNCATE",)),
        ("after", ("INSERT", "UPDATE"), ("DELETE", "TRUNCATE")),
        ("before", (), ("INSERT", "TRUNCATE")),
    )
    for name, needed, refused in rules:
        column, actions = changes[name], changes["action"]
        if _any_of(actions, needed, column.is_null()):
            raise InvalidError(f"a change has no {name!r}: {' and '.join(needed)} need one")
        if _any_of(actions, refused, column.is_valid()):
            raise InvalidError(f"a change has {name!r}: {' and '.join(refused)} must not")


def _any_of(actions: pa.Array, which: tuple[str, ...], mask: pa.Array) -> bool:
    chosen = pc.is_in(actions, pa.array(which, pa.string()))
    return bool(pc.any(pc.and_(chosen, mask)).as_py())


def with_named_deletes(schema: TableSchema, changes: pa.RecordBatch) -> pa.RecordBatch:
    """Return the changes, giving every DELETE a `before` that holds at least the key fields."""
    before, key = changes["before"], changes["key"]
    bare = pc.and_(pc.equal(changes["action"], "DELETE"), before.is_null())
    if not pc.any(bare).as_py():
        return changes
    keys = dict(zip(schema.key_fields, struct_children(key), strict=True))
    children = [
        pc.if_else(bare, keys[field.name], child) if field.name in keys else child
        for field, child in zip(before.type, struct_children(before), strict=True)
    ]
    named = build_struct(children, list(before.type), pc.and_(before.is_null(), pc.invert(bare)))
    return pa.RecordBatch.from_arrays(
        [changes["action"], key, named, changes["after"]], schema=schema.changes
    )


def _check_key(schema: TableSchema, changes: pa.RecordBatch, image: str) -> None:
    """Check that key and image agree, because the key is stored only as part of the image."""
    keys = dict(zip(schema.key_fields, struct_children(changes["key"]), strict=True))
    images = dict(zip(schema.names, struct_children(changes[image]), strict=True))
    for name, key in keys.items():
        if pc.any(pc.not_equal(key, images[name])).as_py():
            raise InvalidError(
                f"key field {name!r} differs between key and {image!r}: write a key change as "
                "DELETE of the old key and INSERT of the new one"
            )


def published_schema(schema: TableSchema) -> pa.Schema:
    """Return the columns of a change as published, typed by the table's schema."""
    changes = schema.changes
    return pa.schema(
        [
            pa.field("action", pa.string()),
            pa.field("key", pa.string()),
            pa.field("old", changes.field("before").type),
            pa.field("new", changes.field("after").type),
        ]
    )


def verified_rows(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows in bounded batches. Raises ArtifactCorruptError if they break the schema."""
    try:
        yield from bounded(conform(batch, schema))
    except InvalidError as error:
        raise ArtifactCorruptError(error.message) from None


def verified_changes(batch: pa.RecordBatch, schema: TableSchema) -> Iterator[pa.RecordBatch]:
    """Yield published columns as bounded change batches. Raises if they break a rule of diffs."""
    before, after = batch["old"], batch["new"]
    truncates = pc.fill_null(pc.equal(batch["action"], "TRUNCATE"), False)
    images = dict(
        zip(
            schema.names,
            zip(struct_children(after), struct_children(before), strict=True),
            strict=True,
        )
    )
    keys = [pc.coalesce(*images[name]) for name in schema.key_fields]
    if len(keys) == 1 and keys[0].null_count > pc.sum(truncates).as_py():
        keys = [pc.coalesce(keys[0], _key_from_text(batch["key"], truncates, keys[0].type))]
    key = build_struct(keys, list(schema.changes.field("key").type), truncates)
    columns = [batch["action"], key, before, after]
    yield from verified(pa.RecordBatch.from_arrays(columns, schema=schema.changes), schema)


def _key_from_text(key: pa.Array, truncates: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return keys parsed from text, because a published DELETE may have no image."""
    try:
        text = pc.if_else(truncates, None, key)
        return text.cast(kind) if pa.types.is_integer(kind) else restored(text, kind)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ArtifactCorruptError(f"the key of a change without images: {error}") from None


def verified(changes: pa.RecordBatch, schema: TableSchema) -> Iterator[pa.RecordBatch]:
    """Yield change batches of bounded size. Raises ArtifactCorruptError if they break a rule."""
    try:
        yield from bounded(check_changes(schema, changes))
    except InvalidError as error:
        raise ArtifactCorruptError(error.message) from None
