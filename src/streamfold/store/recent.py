"""The newest durable records of every stream, in memory, for readers at the tail."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

from streamfold.store.chunks import Chunk

#: Bytes that a chunk costs beyond its payload, roughly: small chunks must not slip under the bound.
_CHUNK_OVERHEAD = 200
#: Bytes handed out at a time: a reader that stops holds on to no more than this.
_HANDOUT_BYTES = 1 << 20


class _Stream:
    """Consecutive chunks of one stream; the first `gone` places of the list are empty already."""

    __slots__ = ("chunks", "gone")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.gone = 0

    def pop_oldest(self) -> Chunk:
        chunk = self.chunks[self.gone]
        self.gone += 1
        if self.gone > 64 and self.gone * 2 > len(self.chunks):
            del self.chunks[: self.gone]
            self.gone = 0
        return chunk


class RecentChunks:
    """At most `capacity` bytes; the streams that were written to longest ago are forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._streams: OrderedDict[int, _Stream] = OrderedDict()

    def add(self, stream_id: int, chunk: Chunk) -> None:
        """Remember the chunk that follows what is known of this stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream()
        else:
            self._streams.move_to_end(stream_id)
        stream.chunks.append(chunk)
        self._size += _cost(chunk)
        while self._size > self._capacity:
            self._forget_oldest()

    def forget(self, stream_id: int) -> None:
        if stream := self._streams.pop(stream_id, None):
            self._size -= sum(_cost(chunk) for chunk in stream.chunks[stream.gone :])

    def since(self, stream_id: int, seq_num: int) -> list[Chunk]:
        """Some chunks from the one that holds `seq_num` on; empty if that one is not here."""
        stream = self._streams.get(stream_id)
        if stream is None or seq_num < stream.chunks[stream.gone].first_seq_num:
            return []
        first = bisect_left(
            stream.chunks, seq_num, lo=stream.gone, key=lambda chunk: chunk.last_seq_num
        )
        found, size = [], 0
        for index in range(first, len(stream.chunks)):
            found.append(stream.chunks[index])
            size += _cost(stream.chunks[index])
            if size >= _HANDOUT_BYTES:
                break
        return found

    def _forget_oldest(self) -> None:
        stream_id, stream = next(iter(self._streams.items()))
        self._size -= _cost(stream.pop_oldest())
        if stream.gone == len(stream.chunks):
            del self._streams[stream_id]


def _cost(chunk: Chunk) -> int:
    return len(chunk.payload) + _CHUNK_OVERHEAD
