"""Rows and changes of writers that record no schema: types as found, keys from the images.

Files of one archive may differ in what they show: a column that is null everywhere, an integer that
is written as a double. What comes out has columns that fit all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError, KeyFieldsUnknownError
from streamfold.archive.read.folding import Delta, columns_of, fitted
from streamfold.errors import InvalidError


def with_keys(changes: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    """Return changes of an unknown schema with typed keys, from the images or the key's text."""
    text = changes["key"].flatten()[0]
    images = changes["after"].type
    known = [f for f in images if f.name in keys]
    wanted = pa.schema([pa.field(f.name, f.type) for f in known])
    sides = [columns_of(changes[side], wanted) for side in ("after", "before")]
    found = {f.name: pc.coalesce(*(s[f.name] for s in sides)) for f in known}
    if len(keys) == 1 and (keys[0] in found or not images.num_fields):
        # A published DELETE may come without an image: the text of a single key is its value.
        value = found.get(keys[0], pa.nulls(len(changes), pa.string()))
        found[keys[0]] = pc.coalesce(value, _parsed(text, value.type))
    truncates = pc.equal(changes["action"], "TRUNCATE")
    for name in keys:
        if name not in found:
            raise KeyFieldsUnknownError(name, [field.name for field in images])
        if found[name].null_count > pc.sum(truncates).as_py():
            raise ArtifactCorruptError(
                f"a change has no value for key field {name!r}: name the key fields of the table"
            )
    key = pa.StructArray.from_arrays([found[name] for name in keys], list(keys), mask=truncates)
    return pa.RecordBatch.from_arrays(
        [changes["action"], key, changes["before"], changes["after"]],
        ["action", "key", "before", "after"],
    )


def _parsed(text: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return text.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ArtifactCorruptError(f"the key of a change is not of type {kind}: {error}") from None


def fold_untyped(
    rows: Sequence[pa.RecordBatch], diffs: Sequence[Sequence[pa.RecordBatch]], keys: Sequence[str]
) -> pa.Table:
    """Return rows with changes applied, where each file has columns of its own."""
    changes = [batch for diff in diffs for batch in diff]
    images = [pa.schema(list(batch["after"].type)) for batch in changes]
    columns = unified([*(batch.schema for batch in rows), *images])
    delta = Delta(columns, _key_columns(columns, changes, keys))
    for diff in diffs:
        delta.begin()
        for batch in diff:
            delta.add(batch)
    untouched = delta.untouched(fitted(batch, columns) for batch in rows)
    return pa.concat_tables([columns.empty_table(), *untouched, delta.rows()])


def unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return columns that fit the values of all."""
    try:
        return pa.unify_schemas([pa.schema([]), *schemas], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ArtifactCorruptError(
            f"no type fits a column in all files, give the table's schema: {error}"
        ) from None


def _key_columns(
    columns: pa.Schema, changes: Sequence[pa.RecordBatch], keys: Sequence[str]
) -> pa.Schema:
    if not changes:
        return pa.schema([])
    if not columns.names:  # only deletions, of rows that do not exist
        return pa.schema([pa.field(name, pa.string()) for name in keys])
    if unknown := [name for name in keys if name not in columns.names]:
        raise InvalidError(
            f"key fields {unknown} are not columns: give key fields among {columns.names}"
        )
    return pa.schema([columns.field(name) for name in keys])
