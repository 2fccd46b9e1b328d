"""The first copy of a table: all rows as of one snapshot, in the order of the key, resumable.

A copy that was interrupted continues after the last key in the stream, in a newer snapshot; the changes
since the first snapshot follow it all the same, so rows that were copied earlier catch up, and for the
others they repeat what the copy has.

Where client and database allow it, lines of COPY become encoded appends at once (`encoded_copy`);
otherwise rows become records one by one. The records are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from streamfold.ingest.cancellation import raise_if_cancelled
from streamfold.ingest.errors import CopyStaleError, SourceUnusableError
from streamfold.ingest.postgres.catalog import (
    Table,
    find_table,
    identifiers,
    is_altered,
    shape,
)
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.copy_source import Snapshot, copied_blocks, split_line
from streamfold.ingest.postgres.encoding.encoded_copy import (
    KERNEL_FROM,
    EncodedLines,
    has_room,
    line_filler,
    wait_for_kernel,
)
from streamfold.ingest.postgres.encoding.rows import RowEncoder
from streamfold.ingest.postgres.pgoutput import Row
from streamfold.ingest.table_stream import (
    CopyPosition,
    Position,
    TableStream,
    copy_end_headers,
    copy_headers,
)
from streamfold.model.records import BATCH_RECORDS_MAX, Record, metered_size

#: Bytes of appends that are sent together; as many are gathered meanwhile. After the last of them the
#: server waits for its disk, and for the next: fewer would let it wait more often, and commit more.
_BYTES_TOGETHER: Final = 16 << 20
#: The encoding of databases whose texts may be any bytes, which JSON cannot hold.
_ANY_BYTES: Final = "SQL_ASCII"

B = TypeVar("B")


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
        if self._batch and (
            len(self._batch) == BATCH_RECORDS_MAX
            or not has_room(self._size + size, self._encoder.key_texts(row))
        ):
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

    `on_rows` gets the rows of the stream, and the bytes of each append. Raises CopyStaleError instead
    of the mark if the columns are no longer those of `table`.
    """
    columns = [(column.name, column.type_oid) for column in table.columns]
    named = stream.table is not None
    encoder = RowEncoder(table.full_name, columns, table.key, copying=True, named=named)
    if copied.key is None:
        await stream.append([Record(table.declaration(named=named), copy_headers(copied.lsn, 0))])
    quick = stream.takes_encoded and await asyncio.to_thread(_is_unicode, database)
    copy = _copy_encoded if quick else _copy_rows
    try:
        await copy(_Source(database, table, snapshot.name, copied), encoder, stream, on_rows)
    except SourceUnusableError:
        await asyncio.to_thread(_check_columns, database, table)  # a change of them explains it
        raise
    await asyncio.to_thread(_check_columns, database, table)
    end = b'%s,"txn":"copy %s"}' % (encoder.opening(b"e"), copied.lsn.encode())
    await stream.append([Record(end, copy_end_headers(copied.lsn, snapshot.lsn))])
    stream.state = Position(copied.lsn, -1)


def _check_columns(database: Database, table: Table) -> None:
    """Raise CopyStaleError if COPY may have seen other types than those that its rows were read as.

    A snapshot does not keep the types: COPY sees those of the moment when it locks the table. And it
    sees no row of a table that was written anew after the snapshot.
    """
    with database.query() as cursor:
        found = find_table(cursor, table.full_name)
    now = {} if found is None else shape(found.columns)
    # Columns that were added are not in the copy; the log declares them with their first change.
    if not shape(table.columns).items() <= now.items():
        raise CopyStaleError(table.full_name, "its columns changed during the copy")
    if found is not None and is_altered(table.marks, found.marks):
        raise CopyStaleError(table.full_name, "it was altered during the copy")


class _Source(NamedTuple):
    """What is left to copy."""

    database: Database
    table: Table
    snapshot: str
    copied: CopyPosition

    def blocks(self) -> Any:
        values = identifiers(column.name for column in self.table.columns)
        return copied_blocks(
            self.database, self.table, self.snapshot, self.copied.key, values, line_filler
        )


def _is_unicode(database: Database) -> bool:
    with database.query() as cursor:
        return bool(cursor.connection.info.parameter_status("server_encoding") != _ANY_BYTES)


async def _copy_encoded(
    source: _Source,
    encoder: RowEncoder,
    stream: TableStream,
    on_rows: Callable[[int, int], None],
) -> None:
    gathered = EncodedLines(encoder, source.copied.lsn, source.copied.rows)
    async with _Appending(stream.append_encoded, on_rows) as appending, source.blocks() as found:
        async for lines in found:
            # Not for a table of one block; the size of one with partitions is not known.
            if source.table.size_bytes >= KERNEL_FROM or gathered.rows > source.copied.rows:
                await wait_for_kernel()
            for batch in gathered.add(lines):
                await appending.add(batch, batch.metered, batch.rows)
        if (rest := gathered.flush()).record_count:
            await appending.add(rest, rest.metered, rest.rows)
        await appending.flush()


async def _copy_rows(
    source: _Source,
    encoder: RowEncoder,
    stream: TableStream,
    on_rows: Callable[[int, int], None],
) -> None:
    batches = CopyBatches(encoder, source.copied.lsn, source.copied.rows)
    async with _Appending(stream.append_each, on_rows) as appending, source.blocks() as found:
        async for lines in found:
            for line in lines[:-1].split(b"\n"):
                if full := batches.add(split_line(line)):
                    appended = batches.rows - 1  # the row that did not fit is in the next one
                    await appending.add(full, sum(map(metered_size, full)), appended)
        if rest := batches.flush():
            await appending.add(rest, sum(map(metered_size, rest)), batches.rows)
        await appending.flush()


class _Appending(Generic[B]):
    """Appends batches while the next ones are gathered."""

    def __init__(
        self, append: Callable[[list[B]], Awaitable[None]], on_rows: Callable[[int, int], None]
    ) -> None:
        self._append_all = append
        self._on_rows = on_rows
        self._gathered: list[B] = []
        self._rows = self._size = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Appending[B]:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def add(self, batch: B, size: int, rows: int) -> None:
        """Add a batch, after which the stream has so many rows; waits if enough are gathered."""
        self._gathered.append(batch)
        self._rows = rows
        self._size += size
        if self._size >= _BYTES_TOGETHER:
            await self._send()

    async def flush(self) -> None:
        """Wait until everything is appended."""
        await self._send()
        await self._settle()

    async def _send(self) -> None:
        await self._settle()
        raise_if_cancelled()
        if self._gathered:
            batches, self._gathered = self._gathered, []
            size, self._size = self._size, 0
            self._task = asyncio.create_task(self._append(batches, size, self._rows))

    async def _settle(self) -> None:
        if self._task is not None:
            await self._task
            self._task = None

    async def _append(self, batches: list[B], size: int, rows: int) -> None:
        await self._append_all(batches)
        self._on_rows(rows, size)
