"""Copies PostgreSQL tables into streams, then follows their changes exactly once.

A run is a series of sessions. After a transient failure, the next session resumes from what the streams
have. A session

1. takes the streams, which fences every other ingester (`table_stream`),
2. checks that the slot still has everything that the streams lack, or creates the slot (`control`),
3. completes the first copy of each table (`first_copy`),
4. follows the slot (`following`) and confirms to PostgreSQL only what the streams have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from streamfold.backoff import UNATTENDED, Backoff
from streamfold.errors import OutcomeUnknownError, RetryLaterError, SeqNumMismatchError
from streamfold.ingest.errors import (
    CopyStaleError,
    SnapshotLostError,
    SourceUnavailableError,
    SourceUnusableError,
)
from streamfold.ingest.postgres.catalog import (
    Table,
    check_server,
    find_tables,
    is_altered,
    is_extension,
    is_replaced,
    shape,
)
from streamfold.ingest.postgres.connection import Database, named_failures
from streamfold.ingest.postgres.control import Control, TableNote
from streamfold.ingest.postgres.copy_source import exported_snapshot
from streamfold.ingest.postgres.first_copy import copy_table
from streamfold.ingest.postgres.following import Following
from streamfold.ingest.postgres.pgoutput import Lsn, parse_lsn
from streamfold.ingest.postgres.publication import (
    ensure_publication,
    find_published,
    is_same_mark,
)
from streamfold.ingest.postgres.rows import opening
from streamfold.ingest.postgres.slot import (
    ReplicationSlot,
    create_slot,
    creating,
    current_lsn,
    drop_slot,
    find_slot,
    identify_system,
)
from streamfold.ingest.progress import IngestProgress, IngestTableProgress
from streamfold.ingest.table_stream import (
    CopyPosition,
    Position,
    SharedTableStream,
    StreamOpener,
    TableStream,
    copy_headers,
    fencing_token,
    raise_if_cancelled,
)
from streamfold.model.records import Record

logger = logging.getLogger(__name__)

#: Seconds to wait for a slot in use, because the server may not have noticed yet that its user
#: died, and seconds between checks.
_SLOT_WAIT: Final = 10.0
_SLOT_LOOK: Final = 0.2
#: A session that fails after this many seconds counts as successful, so that pauses start over.
_STEADY: Final = 10.0
#: Maximum snapshots lost in a row. A PostgreSQL restart loses one, and a copy whose connections
#: reach different servers loses all.
_SNAPSHOTS_LOST_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """What to ingest, and under which names."""

    #: Table names, which may contain `*` and `?`. The default schema is `public`.
    tables: tuple[str, ...]
    slot: str = "streamfold"
    publication: str = "streamfold"
    #: Prefix of stream names, followed by `schema.table`.
    prefix: str = ""
    #: Copy all tables again, even if their streams are complete.
    recopy: bool = False
    #: Seconds between two notes of the position while no table changes.
    heartbeat: float = 10.0
    #: Seconds without a message after which a connection counts as broken, as for replicas.
    silence: float = 60.0
    #: Bytes of log retained for the slot above which a warning is logged, because the disk may fill
    #: up.
    retained_warn: int = 1 << 30
    #: Name of a single stream for all tables, after the prefix. Empty = one stream per table.
    one_stream: str = ""

    def stream(self, table: str) -> str:
        return f"{self.prefix}{table}"

    @property
    def shared_stream(self) -> str:
        """The stream of all tables; empty if each has its own."""
        return f"{self.prefix}{self.one_stream}" if self.one_stream else ""

    @property
    def control_stream(self) -> str:
        return f"{self.prefix}_ingest/{self.slot}"


class PostgresIngest:
    """Ingests tables of one database. `run` ends only when cancelled or on a permanent failure."""

    def __init__(
        self,
        database: Database,
        streams: StreamOpener,
        options: IngestOptions,
        *,
        backoff: Backoff = UNATTENDED,
        progress: IngestProgress | None = None,
        on_progress: Callable[[], None] = lambda: None,
        trim_points: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`trim_points` returns, by stream, the first record that readers still need.

        It is called in a thread with each heartbeat. Streams that it omits are not trimmed.
        """
        self._database = database
        self._streams = streams
        self._options = options
        self._backoff = backoff
        self._on_progress = on_progress
        self._trim_points = trim_points
        self._recopy = options.recopy
        #: Tables to copy again because their columns changed.
        self._stale: set[str] = set()
        self.progress = progress or IngestProgress()

    async def run(self) -> None:
        """Ingest until cancelled. Raises permanent failures."""
        failures, lost, pause = 0, 0, 0.0
        while True:
            raise_if_cancelled()
            began = time.monotonic()
            try:
                await self._session()
            except CopyStaleError as error:
                logger.warning("%s", error)
                self._stale.add(error.table)
            except (RetryLaterError, OutcomeUnknownError, SeqNumMismatchError) as error:
                lasted = time.monotonic() - began
                failures = 1 if lasted > max(pause, _STEADY) else failures + 1
                lost = lost * (failures > 1) + 1 if isinstance(error, SnapshotLostError) else 0
                if lost == _SNAPSHOTS_LOST_MAX:
                    raise SourceUnusableError(
                        f"{self._database.shown} lost the snapshot of the first copy {lost} times in a "
                        "row: connections seem to reach different servers; name one host, and no pooler"
                    ) from error
                pause = self._backoff.pause(failures)
                self.progress.failures += 1
                self.progress.last_error = error.message
                self._report("retrying")
                logger.warning("starting again in %.1f s: %s", pause, error)
                await asyncio.sleep(pause)

    async def _session(self) -> None:
        self.progress.sessions += 1
        self._report("starting")
        tables = await asyncio.to_thread(self._prepare)
        system = await asyncio.to_thread(identify_system, self._database)
        await self._wait_for_slot()
        token = fencing_token()
        options = self._options
        noted = await self._take(options.control_stream, token)
        control = Control(noted, system, options.slot, options.publication, options.shared_stream)
        control.check_database()
        control.check_streams()
        streams = await self._take_tables(tables, control, token)
        for table in tables:
            control.check_key(table)
        await self._ensure_slot(control, streams)
        if options.one_stream:
            await control.note(control.lsn)  # only its last record decides
        await control.forget_others(streams)
        await self._restart_stale(tables, streams, control)
        await self._copy(tables, streams, control)
        self._report("following")
        following = Following(
            self._database,
            options.publication,
            tables,
            streams,
            control,
            self.progress,
            self._report,
            options.retained_warn,
            self._trim_points,
        )
        for table in tables:
            state = streams[table.full_name].state
            assert isinstance(state, Position)  # noqa: S101 - the copy is complete
            lsn = parse_lsn(state.lsn)
            following.changes.follow(table.full_name, table.key, lsn, state.index, table.oid)
        await following.run(options.slot, options.heartbeat, options.silence)

    def _prepare(self) -> list[Table]:
        with self._database.query() as cursor:
            check_server(cursor)
            tables = find_tables(cursor, self._options.tables)
            tables = ensure_publication(cursor, self._options.publication, tables)
        for table in tables:
            progress = self.progress.tables.setdefault(table.full_name, IngestTableProgress())
            progress.rows_estimated = table.rows
        return tables

    async def _take(self, name: str, token: str) -> TableStream:
        stream = TableStream(await self._streams.ensure(name), token)
        await stream.take()
        return stream

    async def _take_tables(
        self, tables: Sequence[Table], control: Control, token: str
    ) -> dict[str, TableStream]:
        """Take the stream of each table, or the single stream of all."""
        options, names = self._options, [table.full_name for table in tables]
        if not options.one_stream:
            return {name: await self._take(options.stream(name), token) for name in names}
        shared = await self._take(options.shared_stream, token)
        states = control.states(shared, names)
        return {name: SharedTableStream(shared, name, states[name]) for name in names}

    async def _wait_for_slot(self) -> ReplicationSlot | None:
        """Wait until no process uses the slot. Returns the slot, or None if it does not exist yet.

        Raises SourceUnavailableError if the slot stays in use.
        """
        deadline = time.monotonic() + _SLOT_WAIT
        while True:
            slot = await asyncio.to_thread(self._slot)
            if slot is None or slot.active_pid is None:
                return slot
            if time.monotonic() > deadline:
                raise SourceUnavailableError(
                    f"replication slot {slot.name!r} is used by process {slot.active_pid} of the "
                    "database: stop the other ingester, or name another --slot"
                )
            await asyncio.sleep(_SLOT_LOOK)

    def _slot(self) -> ReplicationSlot | None:
        with self._database.query() as cursor:
            return find_slot(cursor, self._options.slot)

    async def _ensure_slot(self, control: Control, streams: dict[str, TableStream]) -> None:
        """Check the slot, or create it for a first or repeated copy."""
        slot = await asyncio.to_thread(self._slot)
        if slot is not None and control.previous is None:
            raise SourceUnusableError(
                f"replication slot {slot.name!r} exists, and no ingester of these streams made it: "
                "name another --slot, or drop it"
            )
        if not control.lsn or self._recopy:
            control.drop_others(streams)
            control.forget_copies(tuple(control.tables))
            await control.note(Lsn(0))  # from now on a slot with this name is ours
            lsn = await self._create_slot()
            # Note the position last. From then on, a stream whose copy was not restarted counts as
            # complete up to the slot.
            for stream in streams.values():
                if stream.state is not None:
                    await self._restart_copy(stream)
            await control.note(lsn)
            self._recopy = False
            return
        states = [s.state for s in streams.values() if s.state is not None]
        current = await asyncio.to_thread(self._current_lsn)
        await control.note_slot(control.check_slot(slot, states, current))

    async def _create_slot(self) -> Lsn:
        """Create the slot. PostgreSQL first waits for all open transactions to end."""
        connection = await asyncio.to_thread(self._database.connect)

        def create() -> Lsn:
            with named_failures(self._database.shown), connection.cursor() as cursor:
                if find_slot(cursor, self._options.slot) is not None:
                    drop_slot(cursor, self._options.slot)
                return create_slot(cursor, self._options.slot)

        try:
            return await creating(self._database, connection, create)
        finally:
            connection.close()

    def _current_lsn(self) -> Lsn:
        with self._database.query() as cursor:
            return current_lsn(cursor)

    async def _restart_copy(self, stream: TableStream) -> None:
        """Truncate the table in its stream, so that the copy starts over."""
        body = opening(b"t", stream.table) + b"}"
        await stream.append([Record(body, copy_headers("0/0", 0))])
        stream.state = CopyPosition("0/0", 0, None)

    async def _restart_stale(
        self, tables: Sequence[Table], streams: dict[str, TableStream], control: Control
    ) -> None:
        """Restart the copies of tables whose streams no longer match them."""
        again = []
        for table in tables:
            stream, noted = streams[table.full_name], control.tables.get(table.full_name)
            stale = (
                table.full_name in self._stale or noted is None or _is_stale(stream, noted, table)
            )
            self._stale.discard(table.full_name)
            if stale and stream.state is not None:
                logger.warning("table %s is copied again", table.full_name)
                again.append(table.full_name)
            elif noted is not None:
                control.adopt_marks(table.full_name, table.marks)
        if again and self._options.one_stream:
            # Noted first, because the next record hides the positions of other tables.
            control.forget_copies(again)
            await control.note(control.lsn)
        for name in again:
            await self._restart_copy(streams[name])

    async def _copy(
        self, tables: Sequence[Table], streams: dict[str, TableStream], control: Control
    ) -> None:
        """Complete the first copies, all in one snapshot."""
        left = _left(tables, streams)
        for table in tables:
            self.progress.tables[table.full_name].state = (
                "waiting" if table in left else "following"
            )
        if not left:
            return
        self._report("copying")
        left.sort(key=lambda table: not _is_resumable(streams[table.full_name]))
        await control.note_columns(*left)
        async with exported_snapshot(self._database) as snapshot:
            await asyncio.to_thread(self._check_described, left)
            for table in left:
                progress = self.progress.tables[table.full_name]
                stream = streams[table.full_name]
                if stream.state is None and stream.has_history:
                    await self._restart_copy(stream)  # readers may have rows of an earlier copy
                copied = stream.state
                if not isinstance(copied, CopyPosition) or copied.key is None:
                    copied = CopyPosition(snapshot.lsn, 0, None)
                progress.state, progress.copy_began = "copying", time.time()
                progress.rows_copied = progress.copy_resumed_at = copied.rows
                self._report()
                on_rows = partial(self._on_rows, progress)
                await copy_table(self._database, table, stream, snapshot, copied, on_rows)
                if stream.table is not None:
                    await control.note_copied(table.full_name, copied.lsn)
                progress.state = "following"

    def _check_described(self, tables: Sequence[Table]) -> None:
        """Raise CopyStaleError if a table's columns changed since the session described it.

        A column added since then may have values in the snapshot that no later change repeats.
        """
        with self._database.query() as cursor:
            for table in tables:
                published = find_published(cursor, self._options.publication, table.full_name)
                if published is None or shape(published.columns) != shape(table.columns):
                    raise CopyStaleError(table.full_name, "its columns changed before the copy")

    def _on_rows(self, progress: IngestTableProgress, rows: int, size_bytes: int) -> None:
        progress.rows_copied = rows
        progress.bytes_copied += size_bytes
        self._report()

    def _report(self, state: str | None = None) -> None:
        self.progress.state = state or self.progress.state
        self._on_progress()


def _left(tables: Sequence[Table], streams: dict[str, TableStream]) -> list[Table]:
    """Return the tables whose copies are incomplete."""
    return [t for t in tables if not isinstance(streams[t.full_name].state, Position)]


def _is_resumable(stream: TableStream) -> bool:
    """Return whether the copy continues after the last record, so that it must run first."""
    return isinstance(stream.state, CopyPosition) and stream.state.key is not None


def _is_stale(stream: TableStream, noted: TableNote, table: Table) -> bool:
    """Return whether rows in the stream are outdated, or changes were not sent."""
    old, new = shape(noted.columns), shape(table.columns)
    cut = isinstance(stream.state, CopyPosition) and old != new
    published = is_same_mark(noted.published, table.published)
    replaced = is_replaced(noted.columns, {c.name: c.number for c in table.columns})
    altered = is_altered(noted.marks, table.marks)
    return cut or replaced or altered or not published or not is_extension(old, new, table)
