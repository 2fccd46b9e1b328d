"""The first copy of a table: all rows as of one snapshot, in the order of the key, resumable.

The rows come from COPY, which takes no lock that stops writers. A copy that was interrupted continues
after the last key in the stream, in a newer snapshot; the changes since the first snapshot follow it
all the same, so rows that were copied earlier catch up, and for the others they repeat what the
copy has.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from streamfold.extras import needing_extra
from streamfold.ingest.postgres.catalog import Table, identifiers, key_values
from streamfold.ingest.postgres.connection import Database, interruptible, named_failures
from streamfold.ingest.postgres.pgoutput import Row
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.table_stream import (
    CopyPosition,
    Position,
    TableStream,
    copy_end_headers,
    copy_headers,
)
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, Record, metered_size

with needing_extra("postgres"):
    from psycopg2 import sql

#: Bytes that COPY may be ahead of the stream, as blocks of about 64 KiB.
_BLOCKS_AHEAD: Final = 64
_BLOCK_BYTES: Final = 64 << 10
#: Appends that are sent without waiting in between; as many are gathered meanwhile.
_BATCHES_TOGETHER: Final = 8
#: Bytes for the header with the key, in the last record of an append.
_KEY_RESERVE: Final = 8 << 10
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
        yield await interruptible(connection, export)
    finally:
        connection.close()


def copy_query(cursor: Any, table: Table, after: Sequence[str] | None) -> str:
    """Return the COPY of all rows, or of those after a key, in the order of the key."""
    where = sql.SQL("")
    if after is not None:
        where = sql.SQL("WHERE ({}) > {} ").format(identifiers(table.key), key_values(table, after))
    query = sql.SQL("COPY (SELECT {} FROM {} {}ORDER BY {}) TO STDOUT").format(
        identifiers(column.name for column in table.columns),
        table.identifier,
        where,
        identifiers(table.key),
    )
    return str(query.as_string(cursor))


@asynccontextmanager
async def copied_blocks(
    database: Database, table: Table, snapshot: str, after: Sequence[str] | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the output of COPY in blocks; it waits for its reader."""
    copying = _Copying(database, table, snapshot, after)
    try:
        yield copying.blocks()
    finally:
        await asyncio.to_thread(copying.stop)


class _Copying:
    """COPY in a thread; psycopg2 writes to it as to a file."""

    def __init__(
        self, database: Database, table: Table, snapshot: str, after: Sequence[str] | None
    ) -> None:
        self._blocks: queue.Queue[bytes | None] = queue.Queue(_BLOCKS_AHEAD)
        self._database, self._table = database, table
        self._snapshot, self._after = snapshot, after
        self._stopped = False
        self._failure: BaseException | None = None
        self._pending = bytearray()
        self._thread = threading.Thread(target=self._run, name=f"copy {table.full_name}")
        self._thread.start()

    async def blocks(self) -> AsyncIterator[bytes]:
        while (block := await asyncio.to_thread(self._blocks.get)) is not None:
            yield block
        if self._failure is not None:
            raise self._failure

    def write(self, data: bytes) -> int:
        self._pending += data
        if len(self._pending) >= _BLOCK_BYTES:
            self._flush()
        return len(data)

    def _flush(self) -> None:
        self._put(bytes(self._pending))
        self._pending.clear()

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
            with named_failures(self._database.shown):
                self._copy()
            self._flush()
        except BaseException as error:
            self._failure = error
        if not self._stopped:
            self._put(None)

    def _copy(self) -> None:
        connection = self._database.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                cursor.execute(
                    sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self._snapshot))
                )
                cursor.copy_expert(copy_query(cursor, self._table, self._after), self)
        finally:
            connection.close()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


async def copied_rows(blocks: AsyncIterator[bytes]) -> AsyncIterator[list[Row]]:
    """Yield the rows of COPY's text form."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield [split_line(line) for line in lines]


def split_line(line: bytes) -> Row:
    """Split a line of COPY's text form into values."""
    if b"\\" not in line:
        return tuple(line.split(b"\t"))
    return tuple(None if part == b"\\N" else _unescaped(part) for part in line.split(b"\t"))


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


class CopyBatches:
    """Gathers copied rows into appends; the last record of each says where to resume."""

    def __init__(self, encoder: RowEncoder, lsn: str, rows: int) -> None:
        self._encoder = encoder
        self._opening = encoder.opening(b"r")
        self._lsn = lsn
        self.rows = rows
        self._batch: list[Record] = []
        self._size = 0
        self._last: Row = ()

    def add(self, row: Row) -> list[Record]:
        """Add a row; returns a full batch, or nothing."""
        body = b'%s,"after":%s}' % (self._opening, self._encoder.image(row))
        record = self._encoder.record(body, row, copy_headers(self._lsn, self.rows + 1))
        size = metered_size(record)
        full: list[Record] = []
        reserve = BATCH_BYTES_MAX - _KEY_RESERVE
        if len(self._batch) == BATCH_RECORDS_MAX or (self._batch and self._size + size > reserve):
            full = self.flush()
        self.rows += 1
        self._batch.append(record)
        self._size += size
        self._last = row
        return full

    def flush(self) -> list[Record]:
        """Return what was gathered."""
        batch, self._batch, self._size = self._batch, [], 0
        if batch:
            key = self._encoder.key_texts(self._last)
            headers = copy_headers(self._lsn, self.rows, key)
            batch[-1] = self._encoder.record(batch[-1].body, self._last, headers)
        return batch


async def copy_table(
    database: Database,
    table: Table,
    stream: TableStream,
    snapshot: Snapshot,
    copied: CopyPosition,
    on_rows: Callable[[int, int], None],
) -> None:
    """Append all rows that the stream lacks, and then the mark that the copy is complete.

    `on_rows` gets the rows of the stream, and the bytes of each append.
    """
    columns = [(column.name, column.type_oid) for column in table.columns]
    named = stream.table is not None
    encoder = RowEncoder(table.full_name, columns, table.key, copying=True, named=named)
    batches = CopyBatches(encoder, copied.lsn, copied.rows)
    if copied.key is None:
        await stream.append([Record(table.declaration(named=named), copy_headers(copied.lsn, 0))])
    async with (
        _Appending(stream, on_rows) as appending,
        copied_blocks(database, table, snapshot.name, copied.key) as blocks,
    ):
        async for rows in copied_rows(blocks):
            for row in rows:
                if full := batches.add(row):
                    appended = batches.rows - 1  # the row that did not fit is in the next one
                    await appending.add(full, appended)
        if rest := batches.flush():
            await appending.add(rest, batches.rows)
        await appending.flush()
    end = b'%s,"txn":"copy %s"}' % (encoder.opening(b"e"), copied.lsn.encode())
    await stream.append([Record(end, copy_end_headers(copied.lsn, snapshot.lsn))])
    stream.state = Position(copied.lsn, -1)


class _Appending:
    """Appends batches while the next ones are gathered."""

    def __init__(self, stream: TableStream, on_rows: Callable[[int, int], None]) -> None:
        self._stream = stream
        self._on_rows = on_rows
        self._gathered: list[list[Record]] = []
        self._rows = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Appending:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def add(self, batch: list[Record], rows: int) -> None:
        """Add a batch, after which the stream has so many rows; waits if enough are gathered."""
        self._gathered.append(batch)
        self._rows = rows
        if len(self._gathered) >= _BATCHES_TOGETHER or self._task is None:
            await self._send()

    async def flush(self) -> None:
        """Wait until everything is appended."""
        await self._send()
        await self._settle()

    async def _send(self) -> None:
        await self._settle()
        if self._gathered:
            batches, self._gathered = self._gathered, []
            self._task = asyncio.create_task(self._append(batches, self._rows))

    async def _settle(self) -> None:
        if self._task is not None:
            await self._task
            self._task = None

    async def _append(self, batches: list[list[Record]], rows: int) -> None:
        await self._stream.append_each(batches)
        self._on_rows(rows, sum(metered_size(record) for batch in batches for record in batch))
