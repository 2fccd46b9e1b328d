"""Lines of COPY as encoded appends: the same records as those that are encoded one by one.

A kernel writes them without an object for each row, many times as fast as `RowEncoder`, which encodes
them without it. To load it takes most of a second, to compile it the first time several: the ingester
begins with that before it copies a large table, and otherwise after the first block of a copy.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from streamfold.extras import needing_extra
from streamfold.follow.clients.client import EncodedBatch, encoded_header, encoded_record
from streamfold.ingest.postgres.copy_source import split_line
from streamfold.ingest.postgres.encoding.rows import RowEncoder
from streamfold.ingest.table_stream import copy_headers
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    Header,
    Record,
    metered_size,
)
from streamfold.records.plain import parse_record
from streamfold.records.protobuf import fields

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.ingest.postgres.encoding.copy_kernel import LineWriter
    from streamfold.ingest.postgres.libpq_kernel import LineFiller

#: Bytes that an append keeps for the header with the key, in its last record; longer keys are weighed.
KEY_RESERVE: Final = 8 << 10
_ROOM: Final = BATCH_BYTES_MAX - KEY_RESERVE
#: Bytes of a table, with its indexes, from which the kernel is worth its loading.
KERNEL_FROM: Final = 4 << 20
#: Seconds that a copy waits for the kernel; one that is compiled takes longer, and comes later.
_LOAD_WAIT: Final = 3.0
#: Bytes of a block that the kernel gets; a larger one holds a long line, for which Python is as quick.
_BLOCK_MAX: Final = 4 << 20

_log = logging.getLogger(__name__)
_writer: type[LineWriter] | None = None
_filler: type[LineFiller] | None = None
_loading: threading.Thread | None = None
_waited = False


def load_kernel() -> bool:
    """Compile the kernel, or load it from the disk cache; False if numba is missing or broken."""
    global _writer, _filler
    if _writer is not None:
        return True
    try:
        with needing_extra("postgres"):
            from streamfold.ingest.postgres.encoding.copy_kernel import LineWriter
            from streamfold.ingest.postgres.libpq_kernel import LineFiller, compile_fill
        compile_fill()
        written = LineWriter([(b'{"a":', 0, True)], b"}", b"-", 0).write(
            b"1\n", 0, number=1, records=1, room=100
        )
        if written.records != 1:
            raise RuntimeError("the kernel refuses a valid line")
    except Exception as error:  # whatever a broken compiler raises, Python encodes the rows
        _log.warning("rows of the first copy are encoded in plain Python, slower: %s", error)
        return False
    _writer, _filler = LineWriter, LineFiller
    return True


def line_filler() -> LineFiller | None:
    """Return what takes lines of COPY from libpq by a kernel; None while that is not loaded."""
    return None if _filler is None else _filler()


def start_loading() -> None:
    """Load the kernel in a thread, once."""
    global _loading
    if _loading is None:
        _loading = threading.Thread(target=load_kernel, name="load the kernel for copies")
        _loading.start()


async def wait_for_kernel() -> None:
    """Load the kernel; returns when it is ready, or will take longer. Waits for it once."""
    global _waited
    start_loading()
    if not _waited and _loading is not None:
        _waited = True
        await asyncio.to_thread(_loading.join, _LOAD_WAIT)


class EncodedLines:
    """Gathers lines into encoded appends; the last record of each says where to resume."""

    def __init__(self, encoder: RowEncoder, lsn: str, rows: int) -> None:
        self._encoder = encoder
        self._opening = encoder.opening(b"r")
        self._lsn = lsn
        self.rows = rows
        #: Encoded records of the batch; the last part is the last record. Those of the kernel are
        #: where it has written them, so many bytes.
        self._parts: list[bytes | memoryview] = []
        self._used = 0
        self._count = self._metered = 0
        #: The last line of the batch.
        self._last = b""
        self._kernel: LineWriter | None = None

    def add(self, lines: bytes) -> Iterator[EncodedBatch]:
        """Yield the batches that these whole lines fill."""
        if _writer is not None and self._kernel is None:
            self._kernel = self._line_writer(_writer)
        # The encoder names the row that is not UTF-8; the kernel does not look.
        quick = self._kernel is not None and len(lines) <= _BLOCK_MAX and _is_utf8(lines)
        at = 0
        while at < len(lines):
            if self._kernel is not None and quick:
                at = self._write(self._kernel, lines, at)
                if at == len(lines):
                    break
                if self._count == BATCH_RECORDS_MAX:
                    yield self.flush()
                    continue
            # The batch is full, or the kernel leaves this line to the encoder.
            end = lines.index(b"\n", at)
            if self._add_line(lines[at:end]):
                at = end + 1
            else:
                yield self.flush()

    def _line_writer(self, made: type[LineWriter]) -> LineWriter:
        position, copied = copy_headers(self._lsn, 0)
        overhead = metered_size(Record(b"", (position, copied))) - len(copied.value)
        before = self._opening + b',"after":{'
        columns = []
        for at, (name, type_oid) in enumerate(self._encoder.columns):
            columns.append((before + name, type_oid, at in self._encoder.key))
            before = b","
        return made(columns, b"}}", encoded_header(position), overhead)

    def _write(self, kernel: LineWriter, lines: bytes, at: int) -> int:
        """Add lines by the kernel; returns the offset of the first that it did not add."""
        written = kernel.write(
            lines,
            at,
            number=self.rows + 1,
            records=BATCH_RECORDS_MAX - self._count,
            room=_ROOM - self._metered,
            used=self._used,
        )
        if written.records:
            found = kernel.out.data[self._used : self._used + written.size]
            self._parts += (found[: written.last], found[written.last :])
            self._used += written.size
            self._last = lines[written.line : written.next - 1]
            self._count += written.records
            self.rows += written.records
            self._metered += written.metered
        return written.next

    def _add_line(self, line: bytes) -> bool:
        """Add a line by the encoder; returns False, without an effect, if the batch is full."""
        row = split_line(line)
        body = b'%s,"after":%s}' % (self._opening, self._encoder.image(row))
        record = self._encoder.record(body, row, copy_headers(self._lsn, self.rows + 1))
        size = metered_size(record)
        full = self._count == BATCH_RECORDS_MAX or not has_room(
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
        """Return what was gathered."""
        parts, count, metered = self._parts, self._count, self._metered
        self._parts, self._used, self._count, self._metered = [], 0, 0, 0
        if parts:
            row, last = split_line(self._last), bytes(parts[-1])
            ((_, start, end),) = fields(last, 0, len(last))
            body = parse_record(last, start, end).body
            headers = copy_headers(self._lsn, self.rows, self._encoder.key_texts(row))
            record = self._encoder.record(body, row, headers)
            parts[-1] = encoded_record(record)
            metered += _key_size(headers[-1])
        return EncodedBatch(count, metered, b"".join(parts), self.rows)


def has_room(metered: int, key: Sequence[str]) -> bool:
    """Return whether an append may have so many metered bytes if its last record has this key."""
    # The kernel does not weigh keys: it leaves those that could exceed the reserve to the encoder.
    key_size = _key_size(copy_headers("", 0, key)[-1])
    return metered + max(KEY_RESERVE, key_size) <= BATCH_BYTES_MAX


def _key_size(header: Header) -> int:
    return metered_size(Record(b"", (header,))) - metered_size(Record(b""))


def _is_utf8(lines: bytes) -> bool:
    try:
        return lines.isascii() or bool(lines.decode())
    except UnicodeDecodeError:
        return False
