"""Writes usage to storage, and reads it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from streamfold.errors import DataCorruptError
from streamfold.model.configs import StorageClass
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op
from streamfold.store.log.shares import Share
from streamfold.store.mount import Mount
from streamfold.store.rows import UsageRow
from streamfold.store.usage.held_bytes import HeldBytes
from streamfold.store.usage.recorder import ACCOUNT, Hour, UsageRecorder

logger = logging.getLogger(__name__)

#: Hours for which usage is kept: 31 days, a little more than one query may span.
USAGE_HOURS: Final = 31 * 24
#: Rows in one commit.
_ROWS_AT_ONCE = 500


class UsageKeeper:
    """The usage of one mount. Only upkeep calls it, except `appended` and `load`."""

    def __init__(self, mount: Mount, recorder: UsageRecorder, now: Callable[[], int]) -> None:
        self.recorder = recorder
        self.held = HeldBytes(mount, now)
        self._mount = mount
        self._now = now
        #: Basins with a stream, and the bytes of their streams, as seen in this round.
        self._seen: dict[str, int] = {}
        self._counting = True
        self._forgotten = 0

    def appended(self, shares: Sequence[Share]) -> None:
        """Count the streams' shares of a durable commit."""
        amounts: dict[tuple[str, StorageClass], tuple[int, int]] = {}
        for share in shares:
            if share.chunks:
                owner = share.log.basin, share.log.row.config.storage_class
                batches, metered = amounts.get(owner, (0, 0))
                amounts[owner] = batches + len(share.batches), metered + share.metered
                self.held.appended(share)
        for (basin, kind), (batches, metered) in amounts.items():
            self.recorder.record_appends(basin, kind, batches, metered)

    # A round through all streams, which upkeep makes anyway.

    def begin_round(self) -> None:
        self._seen = {}
        self._counting = self.held.by_basin is None
        self._forgotten = self.held.forgotten

    async def visit(self, basin: str, stream_id: int) -> None:
        """Record that the stream exists; in the first round, count what it holds."""
        held = self._seen.setdefault(basin, 0)
        if self._counting:
            self._seen[basin] = held + (await self.held.settle(basin, stream_id)).held
            await self.held.write(at_least=_ROWS_AT_ONCE)

    def end_round(self) -> None:
        if self._counting and self._forgotten == self.held.forgotten:
            self.held.by_basin = dict(self._seen)

    async def write(self) -> None:
        """Make the counts durable, and record what is held."""
        await self.held.settle_all()
        self._observe()
        self.recorder.fold()
        changed = [key for key, hour in self.recorder.hours.items() if hour.changed]
        for first in range(0, len(changed), _ROWS_AT_ONCE):
            await self._write_hours(changed[first : first + _ROWS_AT_ONCE])
        self.recorder.drop_written()

    async def forget_stream(self, stream_id: int) -> list[Op]:
        """The rows to delete together with a stream, whose chunks are deleted already."""
        return await self.held.forget(stream_id)

    async def forget_basin(self, basin: str) -> list[Op]:
        """The rows to delete together with a basin, whose streams are deleted already."""
        self.recorder.forget(basin)
        if self.held.by_basin is not None:
            self.held.by_basin.pop(basin, None)
        return await self._deletions(basin, keys.usage_end(basin))

    async def load(self, basin: str, first: int, end: int) -> dict[int, Hour]:
        """The hours from `first` up to `end`, written or not."""
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
                known = hours.get(number)
                hours[number] = hour if known is None or hour.merged else _sum(known, hour)
        return hours

    def _observe(self) -> None:
        self.recorder.observe_basins(self._seen)
        if self.held.by_basin is not None:
            for basin in self._seen:
                self.recorder.observe_storage(basin, self.held.by_basin.get(basin, 0))

    async def _write_hours(self, changed: list[tuple[str, int]]) -> None:
        """Write whole hours, so that writing them again is harmless if the outcome is unknown."""
        ops: list[Op] = []
        written: list[Hour] = []
        for basin, number in changed:
            hour = self.recorder.hours[(basin, number)]
            ops += await self._merge(basin, number, hour)
            if not hour.merged:
                continue
            hour.changed = False
            written.append(hour)
            ops.append((keys.usage(basin, number), rows.encode(hour.row())))
        try:
            await self._mount.committer.write(ops)
        except BaseException:
            for hour in written:
                hour.changed = True
            raise

    async def _merge(self, basin: str, number: int, hour: Hour) -> list[Op]:
        """Add what storage has of this hour, once; returns the deletions of hours that are too old."""
        if hour.merged:
            return []
        value = await self._mount.engine.get(keys.usage(basin, number))
        if value is not None:
            hour.merge(_decode(basin, value))
        elif basin != ACCOUNT and await self._mount.basin(basin) is None:
            hour.changed = False  # the basin is deleted: its usage can no longer be read
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
    """The row in `value`; an empty one if it cannot be read, because counting must continue."""
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
