"""Streams that are not in use, each as one short byte string: a log takes four times as much."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from streamfold.model.names import StreamRef
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.store import keys
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.rows import StateRow, StreamRow

#: Bytes that a stream takes beyond its name and its encoded state: objects and the entry of a mapping.
_OVERHEAD = 200


class IdleStream(msgspec.Struct, frozen=True, array_like=True):
    """All that a log needs, as reading the stream from storage would find it."""

    row: StreamRow
    state: StateRow
    seq_num: int
    timestamp: int
    arrived_at: int

    @property
    def tail(self) -> StreamPosition:
        return StreamPosition(SeqNum(self.seq_num), Timestamp(self.timestamp))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(IdleStream)


class IdleStreams:
    """Holds at most `capacity` bytes; forgets the streams that were used longest ago first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        #: By the key of the stream's row, which takes less than a StreamRef.
        self._streams: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, log: StreamLog) -> None:
        """Keep the state of `log`, which is idle and has no producers."""
        tail = log.durable
        idle = IdleStream(log.row, log.state_row(), tail.seq_num, tail.timestamp, log.arrived_at)
        key, value = keys.stream(*log.ref), _encoder.encode(idle)
        self._size += _cost(key, value)
        self._streams[key] = value
        while self._size > self._capacity:
            self._size -= _cost(*self._streams.popitem(last=False))

    def take(self, ref: StreamRef) -> IdleStream | None:
        """The stream's state, which its log replaces from now on."""
        if not self._streams:
            return None
        key = keys.stream(*ref)
        value = self._streams.pop(key, None)
        if value is None:
            return None
        self._size -= _cost(key, value)
        return _decoder.decode(value)

    def forget(self, ref: StreamRef) -> None:
        """Drop the stream's state: its row has changed."""
        self.take(ref)


def _cost(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + _OVERHEAD
