"""Turns raw changes into typed ones: rules, types, keys, unsent columns.

All decoders end here, so they agree on what a changed key is, when a record is unusable, and how the
table's schema grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError
from streamfold.snapshotter.decoding.arrow_rows import (
    ABSENT,
    Images,
    NotPlainError,
    RowReading,
    read_plain,
)
from streamfold.snapshotter.decoding.decoder import UNCHANGED, Decoded, decoded_schema
from streamfold.snapshotter.decoding.records import (
    RawChanges,
    RecordIntake,
    is_op,
    refuse_malformed,
)
from streamfold.snapshotter.decoding.value_reader import ValueReader, learned_schema
from streamfold.snapshotter.errors import ValuesIncompatibleError

Mask = npt.NDArray[np.bool_]
#: Characters of a key in a message.
_KEY_SHOWN = 200
#: What to do with a record whose values do not fit the table's columns.
STOP, DEAD_LETTER = "stop", "dead_letter"


def relaxed(schema: TableSchema, after: Images, used: Mask, marks: dict[str, Mask]) -> TableSchema:
    """Return the schema with every column nullable that is null in a used row."""

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
    """Replace each change of a key by a delete of the old key and an insert of the new one."""
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


@dataclass(frozen=True, slots=True)
class Assembly:
    """The last step of a decoder."""

    key_fields: tuple[str, ...]
    reading: RowReading
    mismatch: str = STOP

    def decoded(
        self, intake: RecordIntake, changes: RawChanges, schema: TableSchema | None
    ) -> Decoded:
        if schema is not None:
            _check_key_fields(schema, self.key_fields)
        changes, given_images = refuse_malformed(intake, changes)
        typed = _Typed.read(self, intake, changes, given_images, schema)
        changes = typed.changes() if typed.schema else typed.bare_changes()
        return Decoded(changes, intake.dead_letters(), typed.schema, intake.ignored)


@dataclass(slots=True)
class _Typed:
    """Changes with typed images, not yet checked against each other."""

    intake: RecordIntake
    raw: RawChanges
    schema: TableSchema | None
    key: Images
    before: Images
    after: Images

    @classmethod
    def read(
        cls,
        how: Assembly,
        intake: RecordIntake,
        changes: RawChanges,
        given_images: Sequence[Mask],
        schema: TableSchema | None,
    ) -> _Typed:
        key, before, after = given_images
        if schema is not None:
            keys = [schema.arrow.field(name) for name in how.key_fields]
            every = list(schema.arrow)
            try:
                images = (
                    read_plain(changes.keys, key, keys, how.reading),
                    read_plain(changes.befores, before, every, how.reading),
                    read_plain(changes.afters, after, every, how.reading),
                )
                return cls(intake, changes, schema, *images)
            except NotPlainError:
                pass  # the slower reader finds new columns, and records that do not fit
        return cls._read_values(how, intake, changes, schema)

    @classmethod
    def _read_values(
        cls, how: Assembly, intake: RecordIntake, changes: RawChanges, schema: TableSchema | None
    ) -> _Typed:
        rows, keys = ValueReader(how.reading), ValueReader(how.reading)
        rows.add(changes.afters)
        rows.add(changes.befores)
        keys.add(changes.keys)
        keys.keep_only(how.key_fields)
        merged = learned_schema(schema, how.key_fields, (rows, keys))
        fields = list(merged.arrow) if merged else []
        key_fields = [merged.arrow.field(name) for name in how.key_fields] if merged else []
        columns, key_columns = rows.columns(fields), keys.columns(key_fields)
        count = len(changes.ops)
        typed = cls(
            intake, changes, merged,
            keys.images(key_columns, 0, count),
            rows.images(columns, count, count),
            rows.images(columns, 0, count),
        )  # fmt: skip
        typed._account(how, rows, keys)
        return typed

    def _account(self, how: Assembly, rows: ValueReader, keys: ValueReader) -> None:
        """Stop at values that do not fit, or make dead letters of their records.

        A record with an undecodable image is a dead letter, whatever its other images hold.
        """
        count = len(self.raw.ops)
        broken = {row % count: why for r in (rows, keys) for row, why in r.broken.items()}
        for row, reason in broken.items():
            self.intake.refuse(self.raw.indices[row], reason)
        if self.schema is None:
            return  # no row is usable without a key, whatever its values
        unfit = [
            (row % count, reasons)
            for reader in (rows, keys)
            for row, reasons in reader.unfit.items()
            if row % count not in broken
        ]
        if unfit and how.mismatch == STOP:
            first = min(row for row, _ in unfit)
            problems = dict.fromkeys(reason for _, reasons in unfit for reason in reasons)
            seq_num = int(self.intake.seq_nums[self.raw.indices[first]])
            raise ValuesIncompatibleError(seq_num, sorted(problems), self._shown_key(how, first))
        for row, reasons in unfit:
            self.intake.refuse(self.raw.indices[row], "; ".join(reasons))

    def _shown_key(self, how: Assembly, row: int) -> str:
        """Return the key of a row as its record has it; empty if it has none."""
        for raw in (self.raw.keys[row], self.raw.befores[row], self.raw.afters[row]):
            if raw != ABSENT:
                image = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
                key = {name: image[name] for name in how.key_fields if name in image}
                return msgspec.json.encode(key).decode(errors="replace")[:_KEY_SHOWN]
        return ""

    def bare_changes(self) -> pa.Table:
        """Return only truncates, which need no columns; other changes lack their key."""
        truncates = is_op(pa.array(self.raw.ops, pa.string()), "truncate")
        for row in np.flatnonzero(~truncates):
            self.intake.refuse(self.raw.indices[row], "no key field has a value")
        count = int(truncates.sum())
        changes = self.raw.only(truncates)
        empty = [pa.nulls(count)] * 3
        return change_table(None, self.intake, changes, empty, no_lists(count))

    def changes(self) -> pa.Table:
        schema = self.schema
        assert schema is not None  # noqa: S101 - callers check it before
        ops = pa.array(self.raw.ops, pa.string())
        old, new, wrong, keyless = self._keys(ops, schema.key_fields)
        truncate = is_op(ops, "truncate")
        moved = is_op(ops, "update") & _differ(old, new)
        self.after.columns.update(new)
        marks = self._unsent(schema)
        any_mark = np.logical_or.reduce([*marks.values(), np.zeros(len(ops), np.bool_)])
        self._refuse(keyless & ~truncate, f"a key field has no value: {list(schema.key_fields)}")
        self._refuse(wrong, "the key differs from the row's own: a changed key is an update")
        self._refuse(
            moved & any_mark,
            "the key changed, and some columns that only the old row has were not sent",
        )
        used = self.after.present & self._alive(self.raw.indices)
        self.schema = schema = relaxed(schema, self.after, used, marks)
        fresh = is_op(ops, "insert", "read")
        parts = [
            struct_column([new[name] for name in new], key_type(schema), truncate),
            image_column(self.before, schema, self.before.present & ~fresh & ~moved),
            image_column(self.after, schema, self.after.present),
        ]
        table = change_table(schema, self.intake, self.raw, parts, name_lists(marks, len(ops)))
        if moved.any():
            old_key = struct_column([old[name] for name in old], key_type(schema), truncate)
            old_row = image_column(self.before, schema, self.before.present)
            table = split_moves(table, moved, old_key, old_row)
        if not self.intake.letters:
            return table
        owners = np.repeat(np.array(self.raw.indices, np.int64), 1 + moved.astype(np.int64))
        return table.filter(pa.array(self._alive(owners.tolist())))

    def _alive(self, indices: Sequence[int]) -> Mask:
        """Return which records are not dead letters."""
        letters = self.intake.letters
        if not letters:
            return np.ones(len(indices), np.bool_)
        return np.fromiter((index not in letters for index in indices), np.bool_, len(indices))

    def _refuse(self, rows: Mask, reason: str) -> None:
        for row in np.flatnonzero(rows):
            self.intake.refuse(self.raw.indices[row], reason)

    def _keys(
        self, ops: pa.Array, names: Sequence[str]
    ) -> tuple[dict[str, pa.Array], dict[str, pa.Array], Mask, Mask]:
        """Return keys before and after each change, and which of them contradict or lack a value."""
        old, new = {}, {}
        wrong, keyless = np.zeros(len(ops), np.bool_), np.zeros(len(ops), np.bool_)
        fresh = is_op(ops, "insert", "read")
        for name in names:
            key, before, after = (i.columns[name] for i in (self.key, self.before, self.after))
            # A new row has no row before it, whatever the record holds.
            before = pc.if_else(pa.array(fresh), pa.scalar(None, before.type), before)
            old[name] = pc.coalesce(key, before, after)
            new[name] = pc.coalesce(after, old[name])
            wrong |= _unequal(key, before) | (fresh & _unequal(old[name], new[name]))
            keyless |= old[name].is_null().to_numpy(zero_copy_only=False)
        return old, new, wrong, keyless

    def _unsent(self, schema: TableSchema) -> dict[str, Mask]:
        """Return columns that changes leave unchanged and the row before does not show."""
        marks = {n: m & self.after.present for n, m in self.after.unsent.items()}
        named = enumerate(self.raw.unchanged) if any(self.raw.unchanged) else ()
        for row, names in named:
            for name in names:
                marks.setdefault(name, np.zeros(len(self.raw.ops), np.bool_))[row] = True
        columns = [n for n in marks if n in schema.names and n not in schema.key_fields]
        return {name: self._filled(name, marks[name]) for name in columns}

    def _filled(self, name: str, marks: Mask) -> Mask:
        before, after = self.before.columns[name], self.after.columns[name]
        # A null there may also mean that the row was sent in part.
        shown = marks & before.is_valid().to_numpy(zero_copy_only=False)
        remaining = pc.if_else(pa.array(marks), pa.scalar(None, after.type), after)
        self.after.columns[name] = pc.if_else(pa.array(shown), before, remaining)
        left: Mask = marks & ~shown
        return left


def _unequal(left: pa.Array, right: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(pc.not_equal(left, right), False).to_numpy(zero_copy_only=False)
    return mask


def _differ(old: dict[str, pa.Array], new: dict[str, pa.Array]) -> Mask:
    mask: Mask = np.logical_or.reduce([_unequal(old[name], new[name]) for name in old])
    return mask


def _check_key_fields(schema: TableSchema, key_fields: Sequence[str]) -> None:
    """Reject a schema whose key is not the decoder's."""
    if schema.key_fields != tuple(key_fields):
        raise InvalidError(
            f"the schema has key fields {list(schema.key_fields)}, the decoder {list(key_fields)}: "
            "configure the same key fields"
        )
