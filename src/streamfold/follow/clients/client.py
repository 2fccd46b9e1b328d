"""The seam to a stream: what following and snapshotting need of any client.

A client of your own runs `streamfold.testing.StreamClientConformance`.

Errors, the same for all clients:

- `RetryLaterError`: nothing happened, the same call may succeed later; ends a read, too.
- `OutcomeUnknownError`: only from `append`, which may or may not have had its effect.
- `SeqNumMismatchError`, `FencingTokenMismatchError`: a condition of an append did not hold.
- `PositionUnwrittenError`: a read starts beyond the tail.
- `InvalidError`, `NotFoundError`, `UnauthenticatedError`, `PermissionDeniedError`: see `errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from streamfold.model.positions import StreamPosition
from streamfold.model.records import Header, Record, metered_size
from streamfold.records.plain import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    HEADER_NAME,
    HEADER_VALUE,
    RECORDS,
)
from streamfold.records.protobuf import varint


class StreamRecord(Protocol):
    """A sequenced record; every client may use its own class, so that records are not copied."""

    @property
    def seq_num(self) -> int: ...

    @property
    def timestamp(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    @property
    def body(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Appended:
    """Where a batch went: half-open range of seq_nums."""

    start: int
    end: int


@runtime_checkable
class StreamClient(Protocol):
    """One stream, for reading and appending; safe to share between tasks."""

    @property
    def name(self) -> str:
        """What messages call the stream."""
        ...

    async def check_tail(self) -> StreamPosition:
        """The position after the last durable record; linearizable with appends."""
        ...

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        """Up to `count` records at or after `seq_num`, without waiting; empty at the tail.

        It returns 1000 records and 1 MiB at most, even if `count` records would be more: peek again
        after the last one. If `seq_num` is trimmed, it starts at the first record that is not.
        """
        ...

    def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        """Yield all records from `seq_num` on in batches that are never empty, and wait for more.

        Where records were trimmed the seq_nums jump: the caller has to notice. The caller
        closes the generator, which ends the session.
        """
        ...

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        """Append 1 to 1000 records of at most 1 MiB together, all or nothing, durably."""
        ...


class EncodedBatch(NamedTuple):
    """Records as the fields `records` of S2's protobuf message AppendInput."""

    record_count: int
    #: Bytes that limits count.
    metered: int
    records: bytes
    #: Rows of the source up to the last one of this batch.
    rows: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> EncodedBatch:
        """Return records as one append can take them."""
        encoded = b"".join(map(encoded_record, records))
        return cls(len(records), sum(map(metered_size, records)), encoded)


def encoded_record(record: Record) -> bytes:
    """Return the record as a field of AppendInput."""
    stamp, headers = record.timestamp, b"".join(map(encoded_header, record.headers))
    stamped = b"" if stamp is None else b"%c%b" % (APPEND_TIMESTAMP, varint(stamp))
    return _field(RECORDS, stamped + headers + _field(APPEND_BODY, record.body))


def encoded_header(header: Header) -> bytes:
    """Return the header as a field of AppendRecord."""
    pair = _field(HEADER_NAME, header.name) + _field(HEADER_VALUE, header.value)
    return _field(APPEND_HEADERS, pair)


def _field(tag: int, content: bytes) -> bytes:
    return b"%c%b%b" % (tag, varint(len(content)), content)


@runtime_checkable
class EncodedAppends(Protocol):
    """A client that takes records in the form in which it sends them."""

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        """Append the batches in order; returns the tail. The first that fails ends it."""
        ...
