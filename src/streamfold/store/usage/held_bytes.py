"""Counts the metered bytes of records that streams hold: exactly, even after a crash.

A stream's HeldRow has the bytes of its stored chunks below `counted_to`. It is committed together with
every deletion of chunks, so the two always agree. Appends do not write it: their bytes are counted in
memory until upkeep writes them, and recounted after a crash from the chunks at `counted_to` and later.

Records below the trim point count until their chunk is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain, islice

import msgspec

from streamfold.errors import DataCorruptError, StorageError
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, Row, TableDamagedError, readable_pages
from streamfold.store.log import chunks
from streamfold.store.log.shares import Share
from streamfold.store.mount import Mount
from streamfold.store.rows import FreshBytes, HeldRow, HeldTotalsRow, LevelRow, StreamRow
from streamfold.store.upkeep.live_bytes import stored_size

logger = logging.getLogger(__name__)

_MINUTE_MS = 60_000
#: Hours for which a stream's levels are kept by the minute. A busy stream takes 400 bytes per hour.
LEVEL_HOURS = 24
#: Streams settled in one commit. Two commits with appends to 1,000 streams each may come before it
#: and two after it. If this were lower, appends that keep going to different streams would outpace
#: these commits.
_ROWS_AT_ONCE = 4_000
#: Streams after which other tasks get the event loop: a few milliseconds' work.
_STREAMS_AT_ONCE = 500
#: Streams counted from storage before others may be settled.
_COUNTED_AT_ONCE = 64
#: Rows per read. Such reads run concurrently.
_READ_TOGETHER = 500
#: Minimum group size for a scan. A scan takes 3 us per row, where a point read takes 20 us, but it
#: accesses every table. Ids belong to one group if they differ by at most this gap. A scan also
#: reads the rows in between.
_SCANNED_FROM = 256
_SCANNED_GAP = 4
#: Maximum basins whose totals are kept when the store is closed, because they are one row.
_BASINS_MAX = 10_000
#: Streams whose appends are counted in memory. Beyond that, all streams are counted from storage.
#: Settling starts at half as many, so this happens only if appends to further streams come faster.
_FRESH_MAX = 100_000


class _Counting:
    """An ongoing count of all streams, while streams are appended to and settled."""

    def __init__(self) -> None:
        #: Bytes of the streams counted so far, by basin.
        self.by_basin: dict[str, int] = {}
        #: One bit per stream id.
        self._included = bytearray()

    def includes(self, stream_id: int) -> bool:
        place, bit = divmod(stream_id, 8)
        return place < len(self._included) and bool(self._included[place] >> bit & 1)

    def include(self, basin: str, stream_id: int, size: int) -> None:
        """Count a stream that holds `size` bytes."""
        place, bit = divmod(stream_id, 8)
        if place >= len(self._included):
            self._included.extend(bytes(max(place - len(self._included) + 1, 4096)))
        self._included[place] |= 1 << bit
        self.by_basin[basin] = self.by_basin.get(basin, 0) + size

    def change(self, basin: str, stream_id: int, before: HeldRow, size: int) -> None:
        """Adjust the count for a change of the stream's row from `before` to `size` bytes.

        A stream without a row is included from now on, because it may be too new for the count to
        find it.
        """
        if self.includes(stream_id):
            self.by_basin[basin] += size - before.size
        elif not before.counted_to:
            self.include(basin, stream_id, size)


class HeldBytes:
    """The bytes held per stream and per basin, in one mount.

    Upkeep settles streams in one task while another deletes chunks or counts all streams, so each
    step that changes rows holds the lock.
    """

    def __init__(self, mount: Mount, now: Callable[[], int]) -> None:
        self._mount = mount
        self._now = now
        self._fresh: dict[int, FreshBytes] = {}
        self._unwritten: dict[int, HeldRow] = {}
        #: Changes to rows of past hours, to be written together with the unwritten rows.
        self._past: list[Op] = []
        #: Bytes by basin; None until all streams have been visited once.
        self.by_basin: dict[str, int] | None = None
        #: How often append counts were dropped. After each time, all streams must be visited again.
        self.forgotten = 0
        #: Set while there are many streams to settle.
        self.many = asyncio.Event()
        self._changing = asyncio.Lock()
        self._counting: _Counting | None = None
        self._restored = False
        #: Whether the totals are stored for the next opening. After that, no row may change.
        self._closing = False

    def appended(self, share: Share) -> None:
        """Count the chunks of `share`, which have become durable."""
        end = share.chunks[-1].last_seq_num + 1
        fresh = self._fresh.get(share.log.id)
        if fresh is None:
            if len(self._fresh) >= _FRESH_MAX:
                self._fresh.clear()
                self.by_basin = None
                self.forgotten += 1
            first = share.chunks[0].first_seq_num
            self._fresh[share.log.id] = FreshBytes(share.log.basin, first, end, share.metered)
            if len(self._fresh) >= _FRESH_MAX // 2:
                self.many.set()
        else:
            fresh.end_seq_num = end
            fresh.metered += share.metered

    async def row(self, stream_id: int) -> HeldRow:
        """Return the stream's row, which does not include its `unsettled` bytes."""
        if row := self._unwritten.get(stream_id):
            return row
        return self._row(stream_id, await self._mount.engine.get(keys.stream_bytes(stream_id)))

    def _row(self, stream_id: int, value: bytes | None) -> HeldRow:
        if value is None:  # nor does it have rows of past hours
            return HeldRow(levels_from=self._now() // _MINUTE_MS // 60)
        try:
            return rows.decode(value, HeldRow)
        except DataCorruptError as error:
            logger.error("recounting the bytes of stream %d: %s", stream_id, error)
            return HeldRow()

    def unsettled(self, stream_id: int, row: HeldRow) -> int:
        """Return the bytes appended since `row` was updated."""
        fresh = self._fresh.get(stream_id)
        return fresh.metered if fresh and fresh.first_seq_num >= row.counted_to else 0

    async def settle(self, basin: str, stream_id: int) -> HeldRow:
        """Update the stream's row in memory, from its chunks."""
        async with self._changing:
            return await self._settle(basin, stream_id, await self.row(stream_id))

    async def _settle(self, basin: str, stream_id: int, row: HeldRow) -> HeldRow:
        fresh = self._fresh.get(stream_id)
        end, metered = (fresh.end_seq_num, fresh.metered) if fresh else (None, 0)
        counted_to, size = row.counted_to, row.size
        if fresh is None or fresh.first_seq_num < counted_to:
            counted_to, counted = await self._count(stream_id, counted_to, end)
            size += counted
        else:
            if fresh.first_seq_num > counted_to:
                size += (await self._count(stream_id, counted_to, fresh.first_seq_num))[1]
            size += metered
        if fresh is not None and end is not None:
            counted_to = max(counted_to, end)
            self._take(stream_id, fresh, end, metered)
        if counted_to == row.counted_to:
            return row
        return await self._replace(basin, stream_id, row, counted_to, size)

    async def settle_all(self) -> None:
        """Update and write the rows of all streams that were appended to."""
        streams = iter(sorted(self._fresh))
        while some := list(islice(streams, _ROWS_AT_ONCE)):
            await self._settle_some(some)
        async with self._changing:
            await self._write()

    async def settle_many(self) -> None:
        """Settle all streams if there are many to settle, which bounds their number."""
        await self.restore()
        self.many.clear()
        if len(self._fresh) >= _FRESH_MAX // 2:
            await self.settle_all()

    async def _settle_some(self, stream_ids: Sequence[int]) -> None:
        async with self._changing:
            if self._closing:
                return
            for number, (stream_id, row) in enumerate((await self._rows(stream_ids)).items()):
                if fresh := self._fresh.get(stream_id):
                    await self._settle(fresh.basin, stream_id, row)
                if number % _STREAMS_AT_ONCE == _STREAMS_AT_ONCE - 1:
                    await asyncio.sleep(0)
            await self._write()

    async def _rows(self, stream_ids: Sequence[int]) -> dict[int, HeldRow]:
        """Return the rows of these streams, read together."""
        unread = sorted(stream_id for stream_id in stream_ids if stream_id not in self._unwritten)
        values: dict[int, bytes | None] = {}
        alone: list[int] = []
        for group in _neighbours(unread):
            if len(group) >= _SCANNED_FROM:
                values |= await self._scan(group)
            else:
                alone += group
        # Each of these reads yields to all appends in progress after a few rows. A single read
        # would settle streams more slowly than appends come in.
        parts = [alone[n : n + _READ_TOGETHER] for n in range(0, len(alone), _READ_TOGETHER)]
        values_read = await asyncio.gather(*[self._values(part) for part in parts])
        values |= zip(alone, chain.from_iterable(values_read), strict=True)
        return {
            key: self._unwritten.get(key) or self._row(key, values.get(key)) for key in stream_ids
        }

    async def _values(self, stream_ids: Sequence[int]) -> list[bytes | None]:
        """Return the stored rows. A damaged row is returned as bytes that cannot be decoded."""
        engine = self._mount.engine
        try:
            return await engine.get_many(list(map(keys.stream_bytes, stream_ids)))
        except TableDamagedError:
            if len(stream_ids) == 1:
                return [b""]
        return [value for one in stream_ids for value in await self._values([one])]

    async def _scan(self, group: Sequence[int]) -> dict[int, bytes | None]:
        """Return the stored rows of a group of nearby ids, in id order."""
        values: dict[int, bytes | None] = dict.fromkeys(group)
        span = keys.stream_bytes(group[0]), keys.stream_bytes(group[-1] + 1)
        try:
            async with aclosing(self._mount.engine.scan(*span, first=_SCANNED_FROM)) as pages:
                async for page in pages:
                    for key, value in page:
                        if (stream_id := keys.stream_bytes_id(key)) in values:
                            values[stream_id] = value
        except TableDamagedError:
            return dict(zip(group, await self._values(group), strict=True))
        return values

    async def count_all(self) -> None:
        """Count the bytes that all streams hold, from their rows and newer chunks."""
        forgotten, counting = self.forgotten, _Counting()
        self._counting = counting
        span = keys.STREAMS_START, keys.STREAMS_END
        try:
            async with aclosing(readable_pages(self._mount.engine, *span, first=128)) as pages:
                async for page in pages:
                    # A few at a time, so that streams can be settled in between.
                    for first in range(0, len(page), _COUNTED_AT_ONCE):
                        await self._count_page(page[first : first + _COUNTED_AT_ONCE], counting)
            if forgotten == self.forgotten:
                self.by_basin = counting.by_basin
        finally:
            self._counting = None

    async def _count_page(self, page: list[Row], counting: _Counting) -> None:
        basins = {
            rows.decode(value, StreamRow).id: keys.stream_names(key)[0] for key, value in page
        }
        async with self._changing:
            for stream_id, row in (await self._rows(list(basins))).items():
                basin = basins[stream_id]
                if not counting.includes(stream_id):
                    settled = await self._settle(basin, stream_id, row)
                    if not counting.includes(stream_id):
                        counting.include(basin, stream_id, settled.size)
            await self._write(at_least=_ROWS_AT_ONCE)

    async def keep(self) -> None:
        """Store the totals, and the counts not yet in rows, because the store is being closed."""
        async with self._changing:
            if self.by_basin is None or len(self.by_basin) > _BASINS_MAX:
                return
            self._closing = True
            await self._write()
            row = HeldTotalsRow(self._mount.engine.epoch, self.by_basin, self._fresh)
            await self._mount.committer.write([(keys.HELD_TOTALS, rows.encode(row))])

    async def restore(self) -> None:
        """Restore what the previous opening stored at close. Call this before any other method."""
        async with self._changing:
            await self._restore()

    async def _restore(self) -> None:
        if self._restored:
            return
        try:
            value = await self._mount.engine.get(keys.HELD_TOTALS)
        except TableDamagedError:
            value = None  # all streams will be counted again
        self._restored = True
        if value is None:
            return
        totals = rows.decode(value, HeldTotalsRow)
        if totals.epoch != self._mount.engine.epoch - 1 or self.forgotten:
            return  # the store was not closed properly, or an earlier version has opened it since
        self.by_basin = totals.by_basin
        for stream_id, fresh in totals.fresh.items():
            if since := self._fresh.get(stream_id):
                since.first_seq_num = fresh.first_seq_num
                since.metered += fresh.metered
            else:
                self._fresh[stream_id] = fresh

    async def _write(self, *, at_least: int = 1) -> None:
        """Write the unwritten rows if there are at least `at_least`."""
        if len(self._unwritten) < at_least:
            return
        ops: list[Op] = [
            (keys.stream_bytes(stream_id), rows.encode(row))
            for stream_id, row in self._unwritten.items()
        ]
        await self._mount.committer.write(ops + self._take_past())
        self._unwritten.clear()

    async def delete(self, basin: str, stream_id: int, page: list[Row]) -> None:
        """Delete the chunks of `page`, in one commit with the updated row."""
        async with self._changing:
            await self._delete(basin, stream_id, page)

    async def _delete(self, basin: str, stream_id: int, page: list[Row]) -> None:
        row = await self.row(stream_id)
        gone = sum(
            _metered(value) for key, value in page if keys.chunk_last_seq_num(key) < row.counted_to
        )
        row = await self._replace(basin, stream_id, row, row.counted_to, max(0, row.size - gone))
        ops: list[Op] = [(key, None) for key, _ in page]
        ops.append((keys.stream_bytes(stream_id), rows.encode(row)))
        live, size = self._mount.live, stored_size(page)
        await self._mount.committer.write(ops + live.row_without(size) + self._take_past())
        self._unwritten.pop(stream_id, None)
        live.remove(size)

    async def forget(self, stream_id: int) -> list[Op]:
        """Return the rows to delete together with a stream whose chunks are already deleted."""
        async with self._changing:
            self._fresh.pop(stream_id, None)
            self._unwritten.pop(stream_id, None)
        ops: list[Op] = [(keys.stream_bytes(stream_id), None)]
        return ops + await self._levels_before(stream_id, keys.levels_end(stream_id))

    async def _replace(
        self, basin: str, stream_id: int, row: HeldRow, counted_to: int, size: int
    ) -> HeldRow:
        minute = max(self._now() // _MINUTE_MS, row.hour * 60)  # clocks may go back, hours may not
        following = advance(row, counted_to, size, minute)
        if following.hour != row.hour:
            if row.course.levels:
                self._past.append((keys.level(stream_id, row.hour), rows.encode(row.course)))
            horizon = max(1, following.hour - LEVEL_HOURS)
            if row.levels_from < horizon:
                self._past += await self._levels_before(stream_id, keys.level(stream_id, horizon))
                following = msgspec.structs.replace(following, levels_from=horizon)
        self._unwritten[stream_id] = following
        if self.by_basin is not None:
            self.by_basin[basin] = self.by_basin.get(basin, 0) + size - row.size
        elif self._counting is not None:
            self._counting.change(basin, stream_id, row, size)
        return following

    def _take_past(self) -> list[Op]:
        past, self._past = self._past, []
        return past

    def _take(self, stream_id: int, fresh: FreshBytes, end: int, metered: int) -> None:
        """Subtract `metered` bytes up to `end`, now in the row. More may have been added meanwhile."""
        if self._fresh.get(stream_id) is not fresh:
            return  # too many streams were appended to meanwhile, and all will be visited again
        if fresh.end_seq_num == end:
            del self._fresh[stream_id]
        else:
            fresh.first_seq_num = end
            fresh.metered -= metered

    async def _count(self, stream_id: int, start: int, end: int | None) -> tuple[int, int]:
        """Return the seq_num after the stored chunks from `start` to `end`, and their bytes.

        Unreadable chunks do not count.
        """
        if end is not None and end <= start:
            return start, 0
        last = keys.chunks_end(stream_id) if end is None else keys.chunk(stream_id, end)
        metered = 0
        first = keys.chunk(stream_id, start)
        async with aclosing(readable_pages(self._mount.engine, first, last, first=2)) as pages:
            async for page in pages:
                metered += sum(_metered(value) for _, value in page)
                start = keys.chunk_last_seq_num(page[-1][0]) + 1
        return start, metered

    async def _levels_before(self, stream_id: int, end: bytes) -> list[Op]:
        """Return operations that delete the stream's past hours up to the key `end`."""
        ops: list[Op] = []
        async with aclosing(self._mount.engine.scan(keys.level(stream_id, 0), end)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops


def advance(row: HeldRow, counted_to: int, size: int, minute: int) -> HeldRow:
    """Return `row` after a change in `minute` (since the Unix epoch)."""
    hour, within = divmod(minute, 60)
    if size == row.size and hour != row.hour:
        hour, course = row.hour, row.course  # the level did not change
    elif hour == row.hour:
        course = LevelRow(row.course.opening, {**row.course.levels, within: size})
    else:
        course = LevelRow(row.size, {within: size})
    return HeldRow(counted_to, size, hour, course, row.levels_from)


def _neighbours(stream_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield sorted `stream_ids` in groups close enough to be scanned together."""
    first = 0
    for at in range(1, len(stream_ids) + 1):
        if at == len(stream_ids) or stream_ids[at] - stream_ids[at - 1] > _SCANNED_GAP:
            yield stream_ids[first:at]
            first = at


def _metered(value: bytes) -> int:
    """Return the bytes of a chunk's records.

    An unreadable chunk counts as 0 bytes, both when counted and when deleted.
    """
    try:
        return chunks.decode(value).metered
    except StorageError:
        return 0
