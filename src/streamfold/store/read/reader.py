"""Single reads and read sessions: where they start, when they wait, when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import msgspec

from streamfold.errors import PositionUnwrittenError
from streamfold.model.positions import StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import WAIT_MAX, Allowance, ReadBatch, ReadRequest, StartKind
from streamfold.store.read.seek import apply_retention, seek_timestamp


async def read_once(
    mount: Mount, log: StreamLog, request: ReadRequest, key: SealingKey | None
) -> ReadBatch:
    """One batch; empty if no record came to the tail within `request.wait`."""
    count = BATCH_RECORDS_MAX if request.count is None else min(request.count, BATCH_RECORDS_MAX)
    size = BATCH_BYTES_MAX if request.bytes is None else min(request.bytes, BATCH_BYTES_MAX)
    request = replace(request, count=count, bytes=size)
    cursor = await _open(mount, log, request, key)
    try:
        if batch := await cursor.next(fill=True):
            return batch
        wait = min(request.wait or 0.0, WAIT_MAX)
        if cursor.ended or not wait:
            return _empty(cursor.seq_num, None)
        # New records may be trimmed before they are read: then wait for the rest of the time.
        deadline = _now() + wait
        while await cursor.advanced(deadline - _now()):
            if batch := await cursor.next(fill=True):
                return msgspec.structs.replace(batch, tail=log.durable)
            if cursor.ended or log.durable_closed:
                break
        return _empty(cursor.seq_num, log.durable)
    finally:
        await cursor.close()


class ReadSession:
    """Batches from a start on: first the stored records, then new ones.

    Use `next` in a loop, or iterate; not from two tasks at once.
    """

    def __init__(self, log: StreamLog, cursor: Cursor, request: ReadRequest) -> None:
        self._log = log
        self._cursor = cursor
        self._request = request
        #: Called with the metered bytes of every batch that is returned.
        self.on_delivered: Callable[[int], None] = lambda metered: None
        #: Awaited before a batch is read for this reader alone.
        self.before_own_batch: Callable[[], Awaitable[None]] | None = None
        self._may_follow = request.may_follow
        self._live = False
        self._deadline: float | None = None

    @classmethod
    async def open(
        cls, mount: Mount, log: StreamLog, request: ReadRequest, key: SealingKey | None
    ) -> ReadSession:
        """Find the start; raises PositionUnwrittenError if the read cannot return anything from it."""
        return cls(log, await _open(mount, log, request, key), request)

    async def next(self, heartbeat: float | None = None) -> ReadBatch | None:
        """The next batch, or None at the end of the read.

        A batch that ends at the tail carries it. An empty batch comes when the reader first waits
        there, and then after every `heartbeat` seconds without records.
        """
        while True:
            cursor = self._cursor
            batch = cursor.live()
            if batch is None and not cursor.resting:
                if self.before_own_batch is not None:
                    await self.before_own_batch()
                batch = await cursor.next(fill=False)
            if batch is not None:
                self._deadline = None
                self.on_delivered(batch.metered)
                at_tail = self._cursor.at_tail
                self._live = self._live and at_tail
                tail = self._log.durable if at_tail else None
                return batch if batch.tail is tail else msgspec.structs.replace(batch, tail=tail)
            if self._cursor.ended or not self._may_follow or self._log.durable_closed:
                return None
            if self._deadline is None and self._request.wait is not None:
                self._deadline = _now() + self._request.wait
            if not self._live:
                self._live = True
                return _empty(self._cursor.seq_num, self._log.durable)
            max_wait = heartbeat
            if self._deadline is not None:
                remaining = self._deadline - _now()
                if remaining <= 0:
                    return None
                max_wait = remaining if heartbeat is None else min(heartbeat, remaining)
            quiet = not await self._cursor.advanced(max_wait)
            if quiet and max_wait == heartbeat:
                return _empty(self._cursor.seq_num, self._log.durable)

    @property
    def resting(self) -> bool:
        """Whether everything was read, and nothing is held for this reader."""
        return self._cursor.resting

    async def __aiter__(self) -> AsyncIterator[ReadBatch]:
        while (batch := await self.next()) is not None:
            if batch.count:
                yield batch

    async def close(self) -> None:
        await self._cursor.close()


async def _open(
    mount: Mount, log: StreamLog, request: ReadRequest, key: SealingKey | None
) -> Cursor:
    log.check_alive()
    log.check_key(key)
    await apply_retention(mount, log)
    seq_num = await _resolve_start(mount, log, request, key)
    allowance = Allowance(request.count, request.bytes, request.until)
    return Cursor(mount, log, seq_num, allowance, key)


async def _resolve_start(
    mount: Mount, log: StreamLog, request: ReadRequest, key: SealingKey | None
) -> int:
    start, tail = request.start, log.durable
    if start.kind is StartKind.TIMESTAMP and start.value <= tail.timestamp:
        return await seek_timestamp(mount, log, start.value, key)
    if start.kind is StartKind.TAIL_OFFSET:
        seq_num = max(0, tail.seq_num - start.value)
    elif start.kind is StartKind.SEQ_NUM and start.value <= tail.seq_num:
        seq_num = start.value
    elif request.clamp:
        seq_num = tail.seq_num
    else:
        raise PositionUnwrittenError(tail.seq_num, tail.timestamp)
    if seq_num == tail.seq_num and not request.may_follow:
        raise PositionUnwrittenError(tail.seq_num, tail.timestamp)
    return seq_num


def _empty(seq_num: int, tail: StreamPosition | None) -> ReadBatch:
    return ReadBatch((), seq_num, 0, 0, tail)


def _now() -> float:
    return asyncio.get_running_loop().time()
