"""Batches as they were last sent: followers at the tail of a stream all get the same bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar

from streamfold.model.positions import StreamPosition
from streamfold.store.reads import ReadBatch

#: Batches that are kept: followers of one stream are seldom more than a few apart.
KEPT: Final = 64
#: Metered bytes of a batch that is kept at most, so that all together stay small.
KEPT_BYTES: Final = 64 << 10

T = TypeVar("T")


class SharedEncodings(Generic[T]):
    """Encodes a batch once for all who want it in the same form while it is fresh."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[ReadBatch, T]] = OrderedDict()

    def get(self, batch: ReadBatch, form: Hashable, encode: Callable[[ReadBatch], T]) -> T:
        """The encoding of `batch`, from another follower if there was one.

        Batches are the same if they consist of the same objects in memory. Those that are kept keep
        theirs alive, so that no other object can take their place.
        """
        if batch.metered > KEPT_BYTES:
            return encode(batch)
        key: tuple[Any, ...] = (form, _position(batch.tail), *map(id, batch.parts))
        found = self._kept.get(key)
        if found is not None:
            return found[1]
        encoded = encode(batch)
        self._kept[key] = (batch, encoded)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return encoded


def _position(tail: StreamPosition | None) -> tuple[int, int] | None:
    return None if tail is None else (tail.seq_num, tail.timestamp)
