"""Reads rows from SlateDB: everything that is whole, also beside damaged blocks."""

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

#: Bytes that a scan fetches ahead of each table; the same for an eager scan, and its parallel fetches.
_READ_AHEAD_BYTES = 1 << 20
_EAGER_BYTES = 4 << 20
_EAGER_TASKS = 2
#: Rows and bytes of a page of a scan, beside the last row; each page has at most twice the rows of the
#: one before, so that a caller that needs a few rows reads few.
_PAGE_ROWS = 1024
_PAGE_BYTES = 1 << 20
#: Part of an error of storage: a file ends too early.
_TOO_SHORT = "Requested range was invalid"


class SlateRows:
    """The reading half of an engine on SlateDB."""

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
        # On slow storage a table may have been replaced meanwhile. If one is damaged, a scan does
        # without its filter.
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
        #: The rest of the scan when SlateDB failed, and the damage that the scan has to stop at.
        failed: KeySpan | None = None
        #: Whether the scan starts a little earlier: a scan that can find nothing but the last key of a
        #: table reads the filter, and that may be all that is damaged.
        earlier = False
        damage = _nearest(self._check.damaged, KeySpan(start, end), descending=descending)
        while start < end:  # SlateDB refuses an empty range
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
                # Tables that a merge replaced while the scan ran are deleted after a while: continue
                # after the last row with the tables that replaced them. Damage fails again.
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
        """The damage that a scan of `rest` meets first; None if that is a filter.

        Raises what SlateDB said if no table is damaged.
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
                # From the second page on, an eager scan fetches the next one in the background.
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
    """The damage that a scan of `rest` meets first; None if there is none."""
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
    """How a scan reads: bytes that it fetches ahead of each table, and fetches at the same time."""

    descending: bool
    read_ahead: int
    fetches: int


_ASCENDING = _ScanKind(descending=False, read_ahead=_READ_AHEAD_BYTES, fetches=1)
_EAGER = _ScanKind(descending=False, read_ahead=_EAGER_BYTES, fetches=_EAGER_TASKS)
_DESCENDING = _ScanKind(descending=True, read_ahead=1, fetches=1)


def _is_damage(error: EngineError) -> bool:
    """Whether a read failed because a file is damaged, too short, or gone.

    For SlateDB, a file that is too short and a sector that cannot be read are failures of storage.
    Where less than a checksum is left of a block, it panics (upstream defect 22).
    """
    if code_of(error) == "unavailable":
        return number_of(error) == errno.EIO or _TOO_SHORT in message_of(error)
    return code_of(error) in ("data", "panic")


def _read_failure(error: EngineError) -> Exception:
    """What a failed read raises. SlateDB is closed once storage has failed: reads may be repeated."""
    failure = translated(error)
    if code_of(error) == "closed":
        return StoreRecoveringError(str(failure))
    return failure


def translated(error: EngineError | OSError) -> Exception:
    """The error of ours for one of SlateDB, or of the disk."""
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
