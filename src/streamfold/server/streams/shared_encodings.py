"""Batches as they were last sent: followers at the tail of a stream all get the same bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final

from streamfold.model.positions import StreamPosition
from streamfold.store.read.requests import ReadBatch

#: Batches that are kept: followers of one stream are seldom more than a few apart.
KEPT: Final = 64
#: Bytes of all of them together, encodings and records: eight large batches and their JSON.
KEPT_BYTES: Final = 16 << 20


class SharedEncodings:
    """Encodes a recent batch once for all followers that need it in the same form.

    Batches are equal if they consist of the same objects in memory. Sealed batches never are: each
    reader decrypts its own. A kept batch keeps its objects alive, so that their ids are not reused.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[ReadBatch, bytes]] = OrderedDict()
        self._size = 0
        #: What is being encoded in a thread.
        self._under_way: dict[Hashable, asyncio.Future[None]] = {}
        #: The last request, which the next one most likely repeats.
        self._last: tuple[ReadBatch | None, Hashable, bytes] = (None, None, b"")

    def get(self, batch: ReadBatch, form: Hashable, encode: Callable[[ReadBatch], bytes]) -> bytes:
        """The encoding of `batch`, reused if another follower had it made."""
        last, last_form, encoded = self._last
        if last is batch and last_form == form:
            return encoded
        key = _key(batch, form)
        found = self._kept.get(key)
        encoded = found[1] if found else self._keep(key, batch, encode(batch))
        self._last = batch, form, encoded
        return encoded

    async def get_heavy(
        self,
        batch: ReadBatch,
        form: Hashable,
        encode: Callable[[], Awaitable[bytes]],
    ) -> bytes:
        """The same for a heavy batch: encoded in a thread, once for all followers."""
        key = _key(batch, form)
        while True:
            if (found := self._kept.get(key)) is not None:
                return found[1]
            if (under_way := self._under_way.get(key)) is None:
                break
            await asyncio.wait((under_way,))  # if it fails, the next one tries
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            return self._keep(key, batch, await encode())
        finally:
            del self._under_way[key]
            done.set_result(None)

    def _keep(self, key: Hashable, batch: ReadBatch, encoded: bytes) -> bytes:
        self._kept[key] = batch, encoded
        self._size += batch.metered + len(encoded)
        while len(self._kept) > KEPT or self._size > KEPT_BYTES:
            _, (dropped, bytes_dropped) = self._kept.popitem(last=False)
            self._size -= dropped.metered + len(bytes_dropped)
        return encoded


def _key(batch: ReadBatch, form: Hashable) -> tuple[Any, ...]:
    return (form, _position(batch.tail), *map(id, batch.parts))


def _position(tail: StreamPosition | None) -> tuple[int, int] | None:
    return None if tail is None else (tail.seq_num, tail.timestamp)
