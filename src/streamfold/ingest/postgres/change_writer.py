"""Encodes pgoutput messages as appends with the same records as `ChangeRecords` yields.

Native code writes them without creating an object per message. `ChangeRecords` keeps the state between
calls, so either can process the next message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from streamfold._native import ChangeEncoder, Run
from streamfold.follow.clients.client import EncodedBatch
from streamfold.ingest.postgres.changes import (
    ChangeRecords,
    FollowedTable,
    HeldChange,
    StreamTransaction,
    TableRecord,
)
from streamfold.ingest.postgres.control import TableNote
from streamfold.ingest.postgres.pgoutput import (
    LSN_ZERO,
    Begin,
    Commit,
    Delete,
    Insert,
    Lsn,
    Update,
    decode_message,
)
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.postgres.values import kind_of
from streamfold.ingest.table_stream import TableStream, change_headers
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, metered_size

if TYPE_CHECKING:
    from streamfold._native import LeftStream


@dataclass(slots=True)
class WriteResult:
    """The result of writing some messages of a run."""

    #: Index of the next message, if any, which `ChangeRecords` must process.
    next: int
    #: Batches, each with its table's name. Those of one stream are in order.
    batches: list[tuple[str, EncodedBatch]] = field(default_factory=list)
    #: Records by table.
    changes: dict[str, int] = field(default_factory=dict)
    #: The last commit that contains a record.
    commit: Commit | None = None
    #: LSN of the last transaction that began before the first record.
    quiet: Lsn = LSN_ZERO


class TableLayout(NamedTuple):
    """A table as passed to native code."""

    stream: int
    #: LSN and index of the last change in its stream.
    position: tuple[int, int]
    #: The first bytes of insert, update and delete bodies.
    openings: list[bytes]
    #: The JSON before each column's value, and the column's kind.
    columns: list[tuple[bytes, int]]
    key: list[int]


class _NativeTables(NamedTuple):
    """Tables and streams, indexed by native code's numbers."""

    tables: list[FollowedTable]
    streams: list[StreamTransaction]
    encoder: ChangeEncoder
    #: One table name of each stream.
    names: dict[int, str]


class ChangeWriter:
    """Writes records for the tables of `changes`, and updates its state."""

    def __init__(self, changes: ChangeRecords) -> None:
        self._changes = changes
        self._described = -1
        self._native = _native_tables(changes)

    def write(self, run: Run, at: int) -> WriteResult:
        """Write records for messages from `at` on, up to one that `ChangeRecords` must take.

        Raises like `ChangeRecords` if a held change cannot be encoded.
        """
        if self._described != self._changes.described:
            self._native = _native_tables(self._changes)
            self._described = self._changes.described
        native, begin = self._native, self._changes.begin
        commit = None if begin is None else (begin.commit_lsn, begin.milliseconds)
        encoded = native.encoder.encode(
            run, at, commit, self._open(), (BATCH_RECORDS_MAX, BATCH_BYTES_MAX)
        )
        self._keep(run, encoded.touched)
        begun, ended, recorded, quiet = encoded.marks
        if ended is not None:
            self._changes.end(_commit(run[ended]))
        if begun is not None:
            self._changes.begin = _begin(run[begun])
        counts = zip(native.tables, encoded.counts, strict=False)
        return WriteResult(
            encoded.next,
            [
                (native.names[stream], EncodedBatch(count, metered, records))
                for stream, count, metered, records in encoded.batches
            ],
            {table.name: count for table, count in counts if count},
            None if recorded is None else _commit(run[recorded]),
            LSN_ZERO if quiet is None else _begin(run[quiet]).commit_lsn,
        )

    def _open(self) -> list[tuple[int, int, tuple[bytes, int, int] | None]]:
        """Return each stream's part of the open transaction."""
        native = self._native
        states: list[tuple[int, int, tuple[bytes, int, int] | None]] = []
        for stream in self._changes.touched:
            waiting = stream.waiting
            change = None
            if waiting is not None:
                change = waiting.body, native.tables.index(waiting.table), waiting.index
            states.append((native.streams.index(stream), stream.index, change))
        return states

    def _keep(self, run: Run, touched: Sequence[LeftStream]) -> None:
        """Pass each stream's part of the open transaction back to `ChangeRecords`."""
        changes, native = self._changes, self._native
        left = [native.streams[number] for number, *_ in touched]
        for stream in changes.touched:
            if stream not in left:
                stream.index, stream.waiting = 0, None
        changes.touched = left
        for stream, (_, index, holds, change) in zip(left, touched, strict=True):
            stream.index = index
            if not holds:
                stream.waiting = None
            elif change is not None:
                message, table, at = change
                stream.waiting = self._hold(native.tables[table], run[message], at)

    def _hold(self, table: FollowedTable, message: bytes, index: int) -> HeldChange:
        event = decode_message(message)
        assert isinstance(event, Insert | Update | Delete)  # noqa: S101 - native code holds no other
        assert table.encoder is not None  # noqa: S101 - only described tables are known there
        return self._changes.hold(table, table.encoder, event, index)


def _begin(message: bytes) -> Begin:
    event = decode_message(message)
    assert isinstance(event, Begin)  # noqa: S101 - native code looked
    return event


def _commit(message: bytes) -> Commit:
    event = decode_message(message)
    assert isinstance(event, Commit)  # noqa: S101 - native code looked
    return event


def _native_tables(changes: ChangeRecords) -> _NativeTables:
    # Includes renamed tables, which have no relation but may have a held change. Tables without an
    # encoder come last, because native code does not see them.
    tables = sorted(changes.tables.values(), key=lambda table: table.encoder is None)
    streams = list(dict.fromkeys([changes.shared, *(table.stream for table in tables)]))
    relations: list[tuple[int, int | None]] = []
    for relation, table in changes.relations.items():
        if table is None:
            relations.append((relation, None))
        elif table.encoder is not None:
            relations.append((relation, tables.index(table)))
    described = [
        TableLayout(
            streams.index(table.stream),
            table.position,
            _openings(encoder),
            [(name, kind_of(type_oid)) for name, type_oid in encoder.columns],
            encoder.key,
        )
        for table in tables
        if (encoder := table.encoder) is not None
    ]
    names = {streams.index(table.stream): table.name for table in tables}
    lsn, index = change_headers("", 0)
    native = ChangeEncoder(relations, described, len(streams), (lsn.name, index.name))
    return _NativeTables(tables, streams, native, names)


def _openings(encoder: RowEncoder) -> list[bytes]:
    kinds = ((b"c", b"after"), (b"u", b"key"), (b"d", b"key"))
    return [b'%s,"%s":{' % (encoder.opening(op), image) for op, image in kinds]


@dataclass(slots=True)
class ChangeBatch:
    """Records for several streams, and the position to confirm once they are appended."""

    #: By stream.
    encoded: defaultdict[str, list[EncodedBatch]] = field(default_factory=lambda: defaultdict(list))
    #: Records by table.
    changes: Counter[str] = field(default_factory=Counter)
    size: int = 0
    #: LSN and time of the last commit with a record in the batch.
    lsn: Lsn = LSN_ZERO
    committed_at: int = 0
    #: Columns declared by records in the batch, by table.
    declared: dict[str, TableNote] = field(default_factory=dict)
    #: When this and earlier batches last contained everything the server had sent, in Unix seconds.
    drained_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.encoded)


class ChangeBatches:
    """Gathers the records that `changes` yields. `streams` has the streams by table."""

    def __init__(self, changes: ChangeRecords, streams: Mapping[str, TableStream]) -> None:
        self._changes = changes
        self._names = {table: stream.name for table, stream in streams.items()}
        self._writer = ChangeWriter(changes)
        self.batch = ChangeBatch()

    def take(self) -> ChangeBatch:
        """Return the batch and start another."""
        batch, self.batch = self.batch, ChangeBatch()
        return batch

    def write(self, run: Run, at: int) -> WriteResult:
        """Add messages from `at` on, up to one that must go through `changes` and `add`."""
        written = self._writer.write(run, at)
        for table, made in written.batches:
            self.batch.encoded[self._names[table]].append(made)
            self.batch.size += made.metered
        self.batch.changes.update(written.changes)
        if written.commit is not None:
            self.batch.lsn = written.commit.commit_lsn
            self.batch.committed_at = written.commit.commit_time
        return written

    def add(self, records: Sequence[TableRecord]) -> None:
        """Add the records that `changes` yielded for one message."""
        for table, record in records:
            self.batch.encoded[self._names[table]].append(EncodedBatch.of([record]))
            self.batch.changes[table] += 1
            self.batch.size += metered_size(record)
        # A commit without records is in no stream. A note covers it.
        if records and not self._changes.in_transaction:
            self.batch.lsn = self._changes.committed
            self.batch.committed_at = self._changes.committed_at


def joined(batches: Sequence[EncodedBatch]) -> list[EncodedBatch]:
    """Return the same records in fewer batches that each fit into one append."""
    groups: list[list[EncodedBatch]] = [[]]
    count = metered = 0
    for batch in batches:
        count, metered = count + batch.record_count, metered + batch.metered
        if count > BATCH_RECORDS_MAX or metered > BATCH_BYTES_MAX:
            groups.append([])
            count, metered = batch.record_count, batch.metered
        groups[-1].append(batch)
    return [
        EncodedBatch(
            sum(batch.record_count for batch in parts),
            sum(batch.metered for batch in parts),
            b"".join(batch.records for batch in parts),
        )
        for parts in groups
        if parts
    ]
