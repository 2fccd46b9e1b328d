"""Reads: where they start, when they wait and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from streamfold.errors import PositionTrimmedError, PositionUnwrittenError
from streamfold.model.positions import StartKind, StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.model.resources import StreamStatus
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import (
    WAIT_MAX,
    Allowance,
    ReadBatch,
    ReadRequest,
    from_seq_num,
)
from streamfold.store.read.seek import apply_retention, seek_timestamp


async def read_once(
    mount: Mount, log: StreamLog, request: ReadRequest, key: SealingKey | None
) -> ReadBatch:
    """Return one batch, which is empty if no record reaches the tail within `request.wait`."""
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
        # New records may be trimmed before they are read. Then wait for the remaining time.
        deadline = _now() + wait
        while await cursor.advanced(deadline - _now()):
            if batch := await cursor.next(fill=True):
                return msgspec.structs.replace(batch, tail=log.durable)
            if cursor.ended or log.durable_closed:
                break
        return _empty(cursor.seq_num, log.durable)
    finally:
        await cursor.close()


class ReaderCalls(NamedTuple):
    """Callbacks of a reader."""

    #: Called with the metered bytes of every returned batch.
    delivered: Callable[[int], None] | None = None
    #: Awaited before a batch is read for this reader alone.
    before_own_batch: Callable[[], Awaitable[None]] | None = None


_NO_CALLS: Final = ReaderCalls()


class Reader:
    """Reads forward from a position in a stream. Must not be used by two tasks at once.

    `read` returns durable records and never waits at the tail. `next` waits as the request
    specifies: it returns the stored records first, then new ones.
    """

    def __init__(
        self,
        log: StreamLog,
        cursor: Cursor,
        request: ReadRequest,
        calls: ReaderCalls,
        *,
        skip_trimmed: bool = True,
    ) -> None:
        self._log = log
        self._cursor = cursor
        self._request = request
        self._skip_trimmed = skip_trimmed
        self._calls = calls
        self._may_follow = request.may_follow
        self._live = False
        self._deadline: float | None = None

    @classmethod
    async def open(
        cls,
        mount: Mount,
        log: StreamLog,
        request: ReadRequest,
        key: SealingKey | None,
        calls: ReaderCalls = _NO_CALLS,
    ) -> Reader:
        """Find the start.

        Raises PositionUnwrittenError if the read cannot return anything from it.
        """
        return cls(log, await _open(mount, log, request, key), request, calls)

    @classmethod
    def at(
        cls,
        mount: Mount,
        log: StreamLog,
        seq_num: int,
        key: SealingKey | None,
        calls: ReaderCalls = _NO_CALLS,
    ) -> Reader:
        """Return an unlimited reader from `seq_num` on, which raises rather than skip records."""
        request = ReadRequest(from_seq_num(seq_num))
        cursor = Cursor(mount, log, seq_num, Allowance(None, None, None), key)
        return cls(log, cursor, request, calls, skip_trimmed=False)

    @property
    def status(self) -> StreamStatus:
        return self._log.status

    @property
    def seq_num(self) -> int:
        """The seq_num of the next record."""
        return max(self._cursor.seq_num, 0)

    @property
    def at_tail(self) -> bool:
        return self._cursor.at_tail

    @property
    def closed(self) -> bool:
        """Whether everything was read and the stream is closed."""
        return self._log.durable_closed and self.at_tail

    @property
    def resting(self) -> bool:
        """Whether everything was read and nothing is held for this reader."""
        return self._cursor.resting

    async def read(self) -> ReadBatch | None:
        """Return the next batch, at most about 1 MiB; None at the tail or at the end of the read.

        Raises PositionTrimmedError if the next record was trimmed and this reader may not skip it.
        """
        cursor = self._cursor
        if cursor.resting:
            self._log.check_alive()
            return None
        seq_num = cursor.seq_num
        batch = cursor.live()
        if batch is None:
            if self._calls.before_own_batch is not None:
                await self._calls.before_own_batch()
            batch = await cursor.next(fill=False)
        if not self._skip_trimmed:
            reached = cursor.seq_num if batch is None else batch.first_seq_num
            if reached > seq_num:
                raise PositionTrimmedError(seq_num, self._log.retained_from)
        if batch is not None and self._calls.delivered is not None:
            self._calls.delivered(batch.metered)
        return batch

    async def wait(self, seconds: float) -> bool:
        """Wait for more records or the stream's close. Returns False on timeout."""
        return await self._cursor.advanced(seconds)

    async def next(self, heartbeat: float | None = None) -> ReadBatch | None:
        """Return the next batch, or None at the end of the read.

        A batch that ends at the tail carries the tail. The reader returns an empty batch when it
        first waits at the tail, and then after every `heartbeat` seconds without records.
        """
        while True:
            batch = await self.read()
            if batch is not None:
                self._deadline = None
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

    async def __aiter__(self) -> AsyncIterator[ReadBatch]:
        while (batch := await self.next()) is not None:
            if batch.count:
                yield batch

    async def aclose(self) -> None:
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


async def renew(mount: Mount, log: StreamLog) -> None:
    """Extend the lifetime of a stream that is being read."""
    if log.renew(mount.now()) and mount.committer.read_only is None:
        # Otherwise a crash now could end the stream early.
        await mount.committer.write_with(log)
