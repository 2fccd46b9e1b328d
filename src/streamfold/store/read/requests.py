"""Read requests and batches, and the limit on all open scans."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import msgspec

from streamfold.errors import InvalidError
from streamfold.model.positions import U64_MAX, StartKind, StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, SequencedRecord
from streamfold.records import payload as payloads

#: Maximum seconds that a single read may wait at the tail.
WAIT_MAX = 60.0


@dataclass(frozen=True, slots=True)
class ReadStart:
    """Where a read starts: at a seq_num, at a timestamp, or a number of records before the tail."""

    kind: StartKind
    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value <= U64_MAX:
            raise InvalidError(f"{self.kind.value} {self.value} is not a 64-bit unsigned number")


def from_seq_num(seq_num: int) -> ReadStart:
    """Start at this seq_num."""
    return ReadStart(StartKind.SEQ_NUM, seq_num)


def from_timestamp(timestamp: int) -> ReadStart:
    """Start at the first record with this timestamp (ms since the Unix epoch) or a later one."""
    return ReadStart(StartKind.TIMESTAMP, timestamp)


def from_tail(offset: int = 0) -> ReadStart:
    """Start `offset` records before the tail. With 0, the read waits for new records."""
    return ReadStart(StartKind.TAIL_OFFSET, offset)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read. A limit of None is unlimited when following, and one batch in a single read."""

    start: ReadStart
    count: int | None = None
    #: Metered bytes.
    bytes: int | None = None
    #: Timestamp of the first record not to return.
    until: int | None = None
    #: Whether to start at the tail instead of failing when the start is beyond it.
    clamp: bool = False
    #: Seconds to wait at the tail; None = no limit when following without limits, otherwise 0.
    wait: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "bytes", "until", "wait"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidError(f"{name} {value} of a read must not be negative")
        start = self.start
        if (
            self.until is not None
            and start.kind is StartKind.TIMESTAMP
            and start.value >= self.until
        ):
            raise InvalidError(
                f"a read from timestamp {start.value} until {self.until} cannot return anything: "
                "until must be larger"
            )

    @property
    def bounded(self) -> bool:
        """Whether a count, a size or a time ends the read."""
        return not (self.count is None and self.bytes is None and self.until is None)

    @property
    def may_follow(self) -> bool:
        """Whether the read may wait at the tail for new records."""
        return not self.bounded or bool(self.wait)


class ReadBatch(msgspec.Struct, frozen=True):
    """Consecutive records as stored bytes. Without records, a heartbeat."""

    parts: tuple[bytes | memoryview, ...]
    first_seq_num: int
    count: int
    metered: int
    #: The durable tail, if the batch ends there.
    tail: StreamPosition | None

    @property
    def end_seq_num(self) -> int:
        return self.first_seq_num + self.count

    @property
    def identity(self) -> tuple[int, int, int, StreamPosition | None]:
        """Equal for batches that share the same records in memory, while both exist."""
        first = id(self.parts[0]) if self.parts else 0
        return first, self.first_seq_num, self.count, self.tail

    def payload(self) -> bytes:
        """Return the records in protobuf form: field 1 of S2's ReadBatch, repeated."""
        return b"".join(self.parts)

    def records(self) -> list[SequencedRecord]:
        return payloads.decode(self.payload())


@dataclass(slots=True)
class Allowance:
    """The records and bytes that a read may still return."""

    count: int | None
    bytes: int | None
    until: int | None

    @property
    def unlimited(self) -> bool:
        return self.count is None and self.bytes is None and self.until is None

    @property
    def spent(self) -> bool:
        return self.count == 0 or self.bytes == 0

    def of_one_batch(self) -> tuple[int, int]:
        """Return the maximum records and metered bytes of the next batch."""
        count = BATCH_RECORDS_MAX if self.count is None else min(self.count, BATCH_RECORDS_MAX)
        size = BATCH_BYTES_MAX if self.bytes is None else min(self.bytes, BATCH_BYTES_MAX)
        return count, size

    def spend(self, batch: ReadBatch) -> None:
        if self.count is not None:
            self.count -= batch.count
        if self.bytes is not None:
            self.bytes -= batch.metered


#: Maximum bytes read ahead by all readers of one store.
_BYTES_MAX = 128 << 20
#: Measured bytes that SlateDB holds for an open scan: for an eager one, which fetches several
#: blocks of each table at once, and for any other.
_EAGER_BYTES = 40 << 20
_LEAN_BYTES = 8 << 20
#: Pages fetched concurrently. Their scans cannot be closed meanwhile.
_FETCHES_MAX = 16
#: Chunks decompressed in threads concurrently. Few, because the same threads sync commits.
_UNPACKS_MAX = 2


class ReadsAhead(Protocol):
    """A reader with an open scan."""

    def give_up(self) -> None:
        """Close the scan and drop what was read ahead. A later read continues from the position."""
        ...


class OpenScans:
    """Bounds open scans: beyond the limit, closes the least recently used reader's scan.

    A slow client then keeps only its position. Reopening its scan takes about a millisecond on
    local disk.
    """

    def __init__(self) -> None:
        self.fetching = asyncio.Semaphore(_FETCHES_MAX)
        self.unpacking = asyncio.Semaphore(_UNPACKS_MAX)
        #: Least recently used first.
        self._sizes: dict[ReadsAhead, int] = {}
        self._total = 0

    @property
    def room_for_eager(self) -> bool:
        """Whether one more reader may prefetch far ahead, which is fast but takes much memory."""
        return self._total + _EAGER_BYTES <= _BYTES_MAX

    def hold(self, reader: ReadsAhead, eager: bool, read_ahead: int) -> None:
        """Count the scan of `reader`. Other readers may lose theirs to make room."""
        self.release(reader)
        size = (_EAGER_BYTES if eager else _LEAN_BYTES) + read_ahead
        while self._sizes and self._total + size > _BYTES_MAX:
            oldest = next(iter(self._sizes))
            self.release(oldest)
            oldest.give_up()
        self._sizes[reader] = size
        self._total += size

    def release(self, reader: ReadsAhead) -> None:
        """Stop counting `reader`. Its scan can no longer be taken away."""
        self._total -= self._sizes.pop(reader, 0)
