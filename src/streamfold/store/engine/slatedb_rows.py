"""Reads rows from SlateDB: everything that is whole, also beside damaged blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from slatedb.uniffi._slatedb_uniffi import slatedb as binding

from streamfold.errors import (
    DataCorruptError,
    StorageError,
    StorageFullError,
    StoreRecoveringError,
    StreamfoldError,
    WriterFencedError,
)
from streamfold.store.engine import slatedb_reads
from streamfold.store.engine.disk_space import is_disk_full
from streamfold.store.engine.engine import KeySpan, Row, TableDamagedError
from streamfold.store.engine.slatedb_binding import FAILURES
from streamfold.store.engine.table_check import TableCheck, TableDamage

#: Bytes that a scan fetches ahead of each table; the same for an eager scan, and its parallel fetches.
_READ_AHEAD_BYTES = 1 << 20
_EAGER_BYTES = 4 << 20
_EAGER_TASKS = 2
#: Rows and bytes of a page of a scan. SlateDB counts rows only, and the size of the next rows is
#: unknown: a page may have 32 MiB when rows of 1 MiB follow small ones; the next has fewer rows.
_PAGE_ROWS = 32
_PAGE_BYTES = 1 << 20
#: Signs of a damaged file in errors of storage: it ends too early, or the device cannot read it (EIO).
_DEVICE_DAMAGE = ("Requested range was invalid", "os error 5)")


class SlateRows:
    """The reading half of an engine on SlateDB."""

    def __init__(self, reads: slatedb_reads.Reads, check: TableCheck) -> None:
        self._reads = reads
        self._check = check

    @property
    def damaged_files(self) -> tuple[str, ...]:
        return tuple(table.file for table in self._check.known)

    async def get(self, key: bytes) -> bytes | None:
        try:
            return await self._reads.get(key)
        except FAILURES as error:
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
            return await self._reads.get_many(keys)
        except FAILURES as error:
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
        damage = _nearest(self._check.known, KeySpan(start, end), descending=descending)
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
                        async for found in pages:
                            page = [row for row in found if row[0] >= low] if earlier else found
                            if not page:
                                continue
                            last = page[-1][0]
                            if descending:
                                end = last
                            else:
                                start = last + b"\x00"
                            yield page
            except FAILURES as error:
                if not _is_damage(error):
                    raise _read_failure(error) from error
                # Tables that a merge replaced while the scan ran are deleted after a while: continue
                # after the last row with the tables that replaced them. Damage fails again.
                rest = KeySpan(start, high) if not descending else KeySpan(low, end)
                if failed == rest or not isinstance(error, binding.Error.Data):
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
        self, error: Any, rest: KeySpan, *, descending: bool
    ) -> TableDamagedError | None:
        """The damage that a scan of `rest` meets first; None if that is a filter.

        Raises what SlateDB said if no table is damaged.
        """
        try:
            tables = await self._check.damage(str(error), rest)
        except (*FAILURES, StreamfoldError) as unchecked:
            raise _read_failure(error) from unchecked
        if not tables:
            raise _read_failure(error) from error
        return _nearest(tables, rest, descending=descending)

    async def _scan(
        self, start: bytes, end: bytes, first: int, options: slatedb_reads.ScanOptions
    ) -> AsyncGenerator[list[Row]]:
        most, ahead = first, None
        try:
            rows = await self._reads.scan(start, end, options)
            page = await slatedb_reads.next_rows(rows, most)
            while page:
                # From the second page on, an eager scan fetches the next one in the background.
                wanted = len(page) == most
                if wanted and most != first and options is _EAGER:
                    most = _page_rows(page)
                    ahead = asyncio.ensure_future(slatedb_reads.next_large_page(rows, most))
                yield page
                if not wanted:
                    return
                if ahead is None:
                    most = _page_rows(page)
                    page = await slatedb_reads.next_rows(rows, most)
                else:
                    page, ahead = await ahead, None
        finally:
            if ahead is not None:
                ahead.cancel()


def _nearest(
    tables: Iterable[TableDamage], rest: KeySpan, *, descending: bool
) -> TableDamagedError | None:
    """The damage that a scan of `rest` meets first; None if there is none."""
    found = [
        TableDamagedError.in_file(table.file, span)
        for table in tables
        for span in table.spans
        if span.overlaps(rest)
    ]
    if not found:
        return None
    if descending:
        return max(found, key=lambda damage: damage.span.end)
    return min(found, key=lambda damage: damage.span.start)


def _page_rows(page: list[Row]) -> int:
    """Rows of the page after `page`: as many of its largest row as make a full page, but at most twice
    as many as before, because the next rows may be larger.
    """
    largest = max(len(value) for _, value in page) + 1
    return max(1, min(2 * len(page), _PAGE_ROWS, _PAGE_BYTES // largest))


def _scan_options(order: Any, read_ahead: int, tasks: int) -> slatedb_reads.ScanOptions:
    return slatedb_reads.ScanOptions(
        binding.ScanOptions(
            durability_filter=binding.DurabilityLevel.REMOTE,
            dirty=False,
            read_ahead_bytes=read_ahead,
            cache_blocks=False,
            max_fetch_tasks=tasks,
            order=order,
        )
    )


_ASCENDING = _scan_options(binding.IterationOrder.ASCENDING, _READ_AHEAD_BYTES, 1)
_EAGER = _scan_options(binding.IterationOrder.ASCENDING, _EAGER_BYTES, _EAGER_TASKS)
_DESCENDING = _scan_options(binding.IterationOrder.DESCENDING, 1, 1)
READ = binding.ReadOptions(
    durability_filter=binding.DurabilityLevel.REMOTE, dirty=False, cache_blocks=True
)


def _is_damage(error: Any) -> bool:
    """Whether a read failed because a file is damaged, too short, or gone.

    For SlateDB, a file that is too short and a sector that cannot be read are failures of storage.
    Where less than a checksum is left of a block, it panics (upstream defect 22).
    """
    if isinstance(error, binding.Error.Unavailable):
        return any(sign in str(error) for sign in _DEVICE_DAMAGE)
    return isinstance(error, (binding.Error.Data, binding.InternalError))


def _read_failure(error: Exception) -> Exception:
    """What a failed read raises. SlateDB is closed once storage has failed: reads may be repeated."""
    failure = translated(error)
    if isinstance(error, binding.Error.Closed) and not isinstance(failure, WriterFencedError):
        return StoreRecoveringError(str(failure))
    return failure


def translated(error: Exception) -> Exception:
    if isinstance(error, binding.Error.Closed) and error.reason == binding.CloseReason.FENCED:
        return WriterFencedError()
    text = getattr(error, "message", str(error))
    if is_disk_full(error):
        return StorageFullError(
            f"the disk is full: {text}",
            public_message="the disk is full: free some space, trim or delete streams",
        )
    if isinstance(error, OSError):
        return StorageError(f"the disk failed: {text}")
    if isinstance(error, binding.Error.Data):
        return DataCorruptError(f"SlateDB cannot read what is stored: {text}")
    return StorageError(f"SlateDB failed: {text}")
