"""Builds the columns of decoded changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import Images
from streamfold.snapshotter.decoding.decoder import UNCHANGED, decoded_schema
from streamfold.snapshotter.decoding.raw_changes import RawChanges
from streamfold.snapshotter.decoding.records import RecordIntake

Mask = npt.NDArray[np.bool_]


def relaxed(schema: TableSchema, after: Images, used: Mask, marks: dict[str, Mask]) -> TableSchema:
    """Return the schema with every column nullable that holds a null in a used row."""

    def field_of(column: pa.Field) -> pa.Field:
        if column.nullable or column.name in schema.key_fields:
            return column
        nulls = after.columns[column.name].is_null().to_numpy(zero_copy_only=False) & used
        sent = nulls & ~marks[column.name] if column.name in marks else nulls
        return column.with_nullable(bool(sent.any()))

    fields = [field_of(column) for column in schema.arrow]
    return schema if fields == list(schema.arrow) else TableSchema.of(fields, schema.key_fields)


def key_type(schema: TableSchema) -> pa.DataType:
    return decoded_schema(schema).field("key").type


def image_column(images: Images, schema: TableSchema, present: Mask) -> pa.Array:
    kind = decoded_schema(schema).field("after").type
    return struct_column([images.columns[field.name] for field in kind], kind, ~present)


def struct_column(children: list[pa.Array], kind: pa.DataType, absent: Mask) -> pa.Array:
    mask = pa.array(absent) if absent.any() else None
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def no_lists(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string()), type=UNCHANGED
    )


def name_lists(marks: dict[str, Mask], count: int) -> pa.Array:
    if not any(rows.any() for rows in marks.values()):
        return no_lists(count)
    lists: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(marks):
        for row in np.flatnonzero(marks[name]):
            lists[row].append(name)
    return pa.array(lists, UNCHANGED)


def change_table(
    schema: TableSchema | None,
    intake: RecordIntake,
    changes: RawChanges,
    parts: list[pa.Array],
    lists: pa.Array,
) -> pa.Table:
    seq_nums = pa.array(intake.seq_nums[np.array(changes.indices, np.int64)], pa.int64())
    columns = [
        seq_nums,
        pa.array(changes.ops, pa.string()),
        *parts,
        lists,
        pa.array(changes.txns, pa.string()),
    ]
    return pa.table(columns, schema=decoded_schema(schema))


def split_moves(table: pa.Table, moved: Mask, old_key: pa.Array, before: pa.Array) -> pa.Table:
    """Replace every update of a key by a delete of the old one and an insert of the new one."""
    count = len(table)
    chosen = pa.array(moved)
    ops = pc.if_else(chosen, "insert", table["op"].combine_chunks())
    inserts = table.set_column(1, table.schema.field(1), ops)
    gone = {
        "op": pa.repeat(pa.scalar("delete"), count),
        "key": old_key,
        "before": before,
        "after": pa.nulls(count, table.schema.field("after").type),
        "unchanged": no_lists(count),
    }
    arrays = [gone.get(name, table[name]) for name in table.column_names]
    deletes = pa.table(arrays, schema=table.schema).filter(chosen)
    both = pa.concat_tables([deletes, inserts])
    order = np.concatenate([np.flatnonzero(moved), np.arange(count)])
    return both.take(pa.array(np.argsort(order, kind="stable")))
