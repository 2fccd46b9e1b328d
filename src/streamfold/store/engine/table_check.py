"""Finds the damaged part of a table, so that reads can return everything around it.

SlateDB checks each block of a table when it reads it, but its error names only the file. It fetches
many blocks at once, so the error also covers intact rows. This module reads the table's index and
checks every block. Its result is exact, up to one row (`_span`).

A table consists of data blocks, a filter, an index, statistics and a footer (slatedb 0.17, table format
2). Each block ends with the CRC-32 of the bytes before it. The index is a flatbuffer that lists each
block's offset and first key, shortened where possible. The manifest has the index's location, and the
table's first and last key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import struct
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from zlib import crc32

from streamfold.blob import BlobStore
from streamfold.errors import BlobNotFoundError
from streamfold.store.engine.engine import KeySpan
from streamfold.store.engine.location import DATABASE
from streamfold.store.engine.native import SlateManifest, TableView

logger = logging.getLogger(__name__)

#: A table's file name in a SlateDB error.
_TABLE: Final = re.compile(r"compacted/([0-9A-Z]{26}\.sst)")
#: Maximum bytes of adjacent blocks read at once.
_READ_BYTES: Final = 4 << 20
#: Maximum tables whose damage is kept in memory.
_TABLES_MAX: Final = 100
_U16, _U32, _I32, _U64 = (struct.Struct(f"<{kind}") for kind in "HIiQ")
_CHECKSUM: Final = struct.Struct(">I")

#: Reads part of a file, given name, offset and length. Returns fewer bytes at the end of the file.
ReadFile: TypeAlias = Callable[[str, int, int], Awaitable[bytes]]


class _UnreadableError(Exception):
    """Raised if bytes cannot be read or fail their checksum."""


@dataclass(frozen=True, slots=True)
class TableDamage:
    """The unreadable rows of one table."""

    #: Name of the file relative to the store's location.
    file: str
    #: Sorted and disjoint. Empty if only the filter is damaged, because scans do not need it.
    spans: tuple[KeySpan, ...]


class TableCheck:
    """Checks the tables of one database. `manifest` reads the newest manifest."""

    def __init__(
        self, manifest: Callable[[], Awaitable[SlateManifest | None]], read: ReadFile | None
    ) -> None:
        self._manifest = manifest
        self._read = read
        self._checking = asyncio.Lock()
        self._tables: dict[str, TableDamage] = {}

    @property
    def damaged(self) -> Collection[TableDamage]:
        """The damage found so far. A restored file counts as damaged until a restart."""
        return self._tables.values()

    async def damage(self, message: str, span: KeySpan) -> list[TableDamage]:
        """Return the damage in the table named by a SlateDB error, or else in all tables of `span`.

        Returns an empty list if a merge has replaced the table.
        """
        if self._read is None:
            return []
        named = _TABLE.search(message)
        async with self._checking:
            views = await self._views()
            if named:
                names = [named[1]]
            else:
                names = [name for name in views if _whole(views[name]).overlaps(span)]
            tables = [
                await self._check(name, views[name], named=bool(named))
                for name in names
                if name in views
            ]
        return [table for table in tables if table is not None]

    async def filter_damaged(self, view: TableView) -> bool:
        """Return whether a table's filter is unreadable. Scans do not need the filter."""
        if not view.filter_length:
            return False
        try:
            _checked(
                await self._bytes(f"compacted/{view.file}", view.filter_offset, view.filter_length)
            )
        except _UnreadableError:
            return True
        return False

    async def _views(self) -> dict[str, TableView]:
        """Return the tables of the newest manifest, by file name."""
        manifest = await self._manifest()
        return {} if manifest is None else {view.file: view for view in manifest.views}

    async def _check(self, name: str, view: TableView, *, named: bool) -> TableDamage | None:
        """Return a table's damage, or None if it is intact or was replaced meanwhile.

        If an error names a table without damaged blocks, its filter is damaged.
        """
        if name not in self._tables:
            spans = await self._damaged_spans(f"compacted/{name}", view)
            if spans:
                if name not in await self._views():
                    return None
            elif not named:
                return None
            if len(self._tables) >= _TABLES_MAX:
                del self._tables[next(iter(self._tables))]
            table = TableDamage(f"{DATABASE}/compacted/{name}", tuple(_merged(spans)))
            self._tables[name] = table
            logger.error(
                "the file %r is damaged: %s; see docs/operations/damaged-records.md",
                table.file,
                f"{len(table.spans)} of its parts cannot be read" if spans else "reads are slower",
            )
        return self._tables[name]

    async def _damaged_spans(self, file: str, view: TableView) -> list[KeySpan]:
        whole = _whole(view)
        try:
            index = _checked(await self._bytes(file, view.index_offset, view.index_length))
            blocks = _blocks(index)
        except _UnreadableError:
            return [whole]
        ends = [offset for offset, _ in blocks[1:]]
        ends.append(view.filter_offset if view.filter_length else view.index_offset)
        extents = [(offset, end - offset) for (offset, _), end in zip(blocks, ends, strict=True)]
        damaged: list[KeySpan] = []
        for group in _groups(extents):
            numbers = await self._damaged_blocks(file, extents, group)
            damaged += [_span(whole, blocks, number) for number in numbers]
        return damaged

    async def _damaged_blocks(
        self, file: str, extents: Sequence[tuple[int, int]], group: range
    ) -> list[int]:
        """Return the damaged blocks among `group`, which are adjacent."""
        start, last = extents[group[0]][0], extents[group[-1]]
        try:
            data = memoryview(await self._bytes(file, start, sum(last) - start))
        except _UnreadableError:
            if len(group) == 1:
                return list(group)
            parts = [
                await self._damaged_blocks(file, extents, range(number, number + 1))
                for number in group
            ]
            return [number for part in parts for number in part]

        def check() -> list[int]:
            return [
                number
                for number in group
                if not _is_whole(data[extents[number][0] - start :][: extents[number][1]])
            ]

        return await asyncio.to_thread(check)

    async def _bytes(self, file: str, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes of the file."""
        if self._read is None:
            raise _UnreadableError
        try:
            data = await self._read(file, offset, length)
        except (OSError, BlobNotFoundError) as error:
            raise _UnreadableError from error
        if len(data) != length:
            raise _UnreadableError
        return data


def reader_of(folder: Path | None, files: BlobStore | None) -> ReadFile | None:
    """Return a function that reads the database's files, or None if the database is in memory."""
    if folder is not None:

        def read(name: str, offset: int, length: int) -> bytes:
            descriptor = os.open(folder / name, os.O_RDONLY)
            try:
                return os.pread(descriptor, length, offset)
            finally:
                os.close(descriptor)

        async def read_local(name: str, offset: int, length: int) -> bytes:
            return await asyncio.to_thread(read, name, offset, length)

        return read_local
    return None if files is None else files.get_range


def _whole(view: TableView) -> KeySpan:
    """Return the key span of a table."""
    return KeySpan(view.first_key or b"", (view.last_key or b"\xff") + b"\x00")


def _span(whole: KeySpan, blocks: Sequence[tuple[int, bytes]], number: int) -> KeySpan:
    """Return the keys that are unreadable if this block is damaged.

    Includes the first key of the next block, if it has a row, because SlateDB looks for it in both.
    """
    start = blocks[number][1] if number else whole.start
    end = blocks[number + 1][1] + b"\x00" if number + 1 < len(blocks) else whole.end
    return KeySpan(start, end)


def _merged(spans: Sequence[KeySpan]) -> Iterator[KeySpan]:
    """Yield sorted `spans`, joining those that touch or overlap."""
    current: KeySpan | None = None
    for span in spans:
        if current is not None and span.start <= current.end:
            current = KeySpan(current.start, max(current.end, span.end))
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def _groups(extents: Sequence[tuple[int, int]]) -> Iterator[range]:
    """Yield groups of adjacent blocks to read at once."""
    first, size = 0, 0
    for number, (_, length) in enumerate(extents):
        if size and size + length > _READ_BYTES:
            yield range(first, number)
            first, size = number, 0
        size += length
    if extents:
        yield range(first, len(extents))


def _is_whole(block: memoryview | bytes) -> bool:
    if len(block) <= _CHECKSUM.size:
        return False
    checksum: int = _CHECKSUM.unpack(block[-_CHECKSUM.size :])[0]
    return crc32(block[: -_CHECKSUM.size]) == checksum


def _checked(block: bytes) -> bytes:
    """Return a block's content without its checksum. Raises _UnreadableError if it is damaged."""
    if not _is_whole(block):
        raise _UnreadableError
    return block[: -_CHECKSUM.size]


def _blocks(index: bytes) -> list[tuple[int, bytes]]:
    """Decode each block's offset and first key from the index flatbuffer."""
    try:
        metas = _pointed(index, _field(index, _pointed(index, 0), 0))
        count: int = _U32.unpack_from(index, metas)[0]
        return [_block(index, _pointed(index, metas + 4 + 4 * n)) for n in range(count)]
    except (struct.error, IndexError) as error:
        raise _UnreadableError from error


def _block(index: bytes, table: int) -> tuple[int, bytes]:
    at = _field(index, table, 0)
    offset: int = _U64.unpack_from(index, at)[0] if at else 0
    key = _pointed(index, _field(index, table, 1))
    length: int = _U32.unpack_from(index, key)[0]
    return offset, index[key + 4 : key + 4 + length]


def _pointed(buffer: bytes, at: int) -> int:
    """Return the position that the offset stored at `at` points to."""
    return at + int(_U32.unpack_from(buffer, at)[0])


def _field(buffer: bytes, table: int, number: int) -> int:
    """Return the position of a flatbuffer table's field, or 0 if it has its default value."""
    layout = table - int(_I32.unpack_from(buffer, table)[0])
    if 4 + 2 * number >= int(_U16.unpack_from(buffer, layout)[0]):
        return 0
    relative = int(_U16.unpack_from(buffer, layout + 4 + 2 * number)[0])
    return table + relative if relative else 0
