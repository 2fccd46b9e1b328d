"""Types for rows that come without a schema, in files of other writers.

Integers stay integers as long as 64 bits hold them; a column that mixes them with other numbers is
a double. Types are not guessed from text: dates and numbers in strings stay strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.schema import ACTIONS
from streamfold.errors import InvalidError


def inferred_schema(blocks: Iterable[Sequence[dict[str, Any]]]) -> pa.Schema:
    """The columns of all rows, in the order in which they are first seen."""
    schema = pa.schema([])
    for rows in blocks:
        try:
            found = pa.Table.from_pylist([_merged_names(rows), *rows]).schema
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ArtifactCorruptError(
                f"no type fits all values of a column, read it with a schema: {error}"
            ) from None
    return pa.schema([pa.field(f.name, _without_null(f.type)) for f in schema])


def _merged_names(rows: Sequence[dict[str, Any]]) -> dict[str, None]:
    """A row of nulls with every name: Arrow looks for columns in the first row only."""
    return dict.fromkeys(name for row in rows for name in row)


def _without_null(kind: pa.DataType) -> pa.DataType:
    """Columns that hold only nulls become strings."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_null(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _without_null(f.type)) for f in kind])
    return kind


def inferred_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=schema)


def selected(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """These columns of an inferred schema, in the order asked for."""
    if columns is None:
        return schema
    if not columns or any(name not in schema.names for name in columns):
        raise InvalidError(
            f"columns {list(columns)} are not all there: name some of {schema.names}"
        )
    return pa.schema([schema.field(name) for name in columns])


def inferred_changes(
    objects: Callable[[], Iterable[list[dict[str, Any]]]],
) -> Iterator[pa.RecordBatch]:
    """Published changes `action, key, old, new`; `objects` is called twice, as the file is read twice.

    Types must be known for the whole file before the first change is yielded.
    """

    def changes() -> Iterator[list[dict[str, Any]]]:
        for rows in objects():
            yield [foreign_change(row) for row in rows]

    images = ([r[n] for r in rows for n in ("before", "after") if r[n]] for rows in changes())
    schema = foreign_changes_schema(inferred_schema(images))
    for rows in changes():
        yield inferred_batch(rows, schema)


def foreign_change(row: dict[str, Any]) -> dict[str, Any]:
    """A change as written, without a schema: the key is the published text."""
    action, key = row.get("action"), row.get("key")
    before, after = row.get("old"), row.get("new")
    if action not in ACTIONS:
        raise ArtifactCorruptError(f"action {action!r} is unknown: it must be one of {ACTIONS}")
    for image in (before, after):
        if not isinstance(image, dict | None):
            raise ArtifactCorruptError("old and new are objects, or absent")
    named = None if action == "TRUNCATE" else {"key": key}
    return {"action": action, "key": named, "before": before, "after": after}


def foreign_changes_schema(row: pa.Schema) -> pa.Schema:
    """The Arrow schema of changes whose key fields are unknown."""
    image = pa.struct(list(row))
    return pa.schema(
        [
            pa.field("action", pa.string(), nullable=False),
            pa.field("key", pa.struct([pa.field("key", pa.string())])),
            pa.field("before", image),
            pa.field("after", image),
        ]
    )
