"""An in-memory cache of every stream's newest durable records, for readers at the tail."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

import msgspec

from streamfold.model.positions import StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.store.log.chunks import Chunk
from streamfold.store.log.sealing import Sealing
from streamfold.store.read.requests import ReadBatch

#: Approximate bytes per chunk beyond its payload: many small chunks must count too.
_CHUNK_OVERHEAD = 200
#: Approximate bytes per stream beyond its chunks: many streams may have one small chunk each.
_STREAM_OVERHEAD = 350
#: Bytes returned at a time, which bounds what a stalled reader holds.
_HANDOUT_BYTES = 1 << 20
#: Batches up to the tail cached per stream: followers share a few positions or are far behind.
_TO_TAIL_MAX = 16
#: Replaces a dropped chunk, so that its payload is freed at once.
_DROPPED = Chunk(0, 0, 0, 0, 0, 0, b"")


class _Stream(msgspec.Struct, gc=False):
    """Consecutive chunks of one stream. The first `gone` items of the list are dropped."""

    chunks: list[Chunk] = []
    gone: int = 0
    #: Batches up to the tail by first seq_num, built only from the chunks above.
    to_tail: dict[int, ReadBatch | None] = {}

    def append(self, chunk: Chunk) -> None:
        if self.to_tail:
            self.to_tail.clear()
        self.chunks.append(chunk)

    def pop_oldest(self) -> Chunk:
        self.to_tail.clear()
        chunk, self.chunks[self.gone] = self.chunks[self.gone], _DROPPED
        self.gone += 1
        if self.gone > 64 and self.gone * 2 > len(self.chunks):
            del self.chunks[: self.gone]
            self.gone = 0
        return chunk


class RecentChunks:
    """Caches at most `capacity` bytes. Evicts the least recently written stream's chunks first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        #: Bytes of all chunks ever added, including evicted ones.
        self.added = 0
        self._streams: OrderedDict[int, _Stream] = OrderedDict()

    def add(self, stream_id: int, chunk: Chunk) -> None:
        """Cache `chunk`, the newest of its stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream()
            self._size += _STREAM_OVERHEAD
        else:
            self._streams.move_to_end(stream_id)
        stream.append(chunk)
        cost = len(chunk.payload) + _CHUNK_OVERHEAD
        self._size += cost
        self.added += cost
        if self._size > self._capacity:
            self.shrink(self._capacity)

    def forget(self, stream_id: int) -> None:
        if stream := self._streams.pop(stream_id, None):
            self._size -= sum([_cost(chunk) for chunk in stream.chunks[stream.gone :]])
            self._size -= _STREAM_OVERHEAD

    def shrink(self, size: int) -> None:
        """Evict down to `size` bytes, once."""
        while self._size > size:
            self._forget_oldest()

    def since(self, stream_id: int, seq_num: int) -> list[Chunk]:
        """Return the chunks from the one that holds `seq_num`, or none if that one is not cached."""
        stream = self._streams.get(stream_id)
        if stream is None or seq_num < stream.chunks[stream.gone].first_seq_num:
            return []
        first = bisect_left(
            stream.chunks, seq_num, lo=stream.gone, key=lambda chunk: chunk.last_seq_num
        )
        chunks, size = [], 0
        for index in range(first, len(stream.chunks)):
            chunks.append(stream.chunks[index])
            size += _cost(stream.chunks[index])
            if size >= _HANDOUT_BYTES:
                break
        return chunks

    def to_tail(self, stream_id: int, seq_num: int, tail: StreamPosition) -> ReadBatch | None:
        """Return the records from `seq_num` to `tail` as one batch, shared by all callers.

        Returns None if some are not in memory, some are sealed, or there are too many for one
        batch.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        if seq_num not in stream.to_tail:
            if len(stream.to_tail) >= _TO_TAIL_MAX:
                stream.to_tail.clear()
            stream.to_tail[seq_num] = _join(self.since(stream_id, seq_num), seq_num, tail)
        return stream.to_tail[seq_num]

    def _forget_oldest(self) -> None:
        stream_id, stream = next(iter(self._streams.items()))
        self._size -= _cost(stream.pop_oldest())
        if stream.gone == len(stream.chunks):
            del self._streams[stream_id]
            self._size -= _STREAM_OVERHEAD


def _join(chunks: list[Chunk], seq_num: int, tail: StreamPosition) -> ReadBatch | None:
    """Join chunks into a batch if they cover exactly `seq_num` to `tail`."""
    if not chunks or chunks[0].first_seq_num != seq_num or chunks[-1].end != tail:
        return None
    count, metered = tail.seq_num - seq_num, sum([chunk.metered for chunk in chunks])
    if count > BATCH_RECORDS_MAX or metered > BATCH_BYTES_MAX:
        return None
    if any(chunk.sealing is not Sealing.CLEAR for chunk in chunks):
        return None
    return ReadBatch(tuple([chunk.payload for chunk in chunks]), seq_num, count, metered, tail)


def _cost(chunk: Chunk) -> int:
    return len(chunk.payload) + _CHUNK_OVERHEAD
