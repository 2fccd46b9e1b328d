"""What an append asks for, through any face, and the room that it waits for."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from streamfold.model.configs import StreamConfigLayer
from streamfold.model.names import StreamRef
from streamfold.model.resources import Claim
from streamfold.records.batch import RecordBatch
from streamfold.store.log.sealing import SealingKey

#: Takes the content type of a stream and a batch for it; raises if they disagree.
ContentCheck: TypeAlias = Callable[[str, RecordBatch], None]


class AppendRequest(msgspec.Struct, frozen=True, gc=False):
    """Batches for one stream, and what must hold for them; None asks for nothing."""

    ref: StreamRef
    #: Become durable together. Without batches, only what `claim` changes does.
    batches: tuple[RecordBatch, ...]
    match_seq_num: int | None = None
    fencing_token: str | None = None
    claim: Claim | None = None
    #: Seals the records of a stream that has a cipher.
    key: SealingKey | None = None
    #: The configuration of the stream if this append creates it; None = it must exist.
    create_with: StreamConfigLayer | None = None
    #: Called if the stream has a content type.
    check: ContentCheck | None = None

    @property
    def count(self) -> int:
        """Records."""
        batches = self.batches
        return batches[0].count if len(batches) == 1 else sum(b.count for b in batches)

    @property
    def metered(self) -> int:
        """Metered bytes."""
        batches = self.batches
        return batches[0].metered if len(batches) == 1 else sum(b.metered for b in batches)

    @property
    def only_trims(self) -> bool:
        """Whether this can only free space."""
        return all(batch.only_trims for batch in self.batches)


class Unrecorded(enum.Enum):
    """Why an accepted append wrote no record."""

    #: It repeats an earlier append.
    REPEATED = "repeated"
    #: It has no batches: only the stream's terms changed.
    TERMS = "terms"


class Admission:
    """Grants permits in the order of the requests; a cancelled waiter holds none.

    A request that is larger than the capacity gets its permit alone, when all others are released.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = capacity
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Bytes accepted but not yet acknowledged."""
        return self.capacity - self._free

    @property
    def waiting(self) -> int:
        """How many callers wait for room."""
        return len(self._queue)

    @property
    def wanted(self) -> int:
        """Bytes that the waiting callers ask for."""
        return sum(size for size, turn in self._queue if not turn.done())

    def acquire_at_once(self, size: int) -> bool:
        """Take the permit if `size` bytes fit and the queue is empty."""
        if self._queue or not self._fits(size):
            return False
        self._free -= size
        return True

    async def acquire(self, size: int) -> None:
        """Return once `size` bytes fit, after all earlier callers."""
        if self.acquire_at_once(size):
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)  # the permit came together with the cancellation
            else:
                self._admit()  # a large waiter may have held up smaller ones behind it
            raise

    def release(self, size: int) -> None:
        self._free += size
        self._admit()

    def _fits(self, size: int) -> bool:
        return size <= self._free or self._free == self.capacity

    def _admit(self) -> None:
        while self._queue:
            size, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
            elif self._fits(size):
                self._queue.popleft()
                self._free -= size
                turn.set_result(None)
            else:
                return
