"""Follows a slot: reads changes, appends them, and confirms what the streams have.

Reads at most one batch ahead of the one being appended. So memory is bounded for transactions of any
size, and PostgreSQL retains unread changes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from streamfold.errors import RetryLaterError, StreamfoldError
from streamfold.extras import needing_extra
from streamfold.ingest.errors import (
    CopyStaleError,
    SlotLostError,
    SourceUnavailableError,
    SourceUnusableError,
)
from streamfold.ingest.postgres.catalog import (
    Table,
    adopted_marks,
    column_numbers,
    is_altered,
    is_extension,
    is_replaced,
    row_query,
    shape,
    table_marks,
)
from streamfold.ingest.postgres.change_writer import ChangeBatch, ChangeBatches, joined
from streamfold.ingest.postgres.changes import ChangeRecords, TableRecord
from streamfold.ingest.postgres.connection import Database, named_failures
from streamfold.ingest.postgres.control import Control, TableNote
from streamfold.ingest.postgres.copy_source import split_line
from streamfold.ingest.postgres.pgoutput import (
    Begin,
    Event,
    Lsn,
    Relation,
    Row,
    decode_message,
    lsn_text,
)
from streamfold.ingest.postgres.publication import find_published, is_same_mark, published_tables
from streamfold.ingest.postgres.replication import Replication
from streamfold.ingest.postgres.slot import current_lsn, find_slot
from streamfold.ingest.progress import IngestProgress
from streamfold.ingest.table_stream import TableStream, raise_if_cancelled

if TYPE_CHECKING:
    # Only for type annotations.
    from streamfold._native import Run

with needing_extra("postgres"):
    import psycopg2.errors

logger = logging.getLogger(__name__)

#: Errors of a query on a table that changed after it was described.
_UNDEFINED: Final = (psycopg2.errors.UndefinedColumn, psycopg2.errors.UndefinedTable)

#: Why a table is copied again. See `table_marks`.
_ALTERED: Final = (
    "it, a type of its columns or a partition was altered, and PostgreSQL's log does not tell how rows "
    "look now"
)

#: Bytes of records per batch, for all streams: a few appends of maximum size.
_BATCH_BYTES: Final = 4 << 20
#: Seconds between appends, and between runs of messages: one append per change would multiply the
#: work of ingester and server. A change after a pause does not wait.
_GATHER: Final = 0.05
#: Seconds between appends under load, which is more than `_LIGHT` changes per batch. A batch of
#: `_APPEND_BYTES` is appended earlier.
_GATHER_LOADED: Final = 0.2
_LIGHT: Final = 200
_APPEND_BYTES: Final = 1 << 20
#: Bytes that a Unix socket holds before the server must wait, minus a margin, and the overhead per
#: message.
_SOCKET_BYTES: Final = 128 << 10
_SOCKET_MESSAGE: Final = 768
#: Minimum seconds between a poll that found nothing and the next one.
_LOOK_AGAIN: Final = 0.001
#: Minimum seconds between confirmations, which let PostgreSQL free its log.
_CONFIRM: Final = 1.0
#: Maximum seconds for the last note of a session, while the ingester is being stopped.
_NOTE_END: Final = 5.0
_DOMAINS = """
WITH RECURSIVE d AS (
    SELECT oid, typbasetype FROM pg_type WHERE typtype = 'd'
  UNION ALL
    SELECT d.oid, t.typbasetype FROM d JOIN pg_type t ON t.oid = d.typbasetype WHERE t.typtype = 'd'
)
SELECT d.oid, d.typbasetype FROM d JOIN pg_type t ON t.oid = d.typbasetype WHERE t.typtype <> 'd'
"""


class Following:
    """One connection that follows a slot."""

    def __init__(
        self,
        database: Database,
        publication: str,
        tables: Sequence[Table],
        streams: dict[str, TableStream],
        control: Control,
        progress: IngestProgress,
        on_progress: Callable[[], None],
        retained_warn: int,
        trim_points: Callable[[], Mapping[str, int]],
    ) -> None:
        self._database = database
        self._publication = publication
        self._streams = streams
        self._control = control
        self._progress = progress
        self._on_progress = on_progress
        self._retained_warn = retained_warn
        self._trim_points = trim_points
        self._domains: dict[int, int] = {}
        self._tables = {table.full_name: table for table in tables}
        self._by_name = {stream.name: stream for stream in streams.values()}
        self._one_stream = any(stream.table is not None for stream in streams.values())
        self.changes = ChangeRecords(
            self._base_type, self._look_up, self._on_columns, self._one_stream
        )
        #: Tables with their declared columns, including declarations that are not appended yet.
        self._declared = dict(control.tables)
        #: The position that may be confirmed to PostgreSQL, because a stream or a note has it.
        self._confirmed = Lsn(0)
        #: The streams have all changes before this. Beyond `_confirmed`, only a note makes it durable.
        self._reached = Lsn(0)
        self._noting = asyncio.Lock()
        self._gathered = ChangeBatches(self.changes, streams)
        self._appending: asyncio.Task[None] | None = None
        self._appended_at = 0.0
        #: When messages last arrived.
        self._gathered_at = 0.0
        #: Seconds spent waiting since the server last sent anything.
        self._silent = 0.0

    async def run(self, slot: str, heartbeat: float, silence: float) -> None:
        """Follow until cancelled. Raises SourceUnavailableError when the connection breaks.

        `silence`: seconds without a message after which the connection counts as broken.
        """
        connection = await asyncio.to_thread(self._database.connect_replication)
        try:
            with named_failures(self._database.shown):
                replication = Replication(connection, slot, self._publication)
                await asyncio.to_thread(self._check_slot, slot)
                await self._loop(replication, slot, heartbeat, silence)
        except SourceUnusableError as error:
            if isinstance(error.__cause__, psycopg2.errors.UndefinedObject):
                # Either the slot, or the publication as of a change, does not exist.
                raise SlotLostError(slot, f"cannot be followed ({error.message})") from error
            raise
        finally:
            if self._appending is not None:
                self._appending.cancel()
                await asyncio.gather(self._appending, return_exceptions=True)
            connection.close()
            await self._note_end()

    def _check_slot(self, name: str) -> None:
        """Raise SlotLostError if the slot was moved or recreated since the session checked it.

        The copies may have taken hours. From now on only this connection can move it.
        """
        with self._database.query() as cursor:
            slot, current = find_slot(cursor, name), current_lsn(cursor)
        self._control.check_slot(slot, (), current)

    async def _loop(
        self, replication: Replication, slot: str, heartbeat: float, silence: float
    ) -> None:
        confirmed_at = noted_at = time.monotonic()
        while True:
            raise_if_cancelled()
            drained = await self._gather(replication)
            any_came = await self._read(replication)
            if drained and not self.changes.in_transaction:
                self._gathered.batch.drained_at = time.time()
            await self._append(wait=self._gathered.batch.size >= _BATCH_BYTES)
            now = time.monotonic()
            if self._is_idle():
                self._reached = max(self._reached, replication.wal_end)
                self._caught_up(self._gathered.batch.drained_at)
            if now - noted_at >= heartbeat:
                noted_at = now
                await self._note_reached()
                await self._adopt(await asyncio.to_thread(self._observe, slot))
                await self._trim()
                self._on_progress()
            # A server that shuts down keeps asking until everything is confirmed.
            if now - confirmed_at >= _CONFIRM or (replication.asked and self._is_idle()):
                confirmed_at = now
                await self._confirm(replication, silence)
            if any_came:
                await asyncio.sleep(0)
            else:
                await self._wait(replication, min(_CONFIRM, heartbeat))

    async def _gather(self, replication: Replication) -> bool:
        """Gather messages until `_GATHER` after the last run. Returns whether nothing is left.

        Polls often enough that the server never waits for room in the socket.
        """
        any_came, pause = False, 0.0
        looked_at = self._gathered_at
        while True:
            came, now = replication.gather(), time.monotonic()
            any_came = any_came or came.messages > 0
            left = self._gathered_at + _GATHER - now
            if not came.drained or left <= 0 or not any_came:
                break
            size = came.size + _SOCKET_MESSAGE * came.messages
            if not size:
                pause = max(2 * pause, _LOOK_AGAIN)
            else:  # the server needs this long to fill the socket
                pause = (now - looked_at) * _SOCKET_BYTES / size if size < _SOCKET_BYTES else 0.0
            looked_at = now
            await asyncio.sleep(min(pause, left))
        if any_came:
            self._silent, self._gathered_at = 0.0, now
        return came.drained

    async def _wait(self, replication: Replication, longest: float) -> None:
        """Wait for the server, for the append in progress, or until the next append is due."""
        if self._appending is None and self._gathered.batch:
            longest = min(longest, self._due_after())
        loop, readable, socket = asyncio.get_running_loop(), asyncio.Event(), replication.fileno()
        waiting = asyncio.ensure_future(readable.wait())
        ours = {self._appending} if self._appending is not None else set()
        began = time.monotonic()
        # Registered only here, because unread messages would wake the loop all the time.
        loop.add_reader(socket, readable.set)
        try:
            await asyncio.wait(
                {waiting} | ours, timeout=longest, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            loop.remove_reader(socket)
            waiting.cancel()
        self._silent = 0.0 if readable.is_set() else self._silent + time.monotonic() - began

    async def _read(self, replication: Replication) -> bool:
        """Add the gathered messages to the batch. Returns whether there were any."""
        run, at = replication.take().run, 0
        while at < len(run):
            at = self._write(run, at)
            if at < len(run):
                await self._feed(run[at])
                at += 1
        return len(run) > 0

    def _write(self, run: Run, at: int) -> int:
        """Add messages from `at` on with native code. Returns the first one left to `_feed`."""
        while at < len(run):
            idle = self._is_idle()
            written = self._gathered.write(run, at)
            if idle:
                self._reached = max(self._reached, written.quiet)
            if written.next == at and not written.batches:
                break
            at = written.next
        return at

    async def _feed(self, message: bytes) -> None:
        event = decode_message(message)
        if isinstance(event, Relation):
            await asyncio.to_thread(self._load_domains)
        elif isinstance(event, Begin) and self._is_idle():
            self._reached = max(self._reached, event.commit_lsn)
        if self.changes.may_query(event):
            records = await asyncio.to_thread(self._records, event)
        else:
            records = self._records(event)
        self._gathered.add(records)

    def _records(self, event: Event) -> list[TableRecord]:
        return list(self.changes.feed(event))

    def _base_type(self, oid: int) -> int:
        return self._domains.get(oid, oid)

    def _on_columns(self, name: str, relation: Relation) -> bytes | None:
        """Return the declaration of added columns, or None if there are none.

        Raises CopyStaleError for any other change, and if updates and deletes no longer send the key.
        """
        noted = self._declared[name]
        keyed = {column.name for column in relation.columns if column.is_key}
        if keyed and not keyed.issuperset(noted.key):  # without a key, only inserts can follow
            raise CopyStaleError(name, "its replica identity changed")
        old = shape(noted.columns)
        new = {}
        for column in relation.columns:
            base = self._base_type(column.type_oid)
            # PostgreSQL does not send the modifiers of domains.
            modifier = (
                old.get(column.name, (0, -1))[1] if base != column.type_oid else column.modifier
            )
            new[column.name] = (base, modifier)
        with self._database.query() as cursor:
            replaced = is_replaced(noted.columns, column_numbers(cursor, name))
            altered = is_altered(noted.marks, table_marks(cursor, [name]).get(name, ()))
        if replaced or altered:
            raise CopyStaleError(name, "its columns changed" if replaced else _ALTERED)
        if new == old:
            return None
        with self._database.query() as cursor:
            table = find_published(cursor, self._publication, name)
        if table is None:
            raise CopyStaleError(name, "it left the publication")
        if new.items() <= old.items() and old == shape(table.columns):
            return None  # sent before the noted columns were added
        if is_altered(noted.marks, table.marks) or not is_extension(old, new, table):
            raise CopyStaleError(name, "its columns changed")
        self._tables[name] = table
        note = TableNote.of(table, noted.copied)
        self._declared[name] = self._gathered.batch.declared[name] = note
        return table.declaration(named=self._one_stream)

    def _load_domains(self) -> None:
        with self._database.query() as cursor:
            cursor.execute(_DOMAINS)
            self._domains = dict(cursor.fetchall())

    def _look_up(self, table: str, columns: Sequence[str], key: Sequence[str]) -> Row | None:
        output = io.BytesIO()
        try:
            with self._database.query() as cursor:
                cursor.copy_expert(row_query(cursor, self._tables[table], columns, key), output)
        except SourceUnusableError as error:
            if isinstance(error.__cause__, _UNDEFINED):
                raise CopyStaleError(table, "its columns changed") from error
            raise
        line, end, _ = output.getvalue().partition(b"\n")
        return split_line(line) if end else None

    async def _append(self, *, wait: bool) -> None:
        """Start appending the batch if it is due. With `wait`, first wait for the one in progress."""
        if self._appending is not None and (wait or self._appending.done()):
            await self._appending
            self._appending = None
        size, since = self._gathered.batch.size, time.monotonic() - self._appended_at
        due = wait or size >= _APPEND_BYTES or since >= self._due_after()
        if self._appending is None and self._gathered.batch and due:
            self._appended_at = time.monotonic()
            self._appending = asyncio.create_task(self._append_batch(self._gathered.take()))

    def _due_after(self) -> float:
        """Return how many seconds after the last append the batch is due."""
        return _GATHER if self._gathered.batch.changes.total() <= _LIGHT else _GATHER_LOADED

    async def _append_batch(self, batch: ChangeBatch) -> None:
        appends = [
            self._by_name[name].append_encoded(joined(encoded))
            for name, encoded in batch.encoded.items()
        ]
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            # A permanent failure takes precedence.
            raise min(failed, key=lambda error: isinstance(error, RetryLaterError))
        if batch.declared:
            # Note them after the appends: an earlier note would outlive a failed declaration. Use the
            # current marks, because the batch may have older ones than were adopted since.
            for name, note in batch.declared.items():
                marks = self._declared[name].marks
                self._control.tables[name] = msgspec.structs.replace(note, marks=marks)
            await self._note(self._control.lsn)
        for table, count in batch.changes.items():
            self._progress.tables[table].changes += count
        if batch.lsn:
            self._confirmed = max(self._confirmed, batch.lsn)
            self._progress.committed_at = batch.committed_at / 1e6
        self._caught_up(batch.drained_at)
        self._on_progress()

    def _caught_up(self, moment: float) -> None:
        """Report that the streams have everything that the server had sent by `moment`."""
        self._progress.caught_up_at = max(self._progress.caught_up_at, moment)

    async def _trim(self) -> None:
        """Trim records that readers no longer need."""
        points = await asyncio.to_thread(self._trim_points)
        due = [
            stream for name, stream in self._by_name.items() if stream.can_trim(points.get(name, 0))
        ]
        if due and self._appending is not None:
            await self._appending  # only one append at a time per stream
            self._appending = None
        for stream in due:
            await stream.trim(points[stream.name])

    def _is_idle(self) -> bool:
        busy = self._appending is not None or self._gathered.batch
        return not busy and not self.changes.in_transaction

    async def _note_reached(self) -> None:
        """Note the position past log without changes, so that PostgreSQL can free it."""
        reached = self._reached
        if reached > max(self._confirmed, self._control.lsn):
            await self._note(reached)
            self._confirmed = max(self._confirmed, reached)

    async def _note(self, lsn: Lsn) -> None:
        async with self._noting:  # batches also note what they declare
            await self._control.note(max(lsn, self._control.lsn))

    async def _adopt(self, marks: Mapping[str, Sequence[str]]) -> None:
        """Note new marks of unaltered tables."""
        changed = False
        for name, noted in self._declared.items():
            adopted = adopted_marks(noted.marks, marks.get(name, ()))
            if set(adopted) != set(noted.marks):
                self._declared[name] = msgspec.structs.replace(noted, marks=adopted)
                self._control.adopt_marks(name, adopted)
                changed = True
        if changed:
            await self._note(self._control.lsn)

    def _observe(self, slot: str) -> dict[str, tuple[str, ...]]:
        """Check the slot and the publication, and return the tables' marks."""
        with self._database.query() as cursor:
            replication_slot = find_slot(cursor, slot)
            published = published_tables(cursor, self._publication)
            marks = table_marks(cursor, list(self._declared))
        for name, noted in self._declared.items():
            if name not in published:
                raise CopyStaleError(name, "it left the publication")
            if not is_same_mark(noted.published, published[name].mark):
                raise CopyStaleError(name, "its publication was changed")
            if is_altered(noted.marks, marks.get(name, ())):
                raise CopyStaleError(name, _ALTERED)
        if replication_slot is None:
            return marks  # the connection that follows the slot will fail
        self._progress.lag_bytes = max(0, replication_slot.lag_bytes)
        self._progress.retained_bytes = max(0, replication_slot.retained_bytes)
        if replication_slot.retained_bytes > self._retained_warn:
            logger.warning(
                "PostgreSQL keeps %d MiB of log for slot %r: the ingester is behind, or a long "
                "transaction is open; max_slot_wal_keep_size limits it",
                replication_slot.retained_bytes >> 20,
                slot,
            )
        return marks

    async def _confirm(self, replication: Replication, silence: float) -> None:
        """Confirm what the streams have, and ping a server that has been silent for long.

        If the server asks for a reply, first notes the position past log without changes, because
        the server may be waiting for that to shut down.
        """
        if self._silent > silence:
            raise SourceUnavailableError(
                f"{self._database.shown} is unavailable: it sent nothing for {self._silent:.0f} s"
            )
        if replication.asked:
            await self._note_reached()
        replication.confirm(self._confirmed, ask=self._silent > silence / 2)
        if self._confirmed:
            self._progress.confirmed = lsn_text(self._confirmed)

    async def _note_end(self) -> None:
        """Note how far the session got, because the next session may follow fewer tables."""
        reached = max(self._confirmed, self._reached)
        if reached <= self._control.lsn:
            return
        try:
            async with asyncio.timeout(_NOTE_END):
                await self._note(reached)
        except (StreamfoldError, TimeoutError) as error:
            logger.warning(
                "the end of the session at %s is not noted: %s", lsn_text(reached), error
            )
