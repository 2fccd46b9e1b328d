"""The control stream: records which slot of which database fills the streams, and how far.

Its records note positions up to which the slot may be confirmed although no table has a change
there. A slot beyond every note and every change was confirmed by another program, so changes may be
missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from streamfold.ingest.errors import SlotLostError, SourceUnusableError
from streamfold.ingest.postgres.catalog import Column, Table, adopted_marks
from streamfold.ingest.postgres.pgoutput import Lsn, lsn_text, parse_lsn
from streamfold.ingest.postgres.slot import ReplicationSlot, System
from streamfold.ingest.table_stream import (
    CopyPosition,
    Position,
    StreamState,
    TableStream,
    change_headers,
    is_copied,
    table_of,
)
from streamfold.model.positions import U64_MAX
from streamfold.model.records import BATCH_BYTES_MAX, Record, trim_record

#: Notes between two trims. Only the last note matters.
_TRIM_AFTER = 1000
#: Bytes of JSON above which a note is compressed with zlib, and the maximum bytes of a note, which is
#: appended together with a trim.
_PLAIN_BYTES = 512 << 10
_NOTE_BYTES = BATCH_BYTES_MAX - 1024


class TableNote(msgspec.Struct, frozen=True):
    """The state of a table's stream."""

    key: tuple[str, ...]
    columns: tuple[Column, ...]
    #: See `Table.published`.
    published: str = ""
    #: In a shared stream: position of the first copy once it is complete.
    copied: str = ""
    #: See `table_marks`. Empty in notes of older versions.
    marks: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: Table, copied: str = "") -> TableNote:
        return cls(table.key, table.columns, table.published, copied, table.marks)


class Note(msgspec.Struct, frozen=True):
    """The body of a control record."""

    #: Identifies the database cluster.
    system: str
    slot: str
    publication: str
    #: The slot may be confirmed up to here. 0/0 before it exists.
    lsn: str
    #: Tables followed without a gap since their copy began.
    tables: dict[str, TableNote] = {}
    #: Timeline of the database's log. 0 in notes of older versions.
    timeline: int = 0
    #: The shared stream, if there is one.
    stream: str = ""
    #: LSN and index of its last change before the copies that follow.
    position: tuple[str, int] | None = None


def _decoded(body: bytes) -> Note:
    return msgspec.json.decode(body if body[:1] == b"{" else zlib.decompress(body), type=Note)


class Control:
    """Notes for one slot. `stream` must have been taken."""

    def __init__(
        self, stream: TableStream, system: System, slot: str, publication: str, shared: str = ""
    ) -> None:
        """`shared` is the name of the shared stream, if there is one."""
        self._stream = stream
        self._slot = slot
        self._system = system
        self._note = Note(
            system.identifier,
            slot,
            publication,
            "0/0",
            timeline=system.timeline,
            stream=shared,
        )
        self._written = 0
        last = stream.last
        #: The last note before this session, or None for new streams.
        self.previous = None if last is None else _decoded(last.body)
        #: The position of the last note.
        self.lsn = parse_lsn(self.previous.lsn) if self.previous else Lsn(0)
        self.tables = dict(self.previous.tables) if self.previous else {}
        #: See `Note.position`.
        self.position = self.previous.position if self.previous else None

    def states(self, shared: TableStream, names: Iterable[str]) -> dict[str, StreamState]:
        """Return how far each table of the shared stream is. `note` makes changes of that durable.

        If the last record is a change, its position counts for all tables. If it belongs to a first
        copy, its position counts for that table, and the notes count for the others.
        """
        tail, copied = shared.state, None
        if shared.last is not None and is_copied(shared.last):
            copied = table_of(shared.last)
        elif isinstance(tail, Position):
            self.position = (tail.lsn, tail.index)
        if copied in self.tables and isinstance(tail, Position):
            self.tables[copied] = msgspec.structs.replace(self.tables[copied], copied=tail.lsn)
        self.forget_copies(())
        states: dict[str, StreamState] = {}
        for name in names:
            noted = self.tables.get(name)
            if noted is not None and noted.copied:
                states[name] = self._position_after(noted.copied)
            else:
                states[name] = tail if name == copied and isinstance(tail, CopyPosition) else None
        return states

    def _position_after(self, copied: str) -> Position:
        """Return the position of a table's last change in the shared stream, or of a newer copy."""
        if self.position is not None and parse_lsn(self.position[0]) >= parse_lsn(copied):
            return Position(*self.position)
        return Position(copied, -1)

    def forget_copies(self, names: Iterable[str]) -> None:
        """Forget the copies of tables, so that they are copied again.

        If all tables are forgotten, earlier changes no longer count.
        """
        for name in set(names) & self.tables.keys():
            self.tables[name] = msgspec.structs.replace(self.tables[name], copied="")
        if not any(noted.copied for noted in self.tables.values()):
            self.position = None

    async def note_columns(self, *tables: Table) -> None:
        """Note durably the columns that these tables' streams declare from now on."""
        for table in tables:
            self.tables[table.full_name] = TableNote.of(table)
        await self.note(self.lsn)

    def adopt_marks(self, table: str, table_marks: Sequence[str]) -> None:
        """Adopt the marks of an unaltered table. `note` makes that durable."""
        noted = self.tables[table]
        marks = adopted_marks(noted.marks, table_marks)
        self.tables[table] = msgspec.structs.replace(noted, marks=marks)

    async def note_copied(self, table: str, lsn: str) -> None:
        """Note durably that a table's first copy is complete."""
        self.tables[table] = msgspec.structs.replace(self.tables[table], copied=lsn)
        await self.note(self.lsn)

    def drop_others(self, names: Iterable[str]) -> bool:
        """Drop the notes of other tables. Returns whether there were any. `note` makes that durable.

        A table that is followed again later is copied again.
        """
        others = self.tables.keys() - set(names)
        for name in others:
            del self.tables[name]
        return bool(others)

    async def forget_others(self, names: Iterable[str]) -> None:
        """Note durably that other tables are no longer followed."""
        if self.drop_others(names):
            await self.note(self.lsn)

    def check_key(self, table: Table) -> None:
        """Raise if the table's key changed, which readers of its stream cannot follow."""
        noted = self.tables.get(table.full_name)
        if noted is not None and noted.key != table.key:
            raise SourceUnusableError(
                f"the key of table {table.full_name} was ({', '.join(noted.key)}) and is now "
                f"({', '.join(table.key)}): a stream keeps its key, so name another --slot and --prefix"
            )

    async def note(self, lsn: Lsn) -> None:
        """Note durably that the slot may be confirmed up to here."""
        note = msgspec.structs.replace(
            self._note, lsn=lsn_text(lsn), tables=self.tables, position=self.position
        )
        records = [Record(self._encoded(note), change_headers(note.lsn, 0))]
        self._written += 1
        if self._written % _TRIM_AFTER == 1:
            records.insert(0, trim_record(self._stream.next_seq_num))
        await self._stream.append(records)
        self.lsn = lsn

    def _encoded(self, note: Note) -> bytes:
        body = msgspec.json.encode(note)
        if len(body) <= _PLAIN_BYTES:
            return body
        packed = zlib.compress(body, level=1)
        if len(packed) > _NOTE_BYTES:
            raise SourceUnusableError(
                f"the columns of {len(note.tables)} tables take {len(packed)} bytes in a note, which "
                f"may have {_NOTE_BYTES}: name fewer tables, and the others for another --slot"
            )
        return packed

    def check_database(self) -> None:
        """Raise if the streams belong to another database cluster."""
        if self.previous is not None and self.previous.system != self._note.system:
            raise SourceUnusableError(
                f"the streams hold tables of the database cluster {self.previous.system}, and this "
                f"one is {self._note.system}: name another --slot and --prefix, or connect to the "
                "other one"
            )

    def check_streams(self) -> None:
        """Raise if the slot has filled other streams, whose records would be missing here."""
        if self.previous is not None and self.previous.stream != self._note.stream:
            there, here = (
                f"the stream {stream!r} with all tables" if stream else "a stream for each table"
                for stream in (self.previous.stream, self._note.stream)
            )
            raise SourceUnusableError(
                f"replication slot {self._slot!r} fills {there}, and cannot fill {here}: name another "
                "--slot"
            )

    def check_slot(
        self,
        slot: ReplicationSlot | None,
        followed: Iterable[Position | CopyPosition],
        current: Lsn,
    ) -> ReplicationSlot:
        """Return the slot if it has everything that the streams lack.

        Raises SlotLostError otherwise.

        `followed` has the streams' positions. `current` is the end of the server's log.
        """
        if slot is None:
            raise SlotLostError(self._slot, "does not exist any more")
        if slot.lost:
            raise SlotLostError(
                self._slot, "is invalid, because PostgreSQL removed the log it needs"
            )
        positions = list(followed)
        # Only changes are ever confirmed. A copy's snapshot may be ahead of them.
        changes = [p for p in positions if isinstance(p, Position) and p.index >= 0]
        confirmable = max([self.lsn, *(parse_lsn(position.lsn) for position in changes)])
        if slot.confirmed > confirmable:
            raise SlotLostError(
                self._slot,
                f"starts at {lsn_text(slot.confirmed)}, after the streams' {lsn_text(confirmable)}",
            )
        newest = max([self.lsn, *(parse_lsn(position.lsn) for position in positions)])
        end = min(current, self._end_of_timeline())
        if newest > end:
            raise SlotLostError(
                self._slot,
                f"is on a server whose log has the source of the streams up to {lsn_text(end)} only, "
                f"before the streams' {lsn_text(newest)}, as after a failover that lost commits",
            )
        return slot

    async def note_slot(self, slot: ReplicationSlot) -> None:
        """Note durably the slot's position and timeline. Call `check_slot` first.

        A restarted copy hides the change up to which the slot was confirmed.
        """
        moved = self.previous is not None and self.previous.timeline != self._system.timeline
        if moved or slot.confirmed > self.lsn:
            await self.note(max(slot.confirmed, self.lsn))

    def _end_of_timeline(self) -> Lsn:
        """Return where the server's log diverges from the one that filled the streams."""
        noted = self.previous.timeline if self.previous is not None else 0
        if noted in (0, self._system.timeline):
            return Lsn(U64_MAX)
        return self._system.ends.get(noted, Lsn(0))
