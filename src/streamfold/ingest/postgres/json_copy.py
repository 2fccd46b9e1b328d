"""The quick twin of the first copy's encoding: PostgreSQL writes rows as JSON, byte for byte the same.

A line of COPY is then the body of a record, a tab, and the key in PostgreSQL's own text. JSON escapes
control characters, so all that COPY's text form adds to a body is a second backslash for each one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, count, takewhile
from typing import Final

import msgspec

from streamfold.extras import needing_extra
from streamfold.follow.clients.client import EncodedBatch
from streamfold.ingest.errors import RowTooLargeError
from streamfold.ingest.postgres.catalog import Column, Table
from streamfold.ingest.postgres.copy_source import split_line
from streamfold.ingest.postgres.values import (
    BOOL,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    NUMERIC,
    OID,
    TIMESTAMP,
    TIMESTAMPTZ,
)
from streamfold.ingest.table_stream import copy_headers
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    HEADER_OVERHEAD,
    RECORD_OVERHEAD,
    Header,
)
from streamfold.records.plain import APPEND_BODY, APPEND_HEADERS, RECORDS
from streamfold.records.protobuf import varint

with needing_extra("postgres"):
    from psycopg2 import sql

#: Bytes for the header with the key, in the last record of an append.
KEY_RESERVE: Final = 8 << 10
#: Arguments of one call of a function in PostgreSQL.
_ARGUMENTS_MAX: Final = 100
TEXT, VARCHAR = 25, 1043
_NULL = "CASE WHEN {0} IS NULL THEN 'null' %s END"
_FLOAT = """WHEN {0} IN ('NaN', 'Infinity', '-Infinity') THEN concat('"', {0}, '"')
 WHEN strpos(concat({0}), '.') + strpos(concat({0}), 'e') > 0 THEN concat({0})
 ELSE concat({0}, '.0')"""
_DATE = """WHEN {0} BETWEEN '0001-01-01' AND '9999-12-31' THEN concat('"', {0}, '"')
 WHEN {0} = 'infinity' THEN '"2147483647"' WHEN {0} = '-infinity' THEN '"-2147483648"'
 ELSE concat('"', {0} - date '1970-01-01', '"')"""
_MOMENT = """WHEN {0} >= '0001-01-01' AND {0} < '10000-01-01' THEN %s
 WHEN {0} = 'infinity' THEN '"9223372036854775807"'
 WHEN {0} = '-infinity' THEN '"-9223372036854775808"'
 ELSE concat('"', (extract(epoch FROM {0}) * 1000000)::bigint, '"')"""
_LOCAL = """concat('"', replace(concat({0}), ' ', 'T'), '"')"""
_UTC = """concat('"', replace(left(concat({0}), -3), ' ', 'T'), 'Z"')"""
_BASE64 = """ELSE concat('"', translate(encode({0}, 'base64'), E'\\n', ''), '"')"""
#: By type, SQL for the JSON of a value; any column may be null, whatever the catalog said before.
#: concat writes a value as COPY does, which a cast to text does not for all types.
_FORMS: Final = {
    **dict.fromkeys((INT2, INT4, INT8, OID), "coalesce({0}::text, 'null')"),
    **dict.fromkeys((FLOAT4, FLOAT8), _NULL % _FLOAT),
    BOOL: "CASE {0} WHEN true THEN 'true' WHEN false THEN 'false' ELSE 'null' END",
    BYTEA: _NULL % _BASE64,
    DATE: _NULL % _DATE,
    TIMESTAMP: _NULL % (_MOMENT % _LOCAL),
    TIMESTAMPTZ: _NULL % (_MOMENT % _UTC),
    NUMERIC: _NULL % """ELSE concat('"', {0}, '"')""",
    **dict.fromkeys((TEXT, VARCHAR), "coalesce(to_json({0}::text)::text, 'null')"),
}
_OTHER_FORM: Final = _NULL % "ELSE to_json(concat({0}))::text"


def _value(column: Column) -> sql.Composable:
    return sql.SQL(_FORMS.get(column.type_oid, _OTHER_FORM)).format(sql.Identifier(column.name))


def body_expression(table: Table, opening: bytes) -> sql.Composable:
    """Return SQL for the body of a row's record."""
    parts: list[sql.Composable] = []
    before = opening.decode() + ',"after":{'
    for column in table.columns:
        name = msgspec.json.encode(column.name).decode()
        parts += [sql.Literal(f"{before}{name}:"), _value(column)]
        before = ","
    return _concat([*parts, sql.Literal("}}")])


def _concat(parts: Sequence[sql.Composable]) -> sql.Composable:
    while len(parts) > _ARGUMENTS_MAX:
        starts = range(0, len(parts), _ARGUMENTS_MAX)
        parts = [_concat(parts[at : at + _ARGUMENTS_MAX]) for at in starts]
    return sql.SQL("concat({})").format(sql.SQL(", ").join(parts))


class JsonLines:
    """Gathers lines into encoded appends; the last record of each says where to resume."""

    def __init__(self, table: Table, lsn: str, rows: int) -> None:
        self._table = table
        self._lsn = lsn
        self.rows = rows
        self._parts: list[bytes] = []
        self._metered = 0
        self._last = (b"", b"")
        #: By the number of digits of the row's number: the record's headers before that number.
        self._heads: dict[int, bytes] = {}
        self._fixed = RECORD_OVERHEAD + sum(
            HEADER_OVERHEAD + len(header.name) + len(header.value)
            for header in copy_headers(lsn, 0)
        ) - 1  # fmt: skip

    def add(self, lines: Sequence[bytes]) -> Iterator[EncodedBatch]:
        """Yield the batches that are full."""
        parted = [line.partition(b"\t") for line in lines]
        bodies = [body.replace(b"\\\\", b"\\") for body, _, _ in parted]
        at = 0
        while at < len(bodies):
            taken = self._add_some(bodies[at : at + BATCH_RECORDS_MAX - len(self._parts)])
            if taken:
                at += taken
                self._last = bodies[at - 1], parted[at - 1][2]
            else:
                yield self.flush()

    def _add_some(self, bodies: Sequence[bytes]) -> int:
        """Add as many rows as the batch has room for; returns how many."""
        number = self.rows + 1
        digits = len(str(number))
        overhead = self._fixed + digits
        # Those whose numbers have as many digits, so that their headers differ in the number alone.
        bodies = bodies[: 10**digits - number]
        sizes = [len(body) for body in bodies]
        room = (
            BATCH_BYTES_MAX - (KEY_RESERVE if self._parts or len(bodies) > 1 else 0) - self._metered
        )
        if sum(sizes) + overhead * len(sizes) > room:
            running = accumulate(size + overhead for size in sizes)
            fitting = sum(1 for _ in takewhile(lambda total: total <= room, running))
            if not fitting and not self._parts:
                if sizes[0] + overhead > BATCH_BYTES_MAX:
                    raise self._too_large(bodies[0], sizes[0] + overhead)
                fitting = 1
            bodies, sizes = bodies[:fitting], sizes[:fitting]
        frames = {size: self._frame(digits, size) for size in set(sizes)}
        self._parts += [
            b"%b%d%b%b" % (frames[size][0], at, frames[size][1], body)
            for at, size, body in zip(count(number), sizes, bodies, strict=False)
        ]
        self.rows += len(bodies)
        self._metered += sum(sizes) + overhead * len(sizes)
        return len(bodies)

    def _frame(self, digits: int, size: int) -> tuple[bytes, bytes]:
        """Return what is before the number of a row and what is between it and a body of this size."""
        head = self._heads.get(digits) or self._head(digits)
        between = b"\x1a" + varint(size)
        whole = len(head) + digits + len(between) + size
        return b"\x0a" + varint(whole) + head, between

    def flush(self) -> EncodedBatch:
        """Return what was gathered."""
        parts, metered = self._parts, self._metered
        self._parts, self._metered = [], 0
        if parts:
            body, line = self._last
            key = [part.decode() for part in split_line(line) if isinstance(part, bytes)]
            headers = copy_headers(self._lsn, self.rows, key)
            parts[-1] = _delimited(RECORDS, _fields(headers, body))
            name, value = headers[-1]
            metered += HEADER_OVERHEAD + len(name) + len(value)
            if metered > BATCH_BYTES_MAX:
                raise self._too_large(body, metered)
        return EncodedBatch(len(parts), metered, b"".join(parts), self.rows)

    def _head(self, digits: int) -> bytes:
        encoded = _fields(copy_headers(self._lsn, 10 ** (digits - 1)), b"")
        self._heads[digits] = head = encoded[:-digits]
        return head

    def _too_large(self, body: bytes, metered: int) -> RowTooLargeError:
        row = msgspec.json.decode(body, type=dict[str, msgspec.Raw])["after"]
        values = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        key = msgspec.json.encode({name: values[name] for name in self._table.key}).decode()
        largest = max(values, key=lambda name: len(values[name]))
        return RowTooLargeError(
            self._table.full_name, key, largest, metered, BATCH_BYTES_MAX, copying=True
        )


def _fields(headers: Sequence[Header], body: bytes) -> bytes:
    """Return the fields of an AppendRecord."""
    encoded = [
        _delimited(APPEND_HEADERS, _delimited(0x0A, name) + _delimited(0x12, value))
        for name, value in headers
    ]
    return b"".join(encoded) + (_delimited(APPEND_BODY, body) if body else b"")


def _delimited(tag: int, content: bytes) -> bytes:
    return b"%c%b%b" % (tag, varint(len(content)), content)
