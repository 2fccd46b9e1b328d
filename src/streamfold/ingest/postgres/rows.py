"""Encodes rows of one table in Streamfold's envelope, which the snapshotter reads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamfold.ingest.errors import RowTooLargeError, SourceUnusableError
from streamfold.ingest.postgres.pgoutput import Row, Unchanged
from streamfold.ingest.postgres.values import ToJson, to_json
from streamfold.model.records import BATCH_BYTES_MAX, Header, Record, metered_size


def opening(op: bytes, table: str | None) -> bytes:
    """Return the first bytes of a body. `table` is None in a stream with only one table."""
    name = b"" if table is None else b',"table":%s' % msgspec.json.encode(table)
    return b'{"op":"%s"%s' % (op, name)


class RowEncoder:
    """Encodes rows of `columns`, which are names and types. `key` names the key columns.

    `copying`: rows come from the table rather than from the log. `named`: records name their table,
    because the stream has several.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[tuple[str, int]],
        key: Sequence[str],
        *,
        copying: bool = False,
        named: bool = False,
    ) -> None:
        self.table = table
        self._name = table if named else None
        self._copying = copying
        self._columns: list[tuple[bytes, ToJson]] = [
            (msgspec.json.encode(name) + b":", to_json(type_oid)) for name, type_oid in columns
        ]
        #: The JSON before each column's value, and the column's type.
        self.columns = [
            (before, type_oid)
            for (before, _), (_, type_oid) in zip(self._columns, columns, strict=True)
        ]
        self._names = [name for name, _ in columns]
        #: Indices of the key columns.
        self.key = [self._names.index(name) for name in key]

    def opening(self, op: bytes) -> bytes:
        """Return the first bytes of a change's body."""
        return opening(op, self._name)

    def key_texts(self, row: Row) -> list[str]:
        """Return the key as PostgreSQL's text. Raises like `image`."""
        self.check_length(row)
        texts = []
        for at in self.key:
            if isinstance(value := row[at], bytes):
                try:
                    texts.append(value.decode())
                except ValueError as error:
                    raise self._unusable(row, self._names[at], error) from error
        return texts

    def with_key(self, row: Row, key: Row) -> Row:
        """Return the row with key values that the update did not change.

        Raises SourceUnusableError unless both rows have a value for each column.
        """
        self.check_length(row)
        self.check_length(key)
        values = list(row)
        for at in self.key:
            if isinstance(values[at], Unchanged):
                values[at] = key[at]
        return tuple(values)

    def key_differs(self, old: Row, new: Row) -> bool:
        return any(old[at] != new[at] for at in self.key)

    def image(self, row: Row) -> bytes:
        """Return the row as a JSON object without its unchanged values.

        Raises SourceUnusableError if a value does not fit its column's type, or is not UTF-8.
        """
        self.check_length(row)
        parts = []
        for column, (name, encode), value in zip(self._names, self._columns, row, strict=True):
            if value is None:
                parts.append(name + b"null")
            elif not isinstance(value, Unchanged):
                try:
                    parts.append(name + encode(value))
                except ValueError as error:
                    raise self._unusable(row, column, error) from error
        return b"{%s}" % b",".join(parts)

    def check_length(self, row: Row) -> None:
        """Raise SourceUnusableError unless the row has a value for each column."""
        if len(row) != len(self._columns):
            raise SourceUnusableError(
                f"PostgreSQL sent a row of table {self.table} with {len(row)} values for "
                f"{len(self._columns)} columns: start again, and the table is read as it is now"
            )

    def _unusable(self, row: Row, column: str, error: ValueError) -> SourceUnusableError:
        key = ", ".join(
            value.decode(errors="backslashreplace")
            for at in self.key
            if isinstance(value := row[at], bytes)
        )
        # The change stays in the database's log even if the row is corrected.
        again = "start again" if self._copying else "run once with --recopy"
        return SourceUnusableError(
            f"the row with key ({key}) of table {self.table} has a value in column {column!r} that "
            f"cannot be written as JSON ({error}): correct the value, and {again}"
        )

    def key_image(self, row: Row) -> bytes:
        """Return the key as a JSON object. Raises like `image`."""
        self.check_length(row)
        parts = []
        for at in self.key:
            (name, encode), value = self._columns[at], row[at]
            try:
                parts.append(name + (encode(value) if isinstance(value, bytes) else b"null"))
            except ValueError as error:
                raise self._unusable(row, self._names[at], error) from error
        return b"{%s}" % b",".join(parts)

    def unchanged(self, row: Row) -> list[str]:
        """Return the columns whose values PostgreSQL did not send."""
        return [n for n, v in zip(self._names, row, strict=True) if isinstance(v, Unchanged)]

    def record(
        self, body: bytes, row: Row, headers: tuple[Header, ...], timestamp: int | None = None
    ) -> Record:
        """Make a record. Raises RowTooLargeError if it exceeds the limit."""
        record = Record(body, headers, timestamp)
        size = metered_size(record)
        if size > BATCH_BYTES_MAX:
            key, column = self.key_image(row).decode(), self._largest(row)
            raise RowTooLargeError(
                self.table, key, column, size, BATCH_BYTES_MAX, copying=self._copying
            )
        return record

    def _largest(self, row: Row) -> str:
        sizes = [len(value) if isinstance(value, bytes) else 0 for value in row]
        return self._names[sizes.index(max(sizes))]
