"""Runs COPY on a table in a snapshot, and yields its text form in blocks of lines.

Takes no lock that would stop writers, and waits for its reader.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

from streamfold.extras import needing_extra
from streamfold.ingest.errors import SnapshotLostError, SourceUnusableError
from streamfold.ingest.postgres.catalog import Table, identifiers, key_values
from streamfold.ingest.postgres.connection import Database, named_failures
from streamfold.ingest.postgres.pgoutput import Row
from streamfold.ingest.postgres.slot import creating

with needing_extra("postgres"):
    import psycopg2
    import psycopg2.errors
    from psycopg2 import sql

#: Bytes per block, exceeded by at most one line, and the blocks that COPY may be ahead of its reader.
_BLOCK_BYTES: Final = 1 << 20
_BLOCKS_AHEAD: Final = 4
#: Seconds between requests to cancel COPY. One that arrives before the statement has no effect.
_CANCEL_AGAIN: Final = 0.2
_ESCAPES: Final = {
    ord("b"): b"\b", ord("f"): b"\f", ord("n"): b"\n", ord("r"): b"\r", ord("t"): b"\t",
    ord("v"): b"\v", ord("\\"): b"\\",
}  # fmt: skip


class DatabaseSnapshot(NamedTuple):
    """A database state that other connections can use."""

    lsn: str
    name: str


@asynccontextmanager
async def exported_snapshot(database: Database) -> AsyncIterator[DatabaseSnapshot]:
    """Export a snapshot for the duration of the block.

    It contains exactly the transactions committed before its LSN. PostgreSQL first waits for all open
    transactions to end.
    """
    connection = await asyncio.to_thread(database.connect_replication)

    def export() -> DatabaseSnapshot:
        with named_failures(database.shown), connection.cursor() as cursor:
            name = f"streamfold_copy_{connection.info.backend_pid}"
            cursor.execute(
                f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            )
            _, lsn, snapshot, _ = cursor.fetchone()
            return DatabaseSnapshot(str(lsn), str(snapshot))

    try:
        yield await creating(database, connection, export)
    finally:
        connection.close()


def copy_query(
    cursor: Any, table: Table, after: Sequence[str] | None, values: sql.Composable
) -> str:
    """Return the COPY of all rows' values, or of those after a key, in key order."""
    where = sql.SQL("")
    if after is not None:
        where = sql.SQL("WHERE ({}) > {} ").format(identifiers(table.key), key_values(table, after))
    query = sql.SQL("COPY (SELECT {} FROM {} {}ORDER BY {}) TO STDOUT").format(
        values,
        table.own_rows,
        where,
        identifiers(table.key),
    )
    return str(query.as_string(cursor))


@asynccontextmanager
async def copied_blocks(
    database: Database,
    table: Table,
    snapshot: str,
    after: Sequence[str] | None,
    values: sql.Composable,
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the lines of COPY in blocks. COPY waits for its reader."""
    copying = _Copying(database, table, snapshot, after, values)
    try:
        yield _whole_lines(copying.blocks())
    finally:
        await asyncio.to_thread(copying.stop)


class _Copying:
    """Runs COPY in a thread."""

    def __init__(
        self,
        database: Database,
        table: Table,
        snapshot: str,
        after: Sequence[str] | None,
        values: sql.Composable,
    ) -> None:
        self._blocks: queue.Queue[bytes | None] = queue.Queue(_BLOCKS_AHEAD)
        self._database, self._table = database, table
        self._snapshot, self._after, self._values = snapshot, after, values
        self._stopped = False
        self._failure: BaseException | None = None
        self._connection: Any = None
        self._thread = threading.Thread(target=self._run, name=f"copy {table.full_name}")
        self._thread.start()

    async def blocks(self) -> AsyncIterator[bytes]:
        while (block := await asyncio.to_thread(self._blocks.get)) is not None:
            yield block
        if self._failure is not None:
            raise self._failure

    def _put(self, block: bytes | None) -> None:
        while True:
            if self._stopped:
                raise InterruptedError("the copy was stopped")
            try:
                return self._blocks.put(block, timeout=0.2)
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            with named_failures(f"{self._database.shown}, copy of {self._table.full_name}"):
                self._copy()
        except BaseException as error:
            self._failure = error
        try:
            self._put(None)
        except InterruptedError:
            # Wakes a waiting reader. If the queue is full, no reader is waiting.
            with suppress(queue.Full):
                self._blocks.put_nowait(None)

    def _copy(self) -> None:
        connection = self._connection = self._database.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                self._use_snapshot(cursor)
                query = copy_query(cursor, self._table, self._after, self._values)
                lines = _Lines(self._put)
                cursor.copy_expert(query, lines)
                lines.flush()
        finally:
            connection.close()

    def _use_snapshot(self, cursor: Any) -> None:
        name = sql.Literal(self._snapshot)
        try:
            cursor.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(name))
        except (psycopg2.errors.UndefinedObject, psycopg2.errors.InvalidParameterValue) as error:
            # The exporting connection broke, and nothing else has noticed yet.
            raise SnapshotLostError(self._database.shown) from error

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped = True
        while self._thread.is_alive():
            if self._connection is not None:
                with suppress(psycopg2.Error):  # the connection was closed meanwhile
                    self._connection.cancel()
            self._thread.join(_CANCEL_AGAIN)


class _Lines:
    """A file to which psycopg2 writes single lines. Passes them on in blocks."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put
        self._lines: list[bytes] = []
        self._size = 0

    def write(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            self._put(b"".join(self._lines))
            self._lines, self._size = [], 0


async def _whole_lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = b""
        rest += block[end:]


def split_line(line: bytes) -> Row:
    """Split a line of COPY's text form into values. Raises SourceUnusableError if malformed."""
    if b"\\" not in line:
        return tuple(line.split(b"\t"))
    try:
        return tuple(None if part == b"\\N" else _unescaped(part) for part in line.split(b"\t"))
    except (IndexError, KeyError):
        raise SourceUnusableError(
            "COPY sent a line with an escape that its text form does not have: check that the server "
            "is PostgreSQL, with no program in between that changes what it sends"
        ) from None


def _unescaped(text: bytes) -> bytes:
    if b"\\" not in text:
        return text
    first, *parts = text.split(b"\\")
    pieces, at = [first], 0
    while at < len(parts):
        part = parts[at]
        if part:
            pieces.append(_ESCAPES[part[0]] + part[1:])
        else:  # an escaped backslash leaves an empty part
            at += 1
            pieces.append(b"\\" + parts[at])
        at += 1
    return b"".join(pieces)
