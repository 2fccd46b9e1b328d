"""Reads forward through one stream: from memory at the tail, from storage behind it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from itertools import islice

from streamfold.errors import BlobNotFoundError, DataCorruptError
from streamfold.records import payload as payloads
from streamfold.store import keys
from streamfold.store.damage import StreamDamagedError, stream_damaged
from streamfold.store.engine.engine import Row, TableDamagedError
from streamfold.store.log import chunks
from streamfold.store.log.chunk_files import missing
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.requests import Allowance, ReadBatch
from streamfold.store.read.seek import (
    apply_retention,
    chunks_behind_damage,
    damaged_records,
    next_segment,
    own_part,
    segment_of,
    span_from,
)
from streamfold.store.rows import Segment

#: Bytes a reader must have read before storage prefetches for it.
_EAGER_FROM = 8 << 20
#: Metered bytes from which a compressed chunk is decompressed in a thread, at 1 ms per MiB.
_THREAD_FROM = 256 << 10
#: Metered bytes of chunks read from a file at once, and number of such reads in flight ahead of the
#: awaited one: one core decompresses as fast as another sends.
_LOAD_BYTES, _LOADS_AHEAD = 1 << 20, 2


class Cursor:
    """A position in a stream, with about 1 MiB of what follows read ahead.

    A few fast readers (`OpenScans.room_for_eager`) have 3 MiB. However slow its caller is, a cursor
    never holds more, and it holds less when there are many other readers. It finds newer records in
    memory if they are recent, else in storage.
    """

    def __init__(
        self,
        mount: Mount,
        log: StreamLog,
        seq_num: int,
        allowance: Allowance,
        key: SealingKey | None,
    ) -> None:
        self.seq_num = seq_num
        #: Whether the read has ended: the allowance is spent, or `until` was reached.
        self.ended = allowance.spent
        self._mount = mount
        self._log = log
        self._allowance = allowance
        self._key = key
        self._waiter = log.waiter()
        self._unlimited = allowance.unlimited
        self._ahead: deque[Chunk] = deque()
        self._scan: AsyncGenerator[list[Row]] | None = None
        #: The inherited segment that `_scan` reads; None = the stream's own chunks.
        self._segment: Segment | None = None
        self._eager = False
        #: Bytes read from storage.
        self._fetched = 0
        #: Last seq_nums of unread chunks behind a damaged block, newest first.
        self._behind_damage: list[int] = []
        #: Closes the scan that `give_up` dropped.
        self._closing: asyncio.Future[None] | None = None
        #: Chunks being prefetched from their files, in order.
        self._loading: deque[tuple[list[Chunk], asyncio.Task[list[Chunk]]]] = deque()

    @property
    def at_tail(self) -> bool:
        return self.seq_num >= self._log.durable.seq_num

    async def next(self, *, fill: bool) -> ReadBatch | None:
        """Return the next batch, or None at the tail or at the end of the read.

        Without `fill`, a batch ends where a stored chunk ends, so that nothing is decoded. With
        `fill`, it has as many records as the limits allow.
        """
        if self.resting:
            self._log.check_alive()
            return None
        if batch := self.live():
            return batch
        gathering = _Gathering(*self._allowance.of_one_batch())
        while not self.ended and gathering.has_room:
            if gathering.parts and not fill and not self._ahead:
                break  # deliver what is gathered instead of waiting for storage
            following = self.seq_num
            try:
                chunk = await self._peek()
            except DataCorruptError:
                if not gathering.parts:
                    raise
                break  # the next call raises it
            if gathering.parts and self.seq_num != following:
                self.seq_num = (
                    following  # trimmed meanwhile: a batch has no gap, so the next one skips
                )
                break
            if chunk is None:
                break
            if self._fits(chunk, gathering):
                gathering.add(chunk.payload, chunk.first_seq_num, chunk.records, chunk.metered)
                self.seq_num = chunk.last_seq_num + 1
            elif (gathering.parts and not fill) or not self._take_part(chunk, gathering):
                break
        batch = gathering.batch()
        if batch is not None:
            self._allowance.spend(batch)
            self.ended = self.ended or self._allowance.spent
        return batch

    def advanced(self, max_wait: float | None) -> Coroutine[None, None, bool]:
        """Wait for more records or the stream's close. Returns False on timeout."""
        return self._log.advanced(self.seq_num, self._waiter, max_wait)

    @property
    def resting(self) -> bool:
        """Whether everything was read, and no scan or chunk is held."""
        at_tail = self.seq_num >= self._log.durable.seq_num
        return at_tail and self._scan is None and not self._ahead

    def live(self) -> ReadBatch | None:
        """Return the records up to the tail as one batch that all followers share, if possible.

        Sealed records are never shared: each reader unseals them with its own key.
        """
        log, seq_num = self._log, self.seq_num
        tail = log.durable
        if seq_num >= tail.seq_num or self._ahead or not self._unlimited:
            return None
        if not log.hide_expired() or seq_num < log.readable_from:
            return None
        batch = self._mount.recent.to_tail(log.id, seq_num, tail)
        if batch is not None:
            log.check_alive()
            self.seq_num += batch.count
        return batch

    async def close(self) -> None:
        self._waiter.close()
        self._ahead.clear()
        self._stop_loading()
        await self._end_scan()
        if self._closing is not None:
            await self._closing

    def give_up(self) -> None:
        """Drop everything but the position, because other readers need the memory."""
        self._ahead.clear()
        self._stop_loading()
        if self._scan is not None:
            self._closing = asyncio.ensure_future(self._scan.aclose())
            self._scan = None

    async def _end_scan(self) -> None:
        self._mount.scans.release(self)
        if self._scan is not None:
            await self._scan.aclose()
            self._scan = None

    def _fits(self, chunk: Chunk, gathering: _Gathering) -> bool:
        until = self._allowance.until
        return (
            chunk.first_seq_num >= self.seq_num
            and chunk.records <= gathering.count_left
            and chunk.metered <= gathering.metered_left
            and (until is None or chunk.last_timestamp < until)
        )

    def _take_part(self, chunk: Chunk, gathering: _Gathering) -> bool:
        """Add as much of `chunk` as the limits allow. Returns False if some of it is left."""
        index = payloads.measure(chunk.payload)
        first = max(0, self.seq_num - chunk.first_seq_num)
        until = self._allowance.until
        cut = index.cut(
            first, count=gathering.count_left, metered=gathering.metered_left, until=until
        )
        if cut.end_index > first:
            part = memoryview(chunk.payload)[cut.byte_start : cut.byte_end]
            count = cut.end_index - first
            gathering.add(part, chunk.first_seq_num + first, count, cut.metered)
            self.seq_num = chunk.first_seq_num + cut.end_index
        if cut.end_index == index.count:
            return True
        if until is not None and index.timestamps[cut.end_index] >= until:
            self.ended = True
        elif not gathering.parts:
            self.ended = True  # the next record alone exceeds the allowance
        return False

    async def _peek(self) -> Chunk | None:
        """Return the chunk that holds the next record, or None at the tail.

        Raises StreamDamagedError if it cannot be read. Then `seq_num` is past everything before it.
        """
        try:
            return await self._next_chunk()
        except DataCorruptError as error:
            await self._end_scan()
            damaged = await self._damaged(error)
            self._mount.damage.note(damaged.damage)
            raise damaged from error

    async def _damaged(self, error: DataCorruptError) -> StreamDamagedError:
        """Return `error` with the records that cannot be read."""
        if isinstance(error, StreamDamagedError):
            return error
        if isinstance(error, TableDamagedError):
            return await damaged_records(self._mount, self._log, self.seq_num, error)
        if not self._ahead:
            return stream_damaged(self._log.ref, None, error)
        chunk = self._ahead[0]
        seq_nums = range(max(self.seq_num, chunk.first_seq_num), chunk.last_seq_num + 1)
        return stream_damaged(self._log.ref, seq_nums, error, chunk.part.file)

    async def _next_chunk(self) -> Chunk | None:
        while True:
            self._log.check_alive()
            if not self._log.hide_expired():
                await apply_retention(self._mount, self._log)
            self.seq_num = max(self.seq_num, self._log.readable_from)
            while self._ahead and self._end_of(self._ahead[0]) <= self.seq_num:
                self._ahead.popleft()
            if self._ahead:
                self._check_no_hole(self._ahead[0])
                if self._ahead[0].in_file:
                    await self._load_first()
                    continue  # records may have been trimmed meanwhile
                if self._ahead[0].packed and self._ahead[0].metered >= _THREAD_FROM:
                    await self._unpack_first()
                    continue  # records may have been trimmed meanwhile
                self._ahead[0] = own_part(self._ahead[0], self._log.row, self._key)
                return self._ahead[0]
            if self.at_tail:
                await self._end_scan()
                return None
            await self._read_ahead()

    def _end_of(self, chunk: Chunk) -> int:
        """Return where the stream's part of `chunk` ends: a fork may inherit only a part."""
        return next_segment(chunk, self._log.row, chunk.first_seq_num)

    async def _unpack_first(self) -> None:
        """Decompress the first chunk ahead, and keep it even if others need the memory meanwhile.

        Otherwise many readers could forever take turns reading and dropping the same chunks.
        """
        chunk = self._ahead.popleft()
        try:
            async with self._mount.scans.unpacking:
                chunk = await asyncio.to_thread(chunks.unpacked, chunk)
        finally:
            self._ahead.appendleft(chunk)

    async def _load_first(self) -> None:
        """Load the first chunks ahead from their file, and keep them as `_unpack_first` does."""
        if self._loading and self._loading[0][0][0] is not self._ahead[0]:
            self._stop_loading()
        run, loading = self._loading.popleft() if self._loading else (self._run_from(0), None)
        for _ in run:
            self._ahead.popleft()
        if self._fetched >= _EAGER_FROM and self._mount.scans.room_for_eager:
            self._load_ahead()
        loaded = run
        try:
            loaded = await (loading or self._mount.files.read(run))
        except BlobNotFoundError:
            self._log.check_alive()  # a deleted stream's files are deleted too
            if run[-1].last_seq_num >= self._log.readable_from:
                seq_nums = range(max(self.seq_num, run[0].first_seq_num), run[-1].last_seq_num + 1)
                gone = missing(run[-1])
                raise stream_damaged(self._log.ref, seq_nums, gone, run[-1].part.file) from None
            loaded = []  # they were trimmed and deleted meanwhile
        except DataCorruptError:
            loaded = await self._load_whole(run)
        finally:
            self._ahead.extendleft(reversed(loaded))
        self._fetched += sum(chunk.metered for chunk in loaded)
        read_ahead = sum(len(chunk.payload) for chunk in self._ahead) + _LOADS_AHEAD * _LOAD_BYTES
        self._mount.scans.hold(self, self._eager, read_ahead)

    async def _load_whole(self, run: list[Chunk]) -> list[Chunk]:
        """Load the payloads of `run` up to its first damaged chunk.

        Raises if the first chunk is damaged.
        """
        loaded = await self._mount.files.read(run[:1])
        for chunk in run[1:]:
            try:
                loaded += await self._mount.files.read([chunk])
            except DataCorruptError:
                break
        return loaded + run[len(loaded) :]

    def _load_ahead(self) -> None:
        """Start prefetching the chunks after those already being loaded."""
        first = sum(len(run) for run, _ in self._loading)
        while len(self._loading) < _LOADS_AHEAD and first < len(self._ahead):
            if not self._ahead[first].in_file:
                break
            run = self._run_from(first)
            self._loading.append((run, asyncio.create_task(self._mount.files.read(run))))
            first += len(run)

    def _run_from(self, first: int) -> list[Chunk]:
        """Return the chunks ahead from `first` on that one read can load: adjacent in one file."""
        run, metered = [self._ahead[first]], self._ahead[first].metered
        for chunk in islice(self._ahead, first + 1, None):
            metered += chunk.metered
            if chunk.part.file != run[0].part.file or metered > _LOAD_BYTES:
                break
            run.append(chunk)
        return run

    def _stop_loading(self) -> None:
        while self._loading:
            _discard(self._loading.pop()[1])

    def _check_no_hole(self, chunk: Chunk) -> None:
        """Raise if records before `chunk` are missing although they are not trimmed."""
        if chunk.first_seq_num > self.seq_num:
            raise self._missing(chunk.first_seq_num)

    def _missing(self, end: int) -> StreamDamagedError:
        cause = "they are missing from storage although they are not trimmed"
        seq_nums = range(self.seq_num, end)
        return StreamDamagedError(*self._log.ref, cause, seq_nums=seq_nums)

    async def _read_ahead(self) -> None:
        if recent := self._mount.recent.since(self._log.id, self.seq_num):
            await self._end_scan()
            self._ahead.extend(recent)
            return
        async with self._mount.scans.fetching:
            self._mount.scans.release(self)  # from here on, no other reader may close the scan
            await self._fetch()
            if self._scan is not None:
                size = sum(len(chunk.payload) for chunk in self._ahead)
                self._mount.scans.hold(self, self._eager, size)

    async def _fetch(self) -> None:
        """Read the next page from storage."""
        segment = segment_of(self._log.row, self.seq_num)
        eager = self._eager or (self._fetched >= _EAGER_FROM and self._mount.scans.room_for_eager)
        if segment is not self._segment or eager is not self._eager:
            await self._end_scan()
            self._segment, self._eager = segment, eager
        fresh = self._scan is None
        durable = self._log.durable.seq_num
        if self._scan is None:
            start, end = span_from(self._log.row, self.seq_num)
            if segment is None:
                end = keys.chunk(self._log.id, durable)
            self._eager = eager = self._eager and self._mount.scans.room_for_eager
            self._scan = self._mount.engine.scan(start, end, eager=eager)
        try:
            page = await anext(self._scan, None)
        except TableDamagedError:
            await self._end_scan()
            if segment is not None or not await self._fetch_behind_damage():
                raise
            return
        limit = durable if segment is None else segment.end
        if page is not None:
            parts = self._decode(page)
            if len(parts) < len(page):
                await self._end_scan()  # the next scan starts at the unreadable row
            self._ahead.extend(part for part in parts if part.first_seq_num < limit)
            self._fetched += sum(len(part.payload) for part in parts)
            if self._ahead:
                return
        await self._end_scan()
        if fresh and self.seq_num >= self._log.readable_from:
            raise self._missing(int(limit))

    async def _fetch_behind_damage(self) -> bool:
        """Read the next chunks one by one, behind a block that no scan can pass.

        Returns False if the next chunk may be in the block itself.
        """
        if not self._behind_damage:
            behind = await chunks_behind_damage(self._mount, self._log, self.seq_num)
            if behind.first_seq_num > self.seq_num:
                return False
            self._behind_damage = list(behind.last_seq_nums)
        size = 0
        while self._behind_damage and size < _LOAD_BYTES:
            last_seq_num = self._behind_damage.pop()
            if last_seq_num < self.seq_num:
                continue
            value = await self._mount.engine.get(keys.chunk(self._log.id, last_seq_num))
            if value is not None:  # otherwise it was trimmed meanwhile
                self._ahead.append(chunks.decode(value))
                size += len(value)
        return bool(self._ahead) or self.seq_num < self._log.readable_from

    def _decode(self, page: list[Row]) -> list[Chunk]:
        """Decode the chunks before the first unreadable one. Raises if the first is unreadable."""
        parts: list[Chunk] = []
        for key, value in page:
            try:
                parts.append(chunks.decode(value))
            except DataCorruptError as error:
                if parts:
                    break
                seq_nums = range(self.seq_num, keys.chunk_last_seq_num(key) + 1)
                raise stream_damaged(self._log.ref, seq_nums, error) from error
        return parts


def _discard(loading: asyncio.Task[list[Chunk]]) -> None:
    """Cancel a read whose result is not needed, and ignore its failure."""
    loading.cancel()
    loading.add_done_callback(lambda done: done.cancelled() or done.exception())


class _Gathering:
    """Collects the parts of one batch."""

    def __init__(self, count_left: int, metered_left: int) -> None:
        self.count_left = count_left
        self.metered_left = metered_left
        self.parts: list[bytes | memoryview] = []
        self._first = self._count = self._metered = 0

    @property
    def has_room(self) -> bool:
        return self.count_left > 0 and self.metered_left > 0

    def add(self, part: bytes | memoryview, first: int, count: int, metered: int) -> None:
        if not self.parts:
            self._first = first
        self.parts.append(part)
        self._count += count
        self._metered += metered
        self.count_left -= count
        self.metered_left -= metered

    def batch(self) -> ReadBatch | None:
        if not self.parts:
            return None
        return ReadBatch(tuple(self.parts), self._first, self._count, self._metered, None)
