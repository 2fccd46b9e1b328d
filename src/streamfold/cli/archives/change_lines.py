"""Changes and rows as lines of JSON, in the notation of the archive's own JSON Lines.

Applying the lines in order yields the table: rows that replace it come as a TRUNCATE followed by
INSERTs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from streamfold.cli.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from streamfold.archive import Changes, Rows, TableSchema

TRUNCATE = b'{"action":"TRUNCATE"}'


class ChangePrinter:
    """Prints the rows and changes of an archive's table."""

    def __init__(self, output: Output, keys: Sequence[str]) -> None:
        self._output = output
        self._keys = tuple(keys)

    def changes(self, item: Changes) -> None:
        """Print the changes of a diff."""
        self._print(_change_lines(item.batch, self._keys), item.from_position, item.to_position)

    def rows(self, item: Rows) -> None:
        """Print rows that replace the table, or more of them."""
        if item.first:
            self._print([TRUNCATE], None, item.position)
        self._print(_row_lines(item.batch), None, item.position)

    def _print(self, lines: Sequence[bytes], start: str | None, end: str) -> None:
        if not self._output.as_json:
            self._output.write(*(line + b"\n" for line in lines))
            return
        positions = {"from_position": start, "to_position": end}
        self._output.show_objects({**positions, "change": msgspec.Raw(line)} for line in lines)


def _change_lines(batch: pa.RecordBatch, keys: Sequence[str]) -> list[bytes]:
    from streamfold.archive.formats import JsonlFormat

    schema = _schema_of(batch, keys)
    if schema is None:
        return [msgspec.json.encode(dict(_present(change))) for change in batch.to_pylist()]
    sink = io.BytesIO()
    JsonlFormat().write_changes(sink, schema, [batch])
    return sink.getvalue().splitlines()


def _row_lines(batch: pa.RecordBatch) -> list[bytes]:
    from streamfold.archive.formats import JsonlFormat
    from streamfold.archive.schema import TableSchema

    sink = io.BytesIO()
    JsonlFormat().write_rows(sink, TableSchema.of(batch.schema), [batch])
    return [b'{"action":"INSERT","new":' + line + b"}" for line in sink.getvalue().splitlines()]


def _schema_of(batch: pa.RecordBatch, keys: Sequence[str]) -> TableSchema | None:
    """Return the table's schema; None if a key has a type that schemas lack."""
    from streamfold.archive.schema import TableSchema, is_key_type

    fields = {field.name: field for field in batch.schema.field("after").type}
    if not all(name in fields and is_key_type(fields[name].type) for name in keys):
        return None
    return TableSchema.of(fields.values(), keys)


def _present(change: dict[str, object]) -> Iterator[tuple[str, object]]:
    names = {"action": "action", "key": "key", "before": "old", "after": "new"}
    for name, published in names.items():
        if change[name] is not None:
            yield published, change[name]
