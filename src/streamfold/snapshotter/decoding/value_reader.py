"""Rows in JSON read value by value: slower than by Arrow's reader, and it learns.

New columns and wider types come from here, and so does which record holds a value that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from streamfold.archive.formats.jsonl.json_values import UnreadableError
from streamfold.archive.schema.table_schema import TableSchema
from streamfold.snapshotter.decoding.arrow_rows import ABSENT, Images, RowReading
from streamfold.snapshotter.decoding.json_values import Hint, decode_exact, is_empty, typed_array
from streamfold.snapshotter.decoding.type_inference import learned_fields


@dataclass(slots=True)
class ValueReader:
    """Reads rows value by value, under fields that grow with what it finds.

    `unfit` tells for each row that does not fit which columns do not, and why; these are null.
    """

    reading: RowReading
    rows: list[dict[str, Any] | None] = field(default_factory=list)
    unsent: list[tuple[int, str]] = field(default_factory=list)
    unfit: dict[int, list[str]] = field(default_factory=dict)
    #: Rows that are no JSON objects at all.
    broken: dict[int, str] = field(default_factory=dict)

    def add(self, raws: Sequence[msgspec.Raw]) -> None:
        for raw in raws:
            place = len(self.rows)
            try:
                self.rows.append(None if raw == ABSENT else self._object(place, raw))
            except UnreadableError as error:
                self.rows.append(None)
                self.broken[place] = str(error)

    def _object(self, place: int, raw: msgspec.Raw) -> dict[str, Any]:
        value = decode_exact(raw)
        if not isinstance(value, dict):
            raise UnreadableError(f"a row is an object, this is {type(value).__name__}")
        if self.reading.marker is not None:
            for name, item in value.items():
                if self._is_unsent(item):
                    self.unsent.append((place, name))
                    value[name] = None
        return value

    def _is_unsent(self, item: Any) -> bool:
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        elif isinstance(item, dict) and len(item) == 1:
            item = next(iter(item))
        return isinstance(item, str) and item in self.reading.markers

    def keep_only(self, names: Sequence[str]) -> None:
        """Refuse rows with other fields than these: what they mean is not known."""
        for place, row in enumerate(self.rows):
            if row and (
                others := [n for n, v in row.items() if n not in names and not is_empty(v)]
            ):
                self.broken[place] = (
                    f"the key has fields {others}: the key fields are {list(names)}"
                )
                self.rows[place] = None

    def columns(self, fields: Sequence[pa.Field]) -> dict[str, pa.Array]:
        """The rows under these fields; what does not fit goes to `unfit`."""
        self._refuse_unknown({f.name for f in fields})
        return {f.name: self._column(f) for f in fields}

    def _refuse_unknown(self, known: set[str]) -> None:
        for place, row in enumerate(self.rows):
            if row and (unknown := [n for n in row if n not in known and not is_empty(row[n])]):
                self.unfit.setdefault(place, []).append(f"fields {unknown} are no columns")

    def _column(self, column: pa.Field) -> pa.Array:
        hint, name = self.reading.hint(column), column.name
        values = [None if row is None else row.get(name) for row in self.rows]
        try:
            return typed_array(values, column.type, hint, name)
        except UnreadableError:
            return self._fitting(values, column, hint)

    def _fitting(self, values: list[Any], column: pa.Field, hint: Hint) -> pa.Array:
        for place, value in enumerate(values):
            try:
                typed_array([value], column.type, hint, column.name)
            except UnreadableError as error:
                self.unfit.setdefault(place, []).append(str(error))
                values[place] = None
        return typed_array(values, column.type, hint, column.name)

    def images(self, columns: dict[str, pa.Array], start: int, count: int) -> Images:
        """A run of the rows that were added."""
        present = np.fromiter(
            (r is not None for r in self.rows[start : start + count]), np.bool_, count
        )
        images = Images({n: c.slice(start, count) for n, c in columns.items()}, present)
        for place, name in self.unsent:
            if start <= place < start + count and name in columns:
                marks = images.unsent.setdefault(name, np.zeros(count, np.bool_))
                marks[place - start] = True
        return images


def learned_schema(
    schema: TableSchema | None, key_fields: Sequence[str], readers: Sequence[ValueReader]
) -> TableSchema | None:
    """The schema that holds all rows as far as widening can; None while it has no key.

    Raises SchemaIncompatibleError when what was learned does not go with `schema`.
    """
    known = list(schema.arrow) if schema else []
    rows = (row for reader in readers for row in reader.rows if row)
    fields = learned_fields(known, rows, readers[0].reading.hints)
    typed = {f.name for f in fields if not pa.types.is_null(f.type)}
    if schema is None and not typed.issuperset(key_fields):
        return None
    found = TableSchema.of(fields, key_fields)
    return schema.merged(found) if schema else found
