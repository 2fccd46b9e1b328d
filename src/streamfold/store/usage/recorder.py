"""Counts operations and bytes by the minute, writes them to storage and reads them back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from streamfold.errors import DataCorruptError
from streamfold.model.access_tokens import GROUP_OPERATIONS, Group, Right
from streamfold.model.configs import StorageClass
from streamfold.model.metrics import AccountMetrics, BasinMetrics
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, first_row, readable_pages
from streamfold.store.log.shares import Share
from streamfold.store.mount import Mount
from streamfold.store.rows import StreamRow, UsageRow
from streamfold.store.usage.busy_streams import BusyStreams
from streamfold.store.usage.held_bytes import HeldBytes

logger = logging.getLogger(__name__)

_MINUTE_MS = 60_000
#: Maximum hours of basins kept while they cannot be written. A basin's hour takes a few KiB.
_HOURS_MAX = 10_000

#: The owner of usage that does not belong to any basin.
ACCOUNT: Final = ""

#: Operations of the account group, and reads of a basin's configuration, count for the account.
_OF_ACCOUNT: Final = GROUP_OPERATIONS[Group.ACCOUNT][0] | GROUP_OPERATIONS[Group.ACCOUNT][1]
_ACCOUNT_OPS: Final = {
    operation: f"{AccountMetrics.ACCOUNT_OPS}/{operation}"
    for operation in Right
    if operation in _OF_ACCOUNT or operation is Right.GET_BASIN_CONFIG
}
#: Appends, including commands, and reads are counted where they happen.
_COUNTED_ELSEWHERE: Final = {Right.APPEND, Right.READ, Right.TRIM, Right.FENCE}
_BASIN_OPS: Final = {
    operation: f"{BasinMetrics.BASIN_OPS}/{operation}"
    for operation in Right
    if operation not in _ACCOUNT_OPS and operation not in _COUNTED_ELSEWHERE
}
_APPEND_OPS: Final = {kind: f"{BasinMetrics.APPEND_OPS}/{kind}" for kind in StorageClass}
_UNARY_READS: Final = f"{BasinMetrics.READ_OPS}/unary"
_STREAMING_READS: Final = f"{BasinMetrics.READ_OPS}/streaming"
_APPENDED: Final = f"{BasinMetrics.APPEND_THROUGHPUT}/bytes"
_READ: Final = f"{BasinMetrics.READ_THROUGHPUT}/bytes"
#: Hours for which usage is kept: 31 days, slightly more than one query may span.
USAGE_HOURS: Final = 31 * 24
#: Rows in one commit.
_ROWS_AT_ONCE = 500


@dataclass(slots=True)
class Hour:
    """Usage of the account or of a basin in one hour."""

    #: By name and minute (0 to 59).
    amounts: dict[str, dict[int, int]] = field(default_factory=dict)
    storage: int | None = None
    basins: set[str] = field(default_factory=set)
    #: Whether some of it is unwritten.
    changed: bool = False
    #: Whether it includes the stored usage of this hour.
    merged: bool = False

    def add(self, amounts: dict[str, dict[int, int]]) -> None:
        for name, by_minute in amounts.items():
            mine = self.amounts.setdefault(name, {})
            for minute, amount in by_minute.items():
                mine[minute] = mine.get(minute, 0) + amount

    def merge(self, row: UsageRow) -> None:
        """Add the usage that an earlier process has written."""
        self.add(row.amounts)
        self.basins.update(row.basins)
        if self.storage is None:
            self.storage = row.storage

    def row(self) -> UsageRow:
        return UsageRow(self.amounts, self.storage, tuple(sorted(self.basins)))


class UsageRecorder:
    """Records usage since it was last written. Outlives mounts, because storage may fail meanwhile.

    The hot path calls the `record_*` methods, which only read the clock and add.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._minute = 0
        #: Amounts in the current minute, by basin and name.
        self._open: dict[str, dict[str, int]] = {}
        #: By basin and hour since the Unix epoch.
        self.hours: dict[tuple[str, int], Hour] = {}
        self._overflowing = False
        self.busy = BusyStreams(now)

    def record_operation(self, operation: Right, basin: str | None = None) -> None:
        """Count an operation on `basin` or on the account.

        Ignores appends and reads, which are counted when they become durable or are delivered.
        """
        if name := _ACCOUNT_OPS.get(operation):
            self._record(ACCOUNT, name, 1)
        elif basin and (name := _BASIN_OPS.get(operation)):
            self._record(basin, name, 1)

    def record_appends(self, basin: str, kind: StorageClass, batches: int, metered: int) -> None:
        """Count `batches` that have become durable, with `metered` bytes in total."""
        self._record(basin, _APPEND_OPS[kind], batches)
        self._record(basin, _APPENDED, metered)

    def record_read(self, basin: str, metered: int) -> None:
        """Count a single read of `metered` bytes."""
        self._record(basin, _UNARY_READS, 1)
        self._record(basin, _READ, metered)

    def record_read_session(self, basin: str) -> None:
        """Count a read session: one operation, however long it lasts."""
        self._record(basin, _STREAMING_READS, 1)

    def record_delivery(self, basin: str, metered: int) -> None:
        """Count `metered` bytes delivered by a read session."""
        self._record(basin, _READ, metered)

    def observe_storage(self, basin: str, size: int) -> None:
        """Record that the streams of `basin` currently hold `size` bytes of records."""
        if hour := self._hour(basin, self._now() // _MINUTE_MS // 60):
            hour.changed |= hour.storage != size
            hour.storage = size

    def observe_basins(self, basins: Iterable[str]) -> None:
        """Record that these basins currently have streams."""
        if hour := self._hour(ACCOUNT, self._now() // _MINUTE_MS // 60):
            former = len(hour.basins)
            hour.basins.update(basins)
            hour.changed |= len(hour.basins) > former

    def fold(self) -> None:
        """Add the counts of the current minute to `hours`."""
        hour_number, minute = divmod(self._minute, 60)
        for basin, amounts in self._open.items():
            if hour := self._hour(basin, hour_number):
                hour.add({name: {minute: amount} for name, amount in amounts.items()})
                hour.changed = True
        self._open.clear()

    def forget(self, basin: str) -> None:
        """Drop the counts of a deleted basin."""
        self._open.pop(basin, None)
        for key in [key for key in self.hours if key[0] == basin]:
            del self.hours[key]

    def drop_written(self) -> None:
        """Drop past hours that are already in storage."""
        current = self._now() // _MINUTE_MS // 60
        over = [
            key
            for key, hour in self.hours.items()
            if not hour.changed and (key[1] != current or not hour.merged)
        ]
        for key in over:
            del self.hours[key]
        self._overflowing = False

    def _record(self, basin: str, name: str, amount: int) -> None:
        minute = self._now() // _MINUTE_MS
        if minute != self._minute:
            self.fold()
            self._minute = minute
        amounts = self._open.get(basin)
        if amounts is None:
            amounts = self._open[basin] = {}
        amounts[name] = amounts.get(name, 0) + amount

    def _hour(self, basin: str, number: int) -> Hour | None:
        """Return the hour to count in, or None if too many hours are waiting to be written."""
        hour = self.hours.get((basin, number))
        if hour is None and len(self.hours) < _HOURS_MAX:
            hour = self.hours[(basin, number)] = Hour()
        if hour is None and not self._overflowing:
            self._overflowing = True
            logger.warning("cannot count usage: %d hours wait to be written", _HOURS_MAX)
        return hour


class UsageKeeper:
    """The usage of one mount. Only upkeep calls it, except `appended` and `load`."""

    def __init__(self, mount: Mount, recorder: UsageRecorder, now: Callable[[], int]) -> None:
        self.recorder = recorder
        self.held_bytes = HeldBytes(mount, now)
        self._mount = mount
        self._now = now
        #: Basins that had a stream when last checked.
        self._basins: list[str] = []

    def appended(self, shares: Sequence[Share]) -> None:
        """Count the streams' shares of a durable commit."""
        amounts: dict[tuple[str, StorageClass], tuple[int, int]] = {}
        busy, held_bytes = self.recorder.busy, self.held_bytes
        busy.advance()
        for share in shares:
            if share.chunks:
                log = share.log
                owner = log.basin, log.row.config.storage_class
                batches, metered = amounts.get(owner, (0, 0))
                amounts[owner] = batches + len(share.batches), metered + share.metered
                held_bytes.appended(share)
                busy.count(share)
        for (basin, kind), (batches, metered) in amounts.items():
            self.recorder.record_appends(basin, kind, batches, metered)

    async def measure(self) -> None:
        """Find the basins that have streams, and count what all streams hold unless that is known."""
        self._basins = list(await self.first_streams())
        if self.held_bytes.by_basin is None:
            await self.held_bytes.count_all()

    async def first_streams(self) -> dict[str, StreamRow]:
        """Return the basins that have streams, each with its first stream."""
        streams: dict[str, StreamRow] = {}
        engine = self._mount.engine
        async with aclosing(
            readable_pages(engine, keys.basins_from("", after=False), keys.BASINS_END, first=100)
        ) as pages:
            async for page in pages:
                for key, _ in page:
                    name = keys.basin_name(key)
                    start = keys.streams_from(name, "", after=False)
                    if first := await first_row(engine, start, keys.streams_end(name)):
                        streams[name] = rows.decode(first[1], StreamRow)
        return streams

    async def write(self) -> None:
        """Make the counts durable, and record the bytes held."""
        await self.held_bytes.settle_all()
        self._observe()
        self.recorder.fold()
        changed = [key for key, hour in self.recorder.hours.items() if hour.changed]
        for first in range(0, len(changed), _ROWS_AT_ONCE):
            await self._write_hours(changed[first : first + _ROWS_AT_ONCE])
        self.recorder.drop_written()

    async def forget_stream(self, stream_id: int) -> list[Op]:
        """Return the rows to delete together with a stream whose chunks are already deleted."""
        return await self.held_bytes.forget(stream_id)

    async def forget_basin(self, basin: str) -> list[Op]:
        """Return the rows to delete together with a basin whose streams are already deleted."""
        self.recorder.forget(basin)
        if self.held_bytes.by_basin is not None:
            self.held_bytes.by_basin.pop(basin, None)
        return await self._deletions(basin, keys.usage_end(basin))

    async def load(self, basin: str, first: int, end: int) -> dict[int, Hour]:
        """Return the hours from `first` up to `end`, written or not."""
        self.recorder.fold()
        hours: dict[int, Hour] = {}
        if first >= end:
            return hours
        span = keys.usage(basin, first), keys.usage(basin, end)
        async with aclosing(self._mount.engine.scan(*span, first=1000)) as pages:
            async for page in pages:
                for key, value in page:
                    hours.setdefault(keys.hour(key), Hour()).merge(_decode(basin, value))
        for (name, number), hour in self.recorder.hours.items():
            if name == basin and first <= number < end:
                written = hours.get(number)
                hours[number] = hour if written is None or hour.merged else _sum(written, hour)
        return hours

    def _observe(self) -> None:
        self.recorder.observe_basins(self._basins)
        if self.held_bytes.by_basin is not None:
            for basin in self._basins:
                self.recorder.observe_storage(basin, self.held_bytes.by_basin.get(basin, 0))

    async def _write_hours(self, changed: list[tuple[str, int]]) -> None:
        """Write whole hours, so that repeating a write is harmless if its outcome is unknown.

        If the stored part of an hour is damaged, that hour waits for the next call without delaying
        others.
        """
        ops: list[Op] = []
        written: list[Hour] = []
        try:
            for basin, number in changed:
                hour = self.recorder.hours[(basin, number)]
                try:
                    ops += await self._merge(basin, number, hour)
                except DataCorruptError as error:
                    logger.debug("usage of %r is not written: %s", basin or "the account", error)
                    continue
                if not hour.merged:
                    continue
                hour.changed = False
                written.append(hour)
                ops.append((keys.usage(basin, number), rows.encode(hour.row())))
            await self._mount.committer.write(ops)
        except BaseException:
            for hour in written:
                hour.changed = True
            raise

    async def _merge(self, basin: str, number: int, hour: Hour) -> list[Op]:
        """Add the stored usage of this hour, once. Returns deletions of hours that are too old."""
        if hour.merged:
            return []
        value = await self._mount.engine.get(keys.usage(basin, number))
        if value is not None:
            hour.merge(_decode(basin, value))
        elif basin != ACCOUNT and await self._mount.basin(basin) is None:
            hour.changed = False  # the basin is deleted, so its usage can no longer be read
            return []
        hour.merged = True
        return await self._deletions(basin, keys.usage(basin, max(0, number - USAGE_HOURS)))

    async def _deletions(self, basin: str, end: bytes) -> list[Op]:
        ops: list[Op] = []
        async with aclosing(self._mount.engine.scan(keys.usage(basin, 0), end)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops


def _decode(basin: str, value: bytes) -> UsageRow:
    """Decode a row. Returns an empty one if it cannot be read, because counting must continue."""
    try:
        return rows.decode(value, UsageRow)
    except DataCorruptError as error:
        logger.error("an hour of usage of %r cannot be read: %s", basin or "the account", error)
        return UsageRow()


def _sum(stored: Hour, unwritten: Hour) -> Hour:
    stored.add(unwritten.amounts)
    stored.basins |= unwritten.basins
    stored.storage = stored.storage if unwritten.storage is None else unwritten.storage
    return stored
