"""Bytes of records that streams hold, as metered: exact, and right again after a crash.

A stream's HeldRow tells the bytes of its stored chunks below `counted_to`. It is committed together
with every deletion of chunks, so that the two cannot differ. Appends do not write it: what they added
is known in memory until upkeep writes it, and after a crash it is counted from the chunks themselves,
of which the row says where to start.

Records below the trim point count until their chunk is deleted: that long they are held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from streamfold.errors import DataCorruptError, StorageError
from streamfold.store import keys, rows
from streamfold.store.engine.engine import Op, Row
from streamfold.store.log import chunks
from streamfold.store.log.stream_log import Share
from streamfold.store.mount import Mount
from streamfold.store.rows import HeldRow, LevelRow
from streamfold.store.upkeep.live_bytes import stored_size

logger = logging.getLogger(__name__)

_MINUTE_MS = 60_000
#: Hours for which a stream's levels are kept, minute by minute: a busy stream's take 400 bytes each.
LEVEL_HOURS = 24
#: Rows in one commit, and rows that wait for one at most.
_ROWS_AT_ONCE = 500
#: Streams appended to between two passes of upkeep, more than which are counted from storage.
_FRESH_MAX = 100_000


@dataclass(slots=True)
class _Fresh:
    """What was appended since the stream's row was brought up to date."""

    basin: str
    first_seq_num: int
    end_seq_num: int
    metered: int


class HeldBytes:
    """Bytes held per stream and per basin, in one session. All but `appended` is for upkeep alone."""

    def __init__(self, mount: Mount, now: Callable[[], int]) -> None:
        self._session = mount
        self._now = now
        self._fresh: dict[int, _Fresh] = {}
        self._unwritten: dict[int, HeldRow] = {}
        #: Changes to rows of hours that are over, to go with the unwritten rows.
        self._past: list[Op] = []
        #: Bytes by basin; None until all streams were visited once.
        self.by_basin: dict[str, int] | None = None
        #: How often it was forgotten what was appended: all streams must be visited again then.
        self.forgotten = 0

    def appended(self, share: Share) -> None:
        """The chunks of `share` have become durable."""
        end = share.chunks[-1].last_seq_num + 1
        fresh = self._fresh.get(share.log.id)
        if fresh is None:
            if len(self._fresh) >= _FRESH_MAX:
                self._fresh.clear()
                self.by_basin = None
                self.forgotten += 1
            first = share.chunks[0].first_seq_num
            self._fresh[share.log.id] = _Fresh(share.log.basin, first, end, share.metered)
        else:
            fresh.end_seq_num = end
            fresh.metered += share.metered

    async def row(self, stream_id: int) -> HeldRow:
        """What is known of the stream, except for what is `unsettled`."""
        if row := self._unwritten.get(stream_id):
            return row
        value = await self._session.engine.get(keys.held(stream_id))
        try:
            return rows.decode(value, HeldRow) if value else HeldRow()
        except DataCorruptError as error:
            logger.error("what stream %d holds is counted anew: %s", stream_id, error)
            return HeldRow()

    def unsettled(self, stream_id: int, row: HeldRow) -> int:
        """Bytes that came after `row` was brought up to date."""
        fresh = self._fresh.get(stream_id)
        return fresh.metered if fresh and fresh.first_seq_num >= row.counted_to else 0

    async def settle(self, basin: str, stream_id: int) -> HeldRow:
        """Bring the stream's row up to date with its chunks, in memory."""
        fresh = self._fresh.get(stream_id)
        end, metered = (fresh.end_seq_num, fresh.metered) if fresh else (None, 0)
        row = await self.row(stream_id)
        counted_to, held = row.counted_to, row.held
        if fresh is None or fresh.first_seq_num < counted_to:
            counted_to, found = await self._count(stream_id, counted_to, end)
            held += found
        else:
            if fresh.first_seq_num > counted_to:
                held += (await self._count(stream_id, counted_to, fresh.first_seq_num))[1]
            held += metered
        if fresh is not None and end is not None:
            counted_to = max(counted_to, end)
            self._take(stream_id, fresh, end, metered)
        if counted_to == row.counted_to:
            return row
        return await self._replace(basin, stream_id, row, counted_to, held)

    async def settle_all(self) -> None:
        """Bring the rows of all streams up to date that were appended to, and write them."""
        for stream_id, fresh in list(self._fresh.items()):
            await self.settle(fresh.basin, stream_id)
            await self.write(at_least=_ROWS_AT_ONCE)
        await self.write()

    async def write(self, *, at_least: int = 1) -> None:
        """Write what is unwritten, if there are `at_least` so many rows of it."""
        if len(self._unwritten) < at_least:
            return
        ops: list[Op] = [
            (keys.held(stream_id), rows.encode(row)) for stream_id, row in self._unwritten.items()
        ]
        await self._session.committer.write(ops + self._take_past())
        self._unwritten.clear()

    async def delete(self, basin: str, stream_id: int, page: list[Row]) -> None:
        """Delete the chunks of `page`, in one commit with what is held after it."""
        row = await self.row(stream_id)
        gone = sum(
            _metered(value) for key, value in page if keys.chunk_last_seq_num(key) < row.counted_to
        )
        row = await self._replace(basin, stream_id, row, row.counted_to, max(0, row.held - gone))
        ops: list[Op] = [(key, None) for key, _ in page]
        ops.append((keys.held(stream_id), rows.encode(row)))
        live, size = self._session.live, stored_size(page)
        await self._session.committer.write(ops + live.row_without(size) + self._take_past())
        self._unwritten.pop(stream_id, None)
        live.remove(size)

    async def forget(self, stream_id: int) -> list[Op]:
        """What to delete together with the stream; its chunks are deleted already."""
        self._fresh.pop(stream_id, None)
        self._unwritten.pop(stream_id, None)
        ops: list[Op] = [(keys.held(stream_id), None)]
        return ops + await self._levels_before(stream_id, keys.levels_end(stream_id))

    async def _replace(
        self, basin: str, stream_id: int, row: HeldRow, counted_to: int, held: int
    ) -> HeldRow:
        minute = max(self._now() // _MINUTE_MS, row.hour * 60)  # clocks may go back, hours may not
        following = advance(row, counted_to, held, minute)
        if following.hour != row.hour:
            if row.course.levels:
                self._past.append((keys.level(stream_id, row.hour), rows.encode(row.course)))
            horizon = keys.level(stream_id, max(0, following.hour - LEVEL_HOURS))
            self._past += await self._levels_before(stream_id, horizon)
        self._unwritten[stream_id] = following
        if self.by_basin is not None:
            self.by_basin[basin] = self.by_basin.get(basin, 0) + held - row.held
        return following

    def _take_past(self) -> list[Op]:
        past, self._past = self._past, []
        return past

    def _take(self, stream_id: int, fresh: _Fresh, end: int, metered: int) -> None:
        """`metered` bytes up to `end` are counted; more may have come meanwhile."""
        if fresh.end_seq_num == end:
            del self._fresh[stream_id]
        else:
            fresh.first_seq_num = end
            fresh.metered -= metered

    async def _count(self, stream_id: int, start: int, end: int | None) -> tuple[int, int]:
        """Where the stored chunks from `start` on end, before `end`, and their bytes."""
        if end is not None and end <= start:
            return start, 0
        last = keys.chunks_end(stream_id) if end is None else keys.chunk(stream_id, end)
        metered = 0
        async with aclosing(self._session.engine.scan(keys.chunk(stream_id, start), last)) as pages:
            async for page in pages:
                metered += sum(_metered(value) for _, value in page)
                start = keys.chunk_last_seq_num(page[-1][0]) + 1
        return start, metered

    async def _levels_before(self, stream_id: int, end: bytes) -> list[Op]:
        """Deletions of the stream's past hours up to the key `end`."""
        ops: list[Op] = []
        async with aclosing(self._session.engine.scan(keys.level(stream_id, 0), end)) as pages:
            async for page in pages:
                ops += [(key, None) for key, _ in page]
        return ops


def advance(row: HeldRow, counted_to: int, held: int, minute: int) -> HeldRow:
    """`row` after a change in `minute` (since the Unix epoch)."""
    hour, within = divmod(minute, 60)
    if held == row.held and hour != row.hour:
        hour, course = row.hour, row.course  # no change of level, so none of its course
    elif hour == row.hour:
        course = LevelRow(row.course.opening, {**row.course.levels, within: held})
    else:
        course = LevelRow(row.held, {within: held})
    return HeldRow(counted_to, held, hour, course)


def _metered(value: bytes) -> int:
    """Bytes of a chunk's records; none if it cannot be read, when it is counted and when it goes."""
    try:
        return chunks.decode(value).metered
    except StorageError:
        return 0
