"""Reads rows in JSON value by value: slower than Arrow's reader, but it learns.

It finds new columns and wider types, and the records with values that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError
from streamfold.archive.schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, Images, RowReading
from streamfold.snapshotter.decoding.json_values import Hint, decode_exact, is_empty, typed_array
from streamfold.snapshotter.decoding.type_inference import learned_fields


@dataclass(slots=True)
class ValueReader:
    """Reads rows value by value, under fields that grow with what it finds.

    `unfit` says for each row which columns do not fit, and why; these are null.
    """

    reading: RowReading
    rows: list[dict[str, Any] | None] = field(default_factory=list)
    unsent: list[tuple[int, str]] = field(default_factory=list)
    unfit: dict[int, list[str]] = field(default_factory=dict)
    #: Rows that are not JSON objects.
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, raws: Sequence[msgspec.Raw]) -> None:
        for raw in raws:
            index = len(self.rows)
            try:
                self.rows.append(None if raw == ABSENT else self._object(index, raw))
            except UnreadableError as error:
                self.rows.append(None)
                self.broken[index] = str(error)

    def _object(self, index: int, raw: msgspec.Raw) -> dict[str, Any]:
        value = decode_exact(raw)
        if not isinstance(value, dict):
            raise UnreadableError(f"a row must be an object, not {type(value).__name__}")
        if self.reading.marker is not None:
            for name, item in value.items():
                if self._is_unsent(item):
                    self.unsent.append((index, name))
                    value[name] = None
        return value

    def _is_unsent(self, item: Any) -> bool:
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        elif isinstance(item, dict) and len(item) == 1:
            item = next(iter(item))
        return isinstance(item, str) and item in self.reading.markers

    def keep_only(self, names: Sequence[str]) -> None:
        """Refuse rows with other fields than these, whose meaning is unknown."""
        for index, row in enumerate(self.rows):
            if row and (
                others := [n for n, v in row.items() if n not in names and not is_empty(v)]
            ):
                self.broken[index] = (
                    f"the key has fields {others}: the key fields are {list(names)}"
                )
                self.rows[index] = None

    def columns(self, fields: Sequence[pa.Field]) -> dict[str, pa.Array]:
        """Return the rows under these fields; what does not fit goes to `unfit`."""
        self._refuse_unknown({f.name for f in fields})
        return {f.name: self._column(f) for f in fields}

    def _refuse_unknown(self, known: set[str]) -> None:
        for index, row in enumerate(self.rows):
            if row and (unknown := [n for n in row if n not in known and not is_empty(row[n])]):
                self.unfit.setdefault(index, []).append(f"fields {unknown} are not columns")

    def _column(self, column: pa.Field) -> pa.Array:
        hint, name = self.reading.hint(column), column.name
        values = [None if row is None else row.get(name) for row in self.rows]
        try:
            return typed_array(values, column.type, hint, name)
        except UnreadableError:
            return self._fitting(values, column, hint)

    def _fitting(self, values: list[Any], column: pa.Field, hint: Hint) -> pa.Array:
        for index, value in enumerate(values):
            try:
                typed_array([value], column.type, hint, column.name)
            except UnreadableError as error:
                self.unfit.setdefault(index, []).append(str(error))
                values[index] = None
        return typed_array(values, column.type, hint, column.name)

    def images(self, columns: dict[str, pa.Array], start: int, count: int) -> Images:
        """Return a run of the rows that were added."""
        present = np.fromiter(
            (r is not None for r in self.rows[start : start + count]), np.bool_, count
        )
        images = Images({n: c.slice(start, count) for n, c in columns.items()}, present)
        for index, name in self.unsent:
            if start <= index < start + count and name in columns:
                marks = images.unsent.setdefault(name, np.zeros(count, np.bool_))
                marks[index - start] = True
        return images


def learned_schema(
    schema: TableSchema | None, key_fields: Sequence[str], readers: Sequence[ValueReader]
) -> TableSchema | None:
    """Return the schema that holds all rows as far as widening can; None while it has no key.

    Raises SchemaIncompatibleError if what was learned is incompatible with `schema`.
    """
    known = list(schema.arrow) if schema else []
    rows = (row for reader in readers for row in reader.rows if row)
    fields = learned_fields(known, rows, readers[0].reading.hints)
    typed = {f.name for f in fields if not pa.types.is_null(f.type)}
    if schema is None and not typed.issuperset(key_fields):
        return None
    found = TableSchema.of(fields, key_fields)
    return schema.merged(found) if schema else found
