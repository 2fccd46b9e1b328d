"""Turns the events of pgoutput into records of streams, each once; without I/O.

Every change has a position: the LSN of its commit, and its number among the changes of its table in
that commit; in a stream of several tables, among all changes of the commit that the slot sends. Both
are the same whenever the source sends the transaction again, so what a stream already has is left out.
The last change of a transaction in each stream says that it is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from streamfold.errors import MalformedError
from streamfold.ingest.postgres.pgoutput import (
    LSN_ZERO,
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    Lsn,
    Relation,
    Row,
    Truncate,
    Unchanged,
    Update,
    lsn_text,
)
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.table_stream import change_headers
from streamfold.model.records import Record

#: Table, columns, key.
LookUp: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], Sequence[bytes | None] | None]


class TableRecord(NamedTuple):
    """A record for the stream of a table."""

    table: str
    record: Record


@dataclass(frozen=True, slots=True)
class _Held:
    """A change that waits until it is known whether it is the last of its transaction."""

    table: _Table
    encoder: RowEncoder
    body: bytes
    row: Row
    index: int


@dataclass(slots=True)
class _Stream:
    """What the open transaction has for one stream."""

    #: Of the next change.
    index: int = 0
    held: _Held | None = None


@dataclass(slots=True)
class _Table:
    name: str
    key: tuple[str, ...]
    stream: _Stream
    #: LSN and index of the last change in the stream.
    position: tuple[int, int]
    relation: Relation | None = None
    #: None until a change that the stream lacks needs it.
    encoder: RowEncoder | None = None


@dataclass(slots=True)
class ChangeRecords:
    """Feeds on events, in order, and yields records, in order.

    `base_type` returns the type that a domain is based on, and any other type itself. `look_up`
    returns the present values of columns, in PostgreSQL's text, of the row with a key; None if it has
    none. It is needed for large values that PostgreSQL does not send with an update of the key: readers
    know them only under the old key. Values that are newer than the update do no harm, because the
    change that made them follows.
    """

    base_type: Callable[[int], int]
    look_up: LookUp
    #: Called when the first change with these columns is due: returns a declaration of columns for the
    #: stream, if they are new; raises if the stream cannot take them.
    on_columns: Callable[[str, Relation], bytes | None]
    #: Whether all tables have one stream.
    one_stream: bool = False
    _tables: dict[str, _Table] = field(default_factory=dict)
    _relations: dict[int, _Table | None] = field(default_factory=dict)
    #: The stream of all tables, if there is one.
    _shared: _Stream = field(default_factory=_Stream)
    #: Streams of tables with changes in the open transaction.
    _touched: list[_Stream] = field(default_factory=list)
    _begin: Begin | None = None
    _lsn: str = ""
    #: LSN of the last transaction whose end was fed.
    committed: Lsn = LSN_ZERO
    #: Microseconds since 1970: when that transaction was committed.
    committed_at: int = 0

    def follow(self, table: str, key: Iterable[str], lsn: int, index: int) -> None:
        """Follow a table, whose stream has everything up to this position."""
        stream = self._shared if self.one_stream else _Stream()
        self._tables[table] = _Table(table, tuple(key), stream, (lsn, index))

    @property
    def in_transaction(self) -> bool:
        return self._begin is not None

    def may_query(self, event: Event) -> bool:
        """Return whether `feed` may call `look_up` or `on_columns`, which ask the database."""
        match event:
            case Insert() | Update() | Delete():
                relations = [event.relation]
            case Truncate():
                relations = list(event.relations)
            case _:
                return False
        tables = (self._relations.get(relation) for relation in relations)
        if any(table is not None and table.encoder is None for table in tables):
            return True
        return isinstance(event, Update) and event.key is not None and UNCHANGED in event.new

    def feed(self, event: Event) -> Iterator[TableRecord]:
        """Yield the records that this event completes."""
        match event:
            case Begin():
                self._begin, self._lsn = event, lsn_text(event.commit_lsn)
            case Commit():
                yield from self._commit(event)
            case Relation():
                self._relation(event)
            case Insert():
                yield from self._row(event.relation, event.new, _insert)
            case Update():
                yield from self._update(event)
            case Delete():
                old = event.old or event.key or ()
                yield from self._row(event.relation, old, _delete)
            case Truncate():
                for relation in event.relations:
                    yield from self._row(relation, (), _truncate)

    def _relation(self, event: Relation) -> None:
        table = self._tables.get(f"{event.schema}.{event.name}")
        self._relations[event.id] = table
        if table is not None:
            table.relation, table.encoder = event, None

    def _describe(self, table: _Table, relation: Relation) -> tuple[RowEncoder, bytes | None]:
        """Return how to encode rows, and the declaration of new columns."""
        declaration = self.on_columns(table.name, relation)
        columns = [(c.name, self.base_type(c.type_oid)) for c in relation.columns]
        encoder = RowEncoder(table.name, columns, table.key, named=self.one_stream)
        return encoder, declaration

    def _update(self, event: Update) -> Iterator[TableRecord]:
        new, old = event.new, event.old
        if old is not None:
            pairs = zip(new, old, strict=True)
            new = tuple(was if isinstance(value, Unchanged) else value for value, was in pairs)

        def body(encoder: RowEncoder, row: Row) -> bytes:
            if event.key is not None and UNCHANGED in row:
                row = self._filled(encoder, row)
            key = encoder.key_image(event.key or old or row)
            parts = b'%s,"key":%s,"after":%s' % (encoder.opening(b"u"), key, encoder.image(row))
            if old is not None:
                parts += b',"before":%s' % encoder.image(old)
            unchanged = encoder.unchanged(row)
            if unchanged:
                parts += b',"unchanged":%s' % msgspec.json.encode(unchanged)
            return parts

        yield from self._row(event.relation, new, body)

    def _filled(self, encoder: RowEncoder, row: Row) -> Row:
        """Return the row with the values that PostgreSQL did not send."""
        missing = encoder.unchanged(row)
        found = self.look_up(encoder.table, missing, encoder.key_texts(row))
        values = iter(found or [None] * len(missing))
        return tuple(next(values) if isinstance(v, Unchanged) else v for v in row)

    def _row(
        self, relation: int, row: Row, body: Callable[[RowEncoder, Row], bytes]
    ) -> Iterator[TableRecord]:
        if relation not in self._relations or self._begin is None:
            raise MalformedError(f"a change of table {relation} came before its description")
        table = self._relations[relation]
        stream = self._shared if table is None else table.stream
        index = stream.index
        if index == 0:
            self._touched.append(stream)
        stream.index += 1  # also for other tables: which ones are followed may change
        if table is None or table.relation is None:
            return
        if (self._begin.commit_lsn, index) <= table.position:
            return
        if stream.held is not None:
            yield self._record(stream.held, last=False)
            stream.held = None
        if table.encoder is None:
            table.encoder, declaration = self._describe(table, table.relation)
            if declaration is not None:
                headers = change_headers(self._lsn, index - 1)
                yield TableRecord(table.name, Record(declaration, headers))
        stream.held = _Held(table, table.encoder, body(table.encoder, row), row, index)

    def _commit(self, event: Commit) -> Iterator[TableRecord]:
        for stream in self._touched:
            if stream.held is not None:
                yield self._record(stream.held, last=True)
            stream.held, stream.index = None, 0
        self._touched.clear()
        self._begin = None
        self.committed, self.committed_at = event.commit_lsn, event.commit_time

    def _record(self, held: _Held, *, last: bool) -> TableRecord:
        assert self._begin is not None  # noqa: S101 - callers check it
        lsn = self._lsn.encode()
        end = b',"last":true' if last else b""
        body = b'%s,"txn":{"id":"%s"%s}}' % (held.body, lsn, end)
        headers = change_headers(self._lsn, held.index)
        held.table.position = (self._begin.commit_lsn, held.index)
        made = held.encoder.record(body, held.row, headers, self._begin.commit_time // 1000)
        return TableRecord(held.table.name, made)


def _insert(encoder: RowEncoder, row: Row) -> bytes:
    return b'%s,"after":%s' % (encoder.opening(b"c"), encoder.image(row))


def _delete(encoder: RowEncoder, row: Row) -> bytes:
    return b'%s,"key":%s' % (encoder.opening(b"d"), encoder.key_image(row))


def _truncate(encoder: RowEncoder, row: Row) -> bytes:
    return encoder.opening(b"t")
