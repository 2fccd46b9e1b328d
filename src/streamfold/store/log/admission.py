"""Append requests, which every face uses, and admission control for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from streamfold.model import names
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.records import Record
from streamfold.model.resources import Claim
from streamfold.records.batch import RecordBatch
from streamfold.store.log.sealing import SealingKey

#: Checks a batch against the stream's content type. Raises if they disagree.
ContentCheck: TypeAlias = Callable[[str, RecordBatch], None]
#: Builds the batches of an append: a function that takes at most a millisecond, or a future.
Content: TypeAlias = Callable[[], Sequence[RecordBatch]] | asyncio.Future[Sequence[RecordBatch]]


class AppendRequest(msgspec.Struct):
    """Batches for one stream, and their conditions. None means no condition."""

    #: Become durable together. Without batches, only the changes of `claim` do.
    batches: Sequence[RecordBatch] = ()
    #: Builds `batches`, once the stream's terms allow the append.
    content: Content | None = None
    match_seq_num: int | None = None
    fencing_token: str | None = None
    claim: Claim | None = None
    #: Seals the records of a stream that has a cipher.
    key: SealingKey | None = None
    #: Configures the stream if this append creates it; None = the stream must exist.
    create_with: StreamConfigLayer | None = None
    #: Checks the batches if the stream has a content type.
    check: ContentCheck | None = None

    @classmethod
    def of(
        cls,
        records: RecordBatch | Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        create_with: StreamConfigLayer | None = None,
        key: SealingKey | None = None,
    ) -> AppendRequest:
        """Return a request for one batch of these records."""
        if fencing_token is not None:
            names.parse_token(fencing_token, "fencing token")
        return cls(
            (records if isinstance(records, RecordBatch) else RecordBatch.of(records),),
            match_seq_num=match_seq_num,
            fencing_token=fencing_token,
            create_with=create_with,
            key=key,
        )

    @property
    def count(self) -> int:
        """Number of records."""
        batches = self.batches
        return batches[0].count if len(batches) == 1 else sum(b.count for b in batches)

    @property
    def metered(self) -> int:
        """Metered bytes."""
        batches = self.batches
        return batches[0].metered if len(batches) == 1 else sum(b.metered for b in batches)

    @property
    def only_trims(self) -> bool:
        """Whether this append can only free space."""
        return all(batch.only_trims for batch in self.batches)


class Admission:
    """Grants permits in request order. A cancelled waiter holds none.

    A request larger than the capacity gets its permit alone, after all others are released.
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
        """Number of callers that wait for room."""
        return len(self._queue)

    def acquire_at_once(self, size: int) -> bool:
        """Acquire a permit if `size` bytes fit and the queue is empty. Returns whether it did."""
        if self._queue or not self._fits(size):
            return False
        self._free -= size
        return True

    async def acquire(self, size: int) -> None:
        """Wait until `size` bytes fit, after all earlier callers."""
        if self.acquire_at_once(size):
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)  # granted just as the caller was cancelled
            else:
                self._admit()  # a large waiter may have blocked smaller ones behind it
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
