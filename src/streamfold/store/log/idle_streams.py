"""Streams that are not in use: each one short byte string in memory, or one row in storage.

A log takes four times as much memory. The byte string is the value of a ResumeRow: a stream that memory
has no room for is written as it is, and used again after one point read. Without the row, its tail is
searched among its chunks and its producers are read one by one, which takes five times as long.

A stored row is current or does not exist. A log whose row is stored deletes it in the commit that
changes the stream next, so no crash can separate the two. So does a log that was read without its row,
because this version cannot read the row: the version that wrote it may open the store again. A stream
whose row is being written is not in memory, and whatever needs it waits until the row is durable, so
nothing changes it meanwhile. Versions that do not know these rows leave them alone: see `Mount.start`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from streamfold.errors import StreamfoldError
from streamfold.model.names import StreamRef
from streamfold.store import keys
from streamfold.store.engine.engine import Op
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.rows import ResumeRow, StoredResume

logger = logging.getLogger(__name__)

#: Bytes that a stream takes beyond its name and its encoded state: objects and the entry of a mapping.
_OVERHEAD: Final = 200
#: Producers of one stream that are kept with it: each takes 30 bytes and its id.
_PRODUCERS_MAX: Final = 16
#: Rows that one commit writes.
_WRITTEN_AT_ONCE: Final = 256
#: Rows that may wait to be durable. Beyond that, storage does not keep up, and rows are left out.
_WAITING_MAX: Final = 16 * _WRITTEN_AT_ONCE
#: Seconds after which a store that is being closed writes no further rows: that is enough for 500,000
#: on local disk.
_CLOSING_SECONDS: Final = 5.0


class Idle(NamedTuple):
    """A stream that is taken into use again, and which row of it storage has."""

    row: ResumeRow
    stored: StoredResume


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ResumeRow)


class IdleStreams:
    """Holds at most `capacity` bytes; the streams that were used longest ago are written to storage.

    `write` commits rows. Rows carry `epoch`, the opening of the store that wrote them.
    """

    def __init__(
        self, capacity: int, epoch: int, write: Callable[[Sequence[Op]], Awaitable[None]]
    ) -> None:
        self._capacity = capacity
        self._epoch = epoch
        self._write = write
        #: Whether rows may be written now: reads make room for streams, too, while the disk is full.
        self.may_write: Callable[[], bool] = lambda: True
        self._size = 0
        #: By the key of the stream's row, which takes less than a StreamRef: a byte for the
        #: StoredResume, then the encoded ResumeRow.
        self._streams: OrderedDict[bytes, bytes] = OrderedDict()
        #: Streams whose rows are being written, with the task that does it.
        self._leaving: dict[bytes, asyncio.Task[None]] = {}
        #: Streams whose configuration is being changed: what is known of them may be outdated.
        self._changing: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self._capacity - self._size

    def add(self, log: StreamLog) -> None:
        """Keep the state of `log`, which is idle."""
        key, producers = keys.stream(*log.ref), log.terms.producers
        if key in self._changing or len(producers) > _PRODUCERS_MAX:
            return
        tail = log.durable
        row = ResumeRow(
            log.row,
            log.state_row(),
            tail.seq_num,
            tail.timestamp,
            log.arrived_at,
            self._epoch,
            producers,
        )
        value = bytes((log.resume_stored,)) + _encoder.encode(row)
        self._size += _cost(key, value)
        self._streams[key] = value
        while self._size > self._capacity:
            self._evict(min(_WRITTEN_AT_ONCE, len(self._streams) // 4 + 1))

    def take(self, ref: StreamRef) -> Idle | None:
        """The stream's state, which its log replaces from now on."""
        if not self._streams:
            return None
        key = keys.stream(*ref)
        value = self._streams.pop(key, None)
        if value is None:
            return None
        self._size -= _cost(key, value)
        return Idle(_decoder.decode(memoryview(value)[1:]), StoredResume(value[0]))

    def begin_change(self, ref: StreamRef) -> None:
        """Keep nothing of the stream until `end_change`: its row is about to change."""
        self.take(ref)
        self._changing.add(keys.stream(*ref))

    def end_change(self, ref: StreamRef) -> None:
        self._changing.discard(keys.stream(*ref))

    async def written(self, refs: Iterable[StreamRef]) -> None:
        """Return once none of `refs` is being written; raises nothing if that failed."""
        if not self._leaving:
            return
        found = {self._leaving.get(keys.stream(*ref)) for ref in refs}
        if tasks := [task for task in found if task is not None]:
            await asyncio.wait(tasks)

    async def write_all(self) -> None:
        """Write the rows of all streams, as far as time allows, because the store is being closed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _CLOSING_SECONDS
        while (self._streams or self._leaving) and loop.time() < end:
            self._evict(_WAITING_MAX)
            if self._leaving:
                await asyncio.wait(set(self._leaving.values()))

    def _evict(self, count: int) -> None:
        """Drop the streams that were used longest ago; write the rows that storage lacks."""
        ops: list[Op] = []
        room = _WAITING_MAX - len(self._leaving) if self.may_write() else 0
        evicted = list(islice(self._streams, count))
        for key in evicted:
            value = self._streams.pop(key)
            self._size -= _cost(key, value)
            if value[0] != StoredResume.CURRENT and len(ops) < room:
                ops.append((keys.resume_of(key), value[1:]))
        if ops:
            task = asyncio.create_task(self._write_rows(ops))
            for key, _ in ops:
                self._leaving[keys.stream_of(key)] = task

    async def _write_rows(self, ops: list[Op]) -> None:
        try:
            await self._write(ops)
        except StreamfoldError as error:
            # The store reopens its storage after this, or stops; it needs no row to do so.
            logger.debug("%d unused streams were not written: %s", len(ops), error)
        finally:
            for key, _ in ops:
                self._leaving.pop(keys.stream_of(key), None)


def resumable(value: bytes, epochs: range) -> ResumeRow | None:
    """The stored row in `value`, or None if it was not written in one of `epochs`."""
    try:
        row = _decoder.decode(value)
    except msgspec.MsgspecError as error:
        # A later version may write rows that this one cannot read: the stream itself is intact.
        logger.warning("a stored ResumeRow cannot be read: %s", error)
        return None
    return row if row.epoch in epochs else None


def _cost(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _OVERHEAD
