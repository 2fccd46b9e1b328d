"""Reads rows from SlateDB. Returns all intact rows, even when other blocks are damaged."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from streamfold.errors import (
    DataCorruptError,
    DeviceFailedError,
    StorageError,
    StorageFullError,
    StoreRecoveringError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.store.engine.disk_space import is_disk_full
from streamfold.store.engine.engine import KeySpan, Row, TableDamagedError
from streamfold.store.engine.native import (
    EngineError,
    SlateDatabase,
    code_of,
    message_of,
    number_of,
)
from streamfold.store.engine.table_check import TableCheck, TableDamage

#: Bytes that a scan, or an eager scan, fetches ahead of each table, and parallel fetches of an
#: eager scan.
_READ_AHEAD_BYTES = 1 << 20
_EAGER_BYTES = 4 << 20
_EAGER_TASKS = 2
#: Maximum rows and bytes of a page, not counting its last row. Each page has at most twice the rows
#: of the one before, so a caller that needs a few rows reads few.
_PAGE_ROWS = 1024
_PAGE_BYTES = 1 << 20
#: Part of the storage error for a file that ends too early.
_TOO_SHORT = "Requested range was invalid"


class SlateRows:
    """The read side of an engine on SlateDB."""

    def __init__(self, database: SlateDatabase, check: TableCheck) -> None:
        self._database = database
        self._check = check

    @property
    def damaged_files(self) -> tuple[str, ...]:
        return tuple(table.file for table in self._check.damaged)

    async def get(self, key: bytes) -> bytes | None:
        try:
            return await self._database.get(key)
        except EngineError as error:
            if not _is_damage(error):
                raise _read_failure(error) from error
        # On slow storage a table may have been replaced meanwhile. If only a filter is damaged, a
        # scan still works, because it does not need the filter.
        async with aclosing(self.scan(key, key + b"\x00", first=1)) as pages:
            async for page in pages:
                return page[0][1]
        return None

    async def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            return await self._database.get_many(keys)
        except EngineError as error:
            if not _is_damage(error):
                raise _read_failure(error) from error
        return [await self.get(key) for key in keys]

    async def scan(
        self,
        start: bytes,
        end: bytes,
        *,
        first: int = 2,
        descending: bool = False,
        eager: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        options = _DESCENDING if descending else _EAGER if eager else _ASCENDING
        #: What was left of the scan when SlateDB failed, and the damage at which the scan must
        #: stop.
        failed: KeySpan | None = None
        #: Whether the scan starts a little earlier. A scan that can find only the last key of a
        #: table reads the filter, and the filter may be all that is damaged.
        earlier = False
        damage = _nearest(self._check.damaged, KeySpan(start, end), descending=descending)
        while start < end:  # SlateDB rejects an empty range
            low, high = start, end
            if damage is not None and descending:
                low = max(start, damage.span.end)
            elif damage is not None:
                high = min(end, damage.span.start)
            try:
                if low < high:
                    begin = low[:-1] if earlier else low
                    async with aclosing(self._scan(begin, high, first, options)) as pages:
                        async for rows in pages:
                            page = [row for row in rows if row[0] >= low] if earlier else rows
                            if not page:
                                continue
                            last = page[-1][0]
                            if descending:
                                end = last
                            else:
                                start = last + b"\x00"
                            yield page
            except EngineError as error:
                if not _is_damage(error):
                    raise _read_failure(error) from error
                # A merge may have replaced tables during the scan, and replaced tables are deleted
                # after a while. So continue after the last row with the new tables. If it was
                # damage, it fails again.
                rest = KeySpan(start, high) if not descending else KeySpan(low, end)
                if failed == rest or code_of(error) != "data":
                    nearest = await self._damage(error, rest, descending=descending)
                    if nearest is None and earlier:
                        raise _read_failure(error) from error
                    damage, earlier = nearest or damage, nearest is None
                failed = rest
                continue
            if damage is not None:
                raise damage
            return

    async def _damage(
        self, error: EngineError, rest: KeySpan, *, descending: bool
    ) -> TableDamagedError | None:
        """Return the first damage that a scan of `rest` meets, or None if only a filter is damaged.

        Raises SlateDB's own error if no table is damaged.
        """
        try:
            tables = await self._check.damage(message_of(error), rest)
        except (EngineError, StreamfoldError) as unchecked:
            raise _read_failure(error) from unchecked
        if not tables:
            raise _read_failure(error) from error
        return _nearest(tables, rest, descending=descending)

    async def _scan(
        self, start: bytes, end: bytes, first: int, kind: _ScanKind
    ) -> AsyncGenerator[list[Row]]:
        ahead: asyncio.Future[tuple[list[Row], bool]] | None = None
        try:
            scan = await self._database.scan(start, end, **kind._asdict())
            rows, more = first, True
            page, more = await scan.page(rows, _PAGE_BYTES)
            while page:
                # From the second page on, an eager scan fetches the next page in the background.
                eager = more and rows != first and kind is _EAGER
                rows = min(2 * rows, _PAGE_ROWS)
                if eager:
                    ahead = asyncio.ensure_future(scan.page(rows, _PAGE_BYTES))
                yield page
                if not more:
                    return
                page, more = await (ahead or scan.page(rows, _PAGE_BYTES))
                ahead = None
        finally:
            if ahead is not None:
                ahead.cancel()


def _nearest(
    tables: Iterable[TableDamage], rest: KeySpan, *, descending: bool
) -> TableDamagedError | None:
    """Return the first damage that a scan of `rest` meets, or None if it meets none."""
    damages = [
        TableDamagedError.in_file(table.file, span)
        for table in tables
        for span in table.spans
        if span.overlaps(rest)
    ]
    if not damages:
        return None
    if descending:
        return max(damages, key=lambda damage: damage.span.end)
    return min(damages, key=lambda damage: damage.span.start)


class _ScanKind(NamedTuple):
    """How a scan reads: its direction, bytes to fetch ahead of each table, and parallel fetches."""

    descending: bool
    read_ahead: int
    fetches: int


_ASCENDING = _ScanKind(descending=False, read_ahead=_READ_AHEAD_BYTES, fetches=1)
_EAGER = _ScanKind(descending=False, read_ahead=_EAGER_BYTES, fetches=_EAGER_TASKS)
_DESCENDING = _ScanKind(descending=True, read_ahead=1, fetches=1)


def _is_damage(error: EngineError) -> bool:
    """Return whether a read failed because a file is damaged, too short or gone.

    SlateDB reports a file that is too short, or an unreadable sector, as a storage failure. It
    panics if less than a checksum is left of a block (upstream defect 22).
    """
    if code_of(error) == "unavailable":
        return number_of(error) == errno.EIO or _TOO_SHORT in message_of(error)
    return code_of(error) in ("data", "panic")


def _read_failure(error: EngineError) -> Exception:
    """Return the error that a failed read raises.

    SlateDB is closed once storage has failed. Then the caller may repeat the read.
    """
    failure = translated(error)
    if code_of(error) == "closed":
        return StoreRecoveringError(str(failure))
    return failure


def translated(error: EngineError | OSError) -> Exception:
    """Translate an error of SlateDB or of the disk into one of ours."""
    if code_of(error) == "fenced":
        return WriterFencedError()
    text = message_of(error)
    if code_of(error) == "device":
        return DeviceFailedError(text)
    if is_disk_full(error):
        return StorageFullError(
            f"the disk is full: {text}",
            public_message="the disk is full: free some space, trim or delete streams",
        )
    if isinstance(error, OSError):
        return StorageError(f"the disk failed: {text}")
    if code_of(error) == "data":
        return DataCorruptError(f"SlateDB cannot read what is stored: {text}")
    return StorageError(f"SlateDB failed: {text}")
