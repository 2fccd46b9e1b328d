"""Decoded objects as columns: the way that knows every legal form, one value at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError, readable_array, restored


def columns_of(
    rows: Sequence[dict[str, Any]], schema: pa.Schema, others_ignored: bool
) -> pa.RecordBatch:
    """The rows under `schema`; UnreadableError when a value, or a name, is not in it."""
    if not others_ignored:
        known = set(schema.names)
        if unknown := {name for row in rows for name in row if name not in known}:
            raise UnreadableError(f"fields {sorted(unknown)} are not in the schema")
    columns = [
        readable_array([row.get(field.name) for row in rows], field.type, field.name)
        for field in schema
    ]
    return restored_batch(columns, schema)


def restored_batch(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Columns of readable types as columns of the schema."""
    made = [restored(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(made, schema=schema)
