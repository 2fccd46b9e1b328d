"""Turns pgoutput events into stream records exactly once, without I/O.

Every change has a position: the LSN of its commit, and its number among the commit's changes of its
table, or among all changes of the commit that the slot sends if several tables share the stream. A
repeated transaction has the same positions, so changes that a stream already has are skipped. The last
change of a transaction in each stream is marked as the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from streamfold.errors import MalformedError
from streamfold.ingest.errors import RowTooLargeError
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
    Value,
    lsn_text,
)
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.table_stream import change_headers
from streamfold.model.records import Record

RowEvent: TypeAlias = Insert | Update | Delete | Truncate
#: Table, columns, key.
LookUp: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], Sequence[Value] | None]


class TableRecord(NamedTuple):
    """A record for the stream of a table."""

    table: str
    record: Record


@dataclass(frozen=True, slots=True)
class HeldChange:
    """A change held back until it is known whether it is the last of its transaction."""

    table: FollowedTable
    encoder: RowEncoder
    body: bytes
    row: Row
    index: int
    #: The body without the old row, which no reader needs. None if it has none.
    brief: bytes | None = None


@dataclass(slots=True, eq=False)
class StreamTransaction:
    """One stream's part of the open transaction."""

    #: Number of the next change.
    index: int = 0
    waiting: HeldChange | None = None


@dataclass(slots=True, eq=False)
class FollowedTable:
    """A table, and the position that its stream has reached."""

    name: str
    key: tuple[str, ...]
    stream: StreamTransaction
    #: LSN and index of the stream's last change.
    position: tuple[int, int]
    relation: Relation | None = None
    #: None until a change that the stream lacks needs it.
    encoder: RowEncoder | None = None


@dataclass(slots=True)
class ChangeRecords:
    """Converts events to records, both in order.

    `base_type` returns the base type of a domain, and any other type unchanged. `look_up` returns the
    current values of columns in the row with a key, as PostgreSQL's text, or None if there is no such
    row. It supplies large values that PostgreSQL omits when an update changes the key, and that readers
    know only under the old key. Newer values do no harm, because the change that wrote them follows.
    """

    base_type: Callable[[int], int]
    look_up: LookUp
    #: Called before the first change with these columns. Returns their declaration if they are new.
    #: Raises if the stream cannot accept them.
    on_columns: Callable[[str, Relation], bytes | None]
    #: Whether all tables share one stream.
    one_stream: bool = False
    #: All followed tables by name, and those with a known OID by OID.
    tables: dict[str, FollowedTable] = field(default_factory=dict)
    numbered: dict[int, FollowedTable] = field(default_factory=dict)
    #: By PostgreSQL's relation id; None for a table that is not followed.
    relations: dict[int, FollowedTable | None] = field(default_factory=dict)
    #: Incremented whenever `tables`, `relations` or an encoder changes.
    described: int = 0
    #: The shared stream, if there is one. Also counts changes of tables that are not followed.
    shared: StreamTransaction = field(default_factory=StreamTransaction)
    #: Streams with changes in the open transaction.
    touched: list[StreamTransaction] = field(default_factory=list)
    begin: Begin | None = None
    #: LSN of the last completed transaction.
    committed: Lsn = LSN_ZERO
    #: Its commit time in microseconds since 1970.
    committed_at: int = 0

    def follow(
        self, table: str, key: Iterable[str], lsn: int, index: int, oid: int | None = None
    ) -> None:
        """Follow a table from this position of its stream. With its `oid`, survives renames."""
        stream = self.shared if self.one_stream else StreamTransaction()
        followed = self.tables[table] = FollowedTable(table, tuple(key), stream, (lsn, index))
        if oid is not None:
            self.numbered[oid] = followed
        self.described += 1

    @property
    def in_transaction(self) -> bool:
        return self.begin is not None

    def may_query(self, event: Event) -> bool:
        """Return whether `feed` may query the database through `look_up` or `on_columns`."""
        match event:
            case Insert() | Update() | Delete():
                relations = [event.relation]
            case Truncate():
                relations = list(event.relations)
            case _:
                return False
        tables = (self.relations.get(relation) for relation in relations)
        if any(table is not None and table.encoder is None for table in tables):
            return True
        return isinstance(event, Update) and event.key is not None and UNCHANGED in event.new

    def feed(self, event: Event) -> Iterator[TableRecord]:
        """Yield the records completed by this event."""
        match event:
            case Begin():
                self.begin = event
            case Commit():
                yield from self._commit(event)
            case Relation():
                self._relation(event)
            case Insert() | Update() | Delete():
                yield from self._row(event.relation, event)
            case Truncate():
                for relation in event.relations:
                    yield from self._row(relation, event)

    def _relation(self, event: Relation) -> None:
        table = self.numbered.get(event.id)
        if table is None:
            named = self.tables.get(f"{event.schema}.{event.name}")
            table = named if named not in self.numbered.values() else None
        self.relations[event.id] = table
        if table is not None:
            table.relation, table.encoder = event, None
        self.described += 1

    def _describe(
        self, table: FollowedTable, relation: Relation
    ) -> tuple[RowEncoder, bytes | None]:
        """Return the row encoder and the declaration of new columns."""
        declaration = self.on_columns(table.name, relation)
        columns = [(c.name, self.base_type(c.type_oid)) for c in relation.columns]
        encoder = RowEncoder(table.name, columns, table.key, named=self.one_stream)
        return encoder, declaration

    def hold(
        self, table: FollowedTable, encoder: RowEncoder, event: RowEvent, index: int
    ) -> HeldChange:
        """Encode a change, except for its transaction."""
        row: Row = ()
        brief: bytes | None = None
        match event:
            case Insert():
                row = event.new
                body = b'%s,"after":%s' % (encoder.opening(b"c"), encoder.image(row))
            case Update():
                body, brief, row = self._update(encoder, event)
            case Delete():
                row = event.old or event.key or ()
                body = b'%s,"key":%s' % (encoder.opening(b"d"), encoder.key_image(row))
            case Truncate():
                body = encoder.opening(b"t")
        return HeldChange(table, encoder, body, row, index, brief)

    def _update(self, encoder: RowEncoder, event: Update) -> tuple[bytes, bytes | None, Row]:
        """Return the body, the body without the old row, and the row."""
        row, old = event.new, event.old
        if old is not None:
            encoder.check_length(row)
            encoder.check_length(old)
            pairs = zip(row, old, strict=True)
            row = tuple(was if isinstance(value, Unchanged) else value for value, was in pairs)
        if event.key is not None and UNCHANGED in row:
            row = self._filled(encoder, event.key, row)
        key = encoder.key_image(event.key or old or row)
        body = b'%s,"key":%s,"after":%s' % (encoder.opening(b"u"), key, encoder.image(row))
        unchanged = encoder.unchanged(row)
        end = b',"unchanged":%s' % msgspec.json.encode(unchanged) if unchanged else b""
        if old is None:
            return body + end, None, row
        return b'%s,"before":%s%s' % (body, encoder.image(old), end), body + end, row

    def _filled(self, encoder: RowEncoder, key: Row, row: Row) -> Row:
        """Return the row with values that PostgreSQL did not send and readers do not have.

        PostgreSQL also sends the old key if a large value in it did not change.
        """
        row = encoder.with_key(row, key)
        missing = encoder.unchanged(row)
        if not missing or not encoder.key_differs(key, row):
            return row
        stored = self.look_up(encoder.table, missing, encoder.key_texts(row))
        values: Iterator[Value] = iter(stored or [None] * len(missing))
        return tuple(next(values) if isinstance(v, Unchanged) else v for v in row)

    def _row(self, relation: int, event: RowEvent) -> Iterator[TableRecord]:
        if relation not in self.relations or self.begin is None:
            raise MalformedError(f"a change of table {relation} came before its description")
        table = self.relations[relation]
        stream = self.shared if table is None else table.stream
        index = stream.index
        if index == 0:
            self.touched.append(stream)
        stream.index += 1  # other tables count too, because the set of followed tables may change
        if table is None or table.relation is None:
            return
        if (self.begin.commit_lsn, index) <= table.position:
            return
        if stream.waiting is not None:
            yield self._record(self.begin, stream.waiting, last=False)
            stream.waiting = None
        if table.encoder is None:
            table.encoder, declaration = self._describe(table, table.relation)
            self.described += 1
            if declaration is not None:
                headers = change_headers(lsn_text(self.begin.commit_lsn), index - 1)
                yield TableRecord(table.name, Record(declaration, headers))
        stream.waiting = self.hold(table, table.encoder, event, index)

    def _commit(self, event: Commit) -> Iterator[TableRecord]:
        for stream in self.touched:
            if stream.waiting is not None and self.begin is not None:
                yield self._record(self.begin, stream.waiting, last=True)
            stream.waiting, stream.index = None, 0
        self.touched.clear()
        self.end(event)

    def end(self, event: Commit) -> None:
        """Record that the open transaction ended and its records were yielded."""
        self.begin = None
        self.committed, self.committed_at = event.commit_lsn, event.commit_time

    @staticmethod
    def _record(begin: Begin, change: HeldChange, *, last: bool) -> TableRecord:
        lsn = lsn_text(begin.commit_lsn)
        end = b',"last":true' if last else b""
        txn = b',"txn":{"id":"%s"%s}}' % (lsn.encode(), end)
        change.table.position = (begin.commit_lsn, change.index)
        headers = change_headers(lsn, change.index)
        make, row = change.encoder.record, change.row
        try:
            made = make(change.body + txn, row, headers, begin.milliseconds)
        except RowTooLargeError:
            if change.brief is None:
                raise
            made = make(change.brief + txn, row, headers, begin.milliseconds)
        return TableRecord(change.table.name, made)
