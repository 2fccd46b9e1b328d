"""Makes the first copy of a table: all rows as of one snapshot, in key order. It can be resumed.

An interrupted copy continues after the last key in the stream, in a newer snapshot. All changes since
the first snapshot follow. They update rows that were copied earlier, and repeat what the copy already
has for other rows.

Native code writes most records straight from lines of COPY. `RowEncoder` writes rows with long keys,
the last row of each append, and rows with values that native code rejects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

from streamfold._native import LineWriter, append_records
from streamfold.follow.clients.client import EncodedBatch, encoded_header, encoded_record
from streamfold.ingest.errors import CopyStaleError, SourceUnusableError
from streamfold.ingest.postgres.catalog import (
    Table,
    find_table,
    identifiers,
    is_altered,
    shape,
)
from streamfold.ingest.postgres.connection import Database
from streamfold.ingest.postgres.copy_source import DatabaseSnapshot, copied_blocks, split_line
from streamfold.ingest.postgres.rows import RowEncoder
from streamfold.ingest.postgres.values import kind_of
from streamfold.ingest.table_stream import (
    CopyPosition,
    Position,
    TableStream,
    copy_end_headers,
    copy_headers,
    raise_if_cancelled,
)
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Header,
    Record,
    metered_size,
)

#: Bytes of appends sent together, while as many are gathered. If this were less, the server would
#: wait for its disk more often and make more commits.
_BYTES_TOGETHER: Final = 16 << 20
#: Bytes reserved in each append for the key header of its last record. Longer keys are measured.
KEY_RESERVE: Final = 8 << 10
_ROOM: Final = BATCH_BYTES_MAX - KEY_RESERVE
#: Maximum bytes of a key that native code writes. As JSON it takes at most six times as many, plus
#: quotes, which fits into `KEY_RESERVE`. Longer keys are measured.
_KEY_MAX: Final = 1 << 10
#: Maximum bytes of a block for native code. A larger one holds a long line, where Python is as fast.
_BLOCK_MAX: Final = 4 << 20


class EncodedLines:
    """Gathers lines into encoded appends. The last record of each append says where to resume."""

    def __init__(self, encoder: RowEncoder, lsn: str, rows: int) -> None:
        self._encoder = encoder
        self._opening = encoder.opening(b"r")
        self._lsn = lsn
        self.rows = rows
        #: Encoded records of the batch; the last part is the last record.
        self._parts: list[bytes | memoryview] = []
        self._count = self._metered = 0
        #: The last line of the batch.
        self._last = b""
        self._writer = self._line_writer()

    def add(self, lines: bytes) -> Iterator[EncodedBatch]:
        """Yield the batches that these whole lines fill."""
        at = 0
        while at < len(lines):
            if len(lines) <= _BLOCK_MAX:
                at = self._write(lines, at)
                if at == len(lines):
                    break
                if self._count == BATCH_RECORDS_MAX:
                    yield self.flush()
                    continue
            # The batch is full, or native code leaves this line to the encoder.
            end = lines.index(b"\n", at)
            if self._add_line(lines[at:end]):
                at = end + 1
            else:
                yield self.flush()

    def _line_writer(self) -> LineWriter:
        position, copied = copy_headers(self._lsn, 0)
        overhead = metered_size(Record(b"", (position, copied))) - len(copied.value)
        before = self._opening + b',"after":{'
        columns = []
        for at, (name, type_oid) in enumerate(self._encoder.columns):
            columns.append((before + name, kind_of(type_oid), at in self._encoder.key))
            before = b","
        header = encoded_header(position)
        return LineWriter(columns, b"}}", header, copied.name, overhead, _KEY_MAX)

    def _write(self, lines: bytes, at: int) -> int:
        """Add lines with native code. Returns the offset of the first line that it did not add."""
        content, following, records, metered, line, last = self._writer.write(
            lines, at, self.rows + 1, BATCH_RECORDS_MAX - self._count, max(0, _ROOM - self._metered)
        )
        if records:
            view = memoryview(content)
            self._parts += (view[:last], view[last:])
            self._last = lines[line : following - 1]
            self._count += records
            self.rows += records
            self._metered += metered
        return following

    def _add_line(self, line: bytes) -> bool:
        """Add a line with the encoder. Returns False and changes nothing if the batch is full."""
        row = split_line(line)
        body = b'%s,"after":%s}' % (self._opening, self._encoder.image(row))
        record = self._encoder.record(body, row, copy_headers(self._lsn, self.rows + 1))
        size = metered_size(record)
        full = self._count == BATCH_RECORDS_MAX or not _has_room(
            self._metered + size, self._encoder.key_texts(row)
        )
        if self._count and full:
            return False
        self._parts.append(encoded_record(record))
        self._last = line
        self._count += 1
        self.rows += 1
        self._metered += size
        return True

    def flush(self) -> EncodedBatch:
        """Return the gathered lines as a batch."""
        parts, count, metered = self._parts, self._count, self._metered
        self._parts, self._count, self._metered = [], 0, 0
        if parts:
            row = split_line(self._last)
            ((_, _, body),) = append_records(bytes(parts[-1]))
            headers = copy_headers(self._lsn, self.rows, self._encoder.key_texts(row))
            record = self._encoder.record(body, row, headers)
            parts[-1] = encoded_record(record)
            metered += _key_size(headers[-1])
        return EncodedBatch(count, metered, b"".join(parts), self.rows)


def _has_room(metered: int, key: Sequence[str]) -> bool:
    """Return whether an append of this size has room for the key in its last record."""
    # Native code does not measure keys. It leaves those that could exceed the reserve to the encoder.
    key_size = _key_size(copy_headers("", 0, key)[-1])
    return metered + max(KEY_RESERVE, key_size) <= BATCH_BYTES_MAX


def _key_size(header: Header) -> int:
    return metered_size(Record(b"", (header,))) - metered_size(Record(b""))


async def copy_table(
    database: Database,
    table: Table,
    stream: TableStream,
    snapshot: DatabaseSnapshot,
    copied: CopyPosition,
    on_rows: Callable[[int, int], None],
) -> None:
    """Append all rows that the stream lacks, then mark the copy as complete.

    Calls `on_rows` with the number of rows in the stream and the bytes of each append. Raises
    CopyStaleError instead of marking it if the columns differ from those of `table`.
    """
    columns = [(column.name, column.type_oid) for column in table.columns]
    named = stream.table is not None
    encoder = RowEncoder(table.full_name, columns, table.key, copying=True, named=named)
    if copied.key is None:
        await stream.append([Record(table.declaration(named=named), copy_headers(copied.lsn, 0))])
    lines = EncodedLines(encoder, copied.lsn, copied.rows)
    values = identifiers(column.name for column in table.columns)
    try:
        async with (
            _Appending(stream, on_rows) as appending,
            copied_blocks(database, table, snapshot.name, copied.key, values) as blocks,
        ):
            await _append_lines(blocks, lines, appending)
    except SourceUnusableError:
        await asyncio.to_thread(_check_columns, database, table)  # a changed column explains it
        raise
    await asyncio.to_thread(_check_columns, database, table)
    end = b'%s,"txn":"copy %s"}' % (encoder.opening(b"e"), copied.lsn.encode())
    await stream.append([Record(end, copy_end_headers(copied.lsn, snapshot.lsn))])
    stream.state = Position(copied.lsn, -1)


def _check_columns(database: Database, table: Table) -> None:
    """Raise CopyStaleError if COPY may have used other column types than `table` has.

    A snapshot does not freeze types: COPY uses those in force when it locks the table. It sees no rows
    of a table that was rewritten after the snapshot.
    """
    with database.query() as cursor:
        current = find_table(cursor, table.full_name)
    now = {} if current is None else shape(current.columns)
    # Added columns are not in the copy. The log declares them with their first change.
    if not shape(table.columns).items() <= now.items():
        raise CopyStaleError(table.full_name, "its columns changed during the copy")
    if current is not None and is_altered(table.marks, current.marks):
        raise CopyStaleError(table.full_name, "it was altered during the copy")


async def _append_lines(
    blocks: AsyncIterator[bytes], gathered: EncodedLines, appending: _Appending
) -> None:
    async for lines in blocks:
        for batch in gathered.add(lines):
            await appending.add(batch)
    if (rest := gathered.flush()).record_count:
        await appending.add(rest)
    await appending.flush()


class _Appending:
    """Appends batches while the next ones are gathered."""

    def __init__(self, stream: TableStream, on_rows: Callable[[int, int], None]) -> None:
        self._stream = stream
        self._on_rows = on_rows
        self._gathered: list[EncodedBatch] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Appending:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def add(self, batch: EncodedBatch) -> None:
        """Add a batch. Waits if enough have been gathered."""
        self._gathered.append(batch)
        self._size += batch.metered
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
            self._task = asyncio.create_task(self._append(batches, size))

    async def _settle(self) -> None:
        if self._task is not None:
            await self._task
            self._task = None

    async def _append(self, batches: list[EncodedBatch], size: int) -> None:
        await self._stream.append_encoded(batches)
        self._on_rows(batches[-1].rows, size)
