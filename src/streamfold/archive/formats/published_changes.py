"""Changes in the published form `action, key, old, new`, and what is checked of anything read.

Shared by JSON Lines and the plain protobuf messages, two notations of the same content. The key
text serves readers that keep rows by it; the key's values are taken from the images.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import bounded, check_changes
from streamfold.archive.formats.conforming import build_struct, conform, struct_children
from streamfold.archive.formats.jsonl.json_values import restored
from streamfold.archive.schema import TableSchema
from streamfold.errors import InvalidError


def published_schema(schema: TableSchema) -> pa.Schema:
    """Columns of a change as published, typed by the table's schema."""
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
    """The rows as batches of bounded size, if they keep the schema's promises."""
    try:
        yield from bounded(conform(batch, schema))
    except InvalidError as error:
        raise ArtifactCorruptError(error.message) from None


def verified_changes(batch: pa.RecordBatch, schema: TableSchema) -> Iterator[pa.RecordBatch]:
    """Published columns as change batches of bounded size, if they follow the rules of a diff."""
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
    """A published DELETE may have no image; the text of a single key is its value."""
    try:
        text = pc.if_else(truncates, None, key)
        return text.cast(kind) if pa.types.is_integer(kind) else restored(text, kind)
    except (pa.ArrowInvalid, ValueError) as error:
        raise ArtifactCorruptError(f"the key of a change without images: {error}") from None


def verified(changes: pa.RecordBatch, schema: TableSchema) -> Iterator[pa.RecordBatch]:
    """Change batches of bounded size, if they follow the rules of a diff."""
    try:
        yield from bounded(check_changes(schema, changes))
    except InvalidError as error:
        raise ArtifactCorruptError(error.message) from None
