"""The control stream: which slot of which database belongs to the streams, and how far it may be.

Its records note the position up to which the slot may be confirmed although no table has a change
there. A slot that is further than every note and every change was not confirmed by this ingester, so
changes may be missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from streamfold.ingest.errors import SlotLostError, SourceUnusableError
from streamfold.ingest.postgres.catalog import Column, Table, adopted_marks
from streamfold.ingest.postgres.pgoutput import Lsn, lsn_text, parse_lsn
from streamfold.ingest.postgres.slot import Slot, System
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

#: Records after which those before are trimmed: only the last one counts.
_TRIM_AFTER = 1000
#: Bytes of JSON above which a note is compressed, as zlib does it, and of a note at most: a record with
#: its headers, and one that trims, are one append.
_PLAIN_BYTES = 512 << 10
_NOTE_BYTES = BATCH_BYTES_MAX - 1024


class TableNote(msgspec.Struct, frozen=True):
    """What the stream of a table has."""

    key: tuple[str, ...]
    columns: tuple[Column, ...]
    #: See `Table.published`.
    published: str = ""
    #: In a stream of several tables: position of the first copy, once it is complete.
    copied: str = ""
    #: See `table_marks`; none in notes of older versions.
    marks: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: Table, copied: str = "") -> TableNote:
        return cls(table.key, table.columns, table.published, copied, table.marks)


class Note(msgspec.Struct, frozen=True):
    """The body of a record."""

    #: Identifies the database cluster.
    system: str
    slot: str
    publication: str
    #: The slot may be confirmed up to here; 0/0 before it exists.
    lsn: str
    #: Tables that are followed without a gap since their copy began.
    tables: dict[str, TableNote] = {}
    #: Of the database's log; 0 in notes of older versions.
    timeline: int = 0
    #: The stream of all tables, if there is one.
    stream: str = ""
    #: LSN and index of the last change in it, when copies began that follow it.
    position: tuple[str, int] | None = None


def _decoded(body: bytes) -> Note:
    return msgspec.json.decode(body if body[:1] == b"{" else zlib.decompress(body), type=Note)


class Control:
    """Notes for one slot; `stream` is taken."""

    def __init__(
        self, stream: TableStream, system: System, slot: str, publication: str, shared: str = ""
    ) -> None:
        """`shared` is the stream of all tables, if there is one."""
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
        self.found = None if last is None else _decoded(last.body)
        #: The position of the last note.
        self.lsn = parse_lsn(self.found.lsn) if self.found else Lsn(0)
        self.tables = dict(self.found.tables) if self.found else {}
        #: See `Note.position`.
        self.position = self.found.position if self.found else None

    def states(self, shared: TableStream, names: Iterable[str]) -> dict[str, StreamState]:
        """Return how far each table of the one stream is; `note` makes what that changes durable.

        The last record says it for all tables, if it is a change. After a first copy it speaks of one
        table, and the notes of the others.
        """
        tail, copied = shared.state, None
        if shared.last is not None and is_copied(shared.last):
            copied = table_of(shared.last)
        elif isinstance(tail, Position):
            self.position = (tail.lsn, tail.index)
        if copied in self.tables and isinstance(tail, Position):
            self.tables[copied] = msgspec.structs.replace(self.tables[copied], copied=tail.lsn)
        self.forget_copies(())
        found: dict[str, StreamState] = {}
        for name in names:
            noted = self.tables.get(name)
            if noted is not None and noted.copied:
                found[name] = self._position_after(noted.copied)
            else:
                found[name] = tail if name == copied and isinstance(tail, CopyPosition) else None
        return found

    def _position_after(self, copied: str) -> Position:
        """Return the last change of a table in the one stream, or its copy if that is newer."""
        if self.position is not None and parse_lsn(self.position[0]) >= parse_lsn(copied):
            return Position(*self.position)
        return Position(copied, -1)

    def forget_copies(self, names: Iterable[str]) -> None:
        """Have these tables copied again; changes before the copies do not count if all are."""
        for name in set(names) & self.tables.keys():
            self.tables[name] = msgspec.structs.replace(self.tables[name], copied="")
        if not any(noted.copied for noted in self.tables.values()):
            self.position = None

    async def note_columns(self, *tables: Table) -> None:
        """Note durably which columns the streams of these tables declare from now on."""
        for table in tables:
            self.tables[table.full_name] = TableNote.of(table)
        await self.note(self.lsn)

    def adopt_marks(self, table: str, found: Sequence[str]) -> None:
        """Take over the marks of a table that is not altered; `note` makes that durable."""
        noted = self.tables[table]
        marks = adopted_marks(noted.marks, found)
        self.tables[table] = msgspec.structs.replace(noted, marks=marks)

    async def note_copied(self, table: str, lsn: str) -> None:
        """Note durably that the first copy of a table is complete."""
        self.tables[table] = msgspec.structs.replace(self.tables[table], copied=lsn)
        await self.note(self.lsn)

    def drop_others(self, names: Iterable[str]) -> bool:
        """Drop the notes of other tables, and return whether there were any; `note` makes that durable.

        They are copied again if they come back.
        """
        others = self.tables.keys() - set(names)
        for name in others:
            del self.tables[name]
        return bool(others)

    async def forget_others(self, names: Iterable[str]) -> None:
        """Note durably that other tables are not followed."""
        if self.drop_others(names):
            await self.note(self.lsn)

    def check_key(self, table: Table) -> None:
        """Raise if the table got another key: readers of its stream could not follow."""
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
        if self.found is not None and self.found.system != self._note.system:
            raise SourceUnusableError(
                f"the streams hold tables of the database cluster {self.found.system}, and this one is "
                f"{self._note.system}: name another --slot and --prefix, or connect to the other one"
            )

    def check_streams(self) -> None:
        """Raise if the slot has filled other streams: what they have would be missing here."""
        if self.found is not None and self.found.stream != self._note.stream:
            there, here = (
                f"the stream {stream!r} with all tables" if stream else "a stream for each table"
                for stream in (self.found.stream, self._note.stream)
            )
            raise SourceUnusableError(
                f"replication slot {self._slot!r} fills {there}, and cannot fill {here}: name another "
                "--slot"
            )

    def check_slot(
        self, slot: Slot | None, followed: Iterable[Position | CopyPosition], current: Lsn
    ) -> Slot:
        """Return the slot if it has everything that the streams lack; raises SlotLostError otherwise.

        `followed` is how far the streams are, and `current` the end of the server's log.
        """
        if slot is None:
            raise SlotLostError(self._slot, "does not exist any more")
        if slot.lost:
            raise SlotLostError(
                self._slot, "is invalid, because PostgreSQL removed the log it needs"
            )
        positions = list(followed)
        # Only changes are ever confirmed, and not the snapshot of a copy, which may be ahead of them.
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

    async def note_slot(self, slot: Slot) -> None:
        """Note durably where the slot is, and its timeline; `check_slot` comes first.

        A copy that is restarted hides the change up to which the slot was confirmed.
        """
        moved = self.found is not None and self.found.timeline != self._system.timeline
        if moved or slot.confirmed > self.lsn:
            await self.note(max(slot.confirmed, self.lsn))

    def _end_of_timeline(self) -> Lsn:
        """Return up to where the server's log is the one that the streams were filled from."""
        noted = self.found.timeline if self.found is not None else 0
        if noted in (0, self._system.timeline):
            return Lsn(U64_MAX)
        return self._system.ends.get(noted, Lsn(0))
