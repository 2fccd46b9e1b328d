"""COPY of a table in a snapshot, as blocks of lines of its text form.

It takes no lock that stops writers, and waits for its reader.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from streamfold.extras import needing_extra
from streamfold.ingest.errors import SnapshotLostError, SourceUnusableError
from streamfold.ingest.postgres.catalog import Table, identifiers, key_values
from streamfold.ingest.postgres.connection import Database, named_failures
from streamfold.ingest.postgres.libpq import CopyConnection
from streamfold.ingest.postgres.pgoutput import Row
from streamfold.ingest.postgres.slot import creating

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.ingest.postgres.libpq_kernel import LineFiller

with needing_extra("postgres"):
    import psycopg2
    import psycopg2.errors
    from psycopg2 import sql

#: Blocks that COPY may be ahead of its reader, and their bytes: larger ones hold one long line.
_BLOCKS_AHEAD: Final = 4
_BLOCK_BYTES: Final = 1 << 20
#: Seconds between two requests to end COPY: one that comes before the statement has no effect.
_CANCEL_AGAIN: Final = 0.2
_ESCAPES: Final = {
    ord("b"): b"\b", ord("f"): b"\f", ord("n"): b"\n", ord("r"): b"\r", ord("t"): b"\t",
    ord("v"): b"\v", ord("\\"): b"\\",
}  # fmt: skip


class Snapshot(NamedTuple):
    """A state of the database, for other connections."""

    lsn: str
    name: str


@asynccontextmanager
async def exported_snapshot(database: Database) -> AsyncIterator[Snapshot]:
    """Yield a snapshot, which is valid in the block.

    It holds every transaction with a commit before the LSN, and no other. PostgreSQL makes it when the
    transactions that are open have ended.
    """
    connection = await asyncio.to_thread(database.connect_replication)

    def export() -> Snapshot:
        with named_failures(database.shown), connection.cursor() as cursor:
            name = f"streamfold_copy_{connection.info.backend_pid}"
            cursor.execute(
                f"CREATE_REPLICATION_SLOT {name} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            )
            _, lsn, snapshot, _ = cursor.fetchone()
            return Snapshot(str(lsn), str(snapshot))

    try:
        yield await creating(database, connection, export)
    finally:
        connection.close()


def copy_query(
    cursor: Any, table: Table, after: Sequence[str] | None, values: sql.Composable
) -> str:
    """Return the COPY of values of all rows, or of those after a key, in the order of the key."""
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
    find_filler: Callable[[], LineFiller | None],
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the lines of COPY, many at once; it waits for its reader.

    `find_filler` is asked before each block until it has one.
    """
    copying = _Copying(database, table, snapshot, after, values, find_filler)
    try:
        yield _whole_lines(copying.blocks())
    finally:
        await asyncio.to_thread(copying.stop)


class _Copying:
    """COPY in a thread."""

    def __init__(
        self,
        database: Database,
        table: Table,
        snapshot: str,
        after: Sequence[str] | None,
        values: sql.Composable,
        find_filler: Callable[[], LineFiller | None],
    ) -> None:
        self._find_filler = find_filler
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
            # A reader that waits must not wait on; one that does not has no room for it.
            with suppress(queue.Full):
                self._blocks.put_nowait(None)

    def _copy(self) -> None:
        connection = self._connection = self._database.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                self._use_snapshot(cursor)
                query = copy_query(cursor, self._table, self._after, self._values)
            # Not by psycopg2, which takes and releases the lock of Python for each line.
            copying = CopyConnection.copying(connection, query)
            filler = self._find_filler()
            while block := (
                copying.pull_lines(_BLOCK_BYTES) if filler is None else filler.pull_lines(copying)
            ):
                self._put(block)
                filler = filler or self._find_filler()
        finally:
            connection.close()

    def _use_snapshot(self, cursor: Any) -> None:
        name = sql.Literal(self._snapshot)
        try:
            cursor.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(name))
        except (psycopg2.errors.UndefinedObject, psycopg2.errors.InvalidParameterValue) as error:
            # The connection that exported it is broken, and nothing else has noticed yet.
            raise SnapshotLostError(self._database.shown) from error

    def stop(self) -> None:
        """End the thread, wherever it is."""
        self._stopped = True
        while self._thread.is_alive():
            if self._connection is not None:
                with suppress(psycopg2.Error):  # it was closed meanwhile
                    self._connection.cancel()
            self._thread.join(_CANCEL_AGAIN)


async def _whole_lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for block in blocks:
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = b""
        rest += block[end:]


def split_line(line: bytes) -> Row:
    """Split a line of COPY's text form into values; SourceUnusableError if it has another form."""
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
    found, at = [first], 0
    while at < len(parts):
        part = parts[at]
        if part:
            found.append(_ESCAPES[part[0]] + part[1:])
        else:  # an escaped backslash is two, with nothing between them
            at += 1
            found.append(b"\\" + parts[at])
        at += 1
    return b"".join(found)
