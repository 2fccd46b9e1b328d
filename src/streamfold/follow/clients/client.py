"""The stream client protocol: what following and snapshotting require from any client.

Test your own client with `streamfold.testing.StreamClientConformance`.

All clients raise the same errors:

- `RetryLaterError`: nothing happened, and the same call may succeed later. Also ends a read.
- `OutcomeUnknownError`: only from `append`, which may or may not have taken effect.
- `SeqNumMismatchError`, `FencingTokenMismatchError`: an append condition did not hold.
- `PositionUnwrittenError`: a read starts beyond the tail.
- `InvalidError`, `NotFoundError`, `UnauthenticatedError`, `PermissionDeniedError`: see `errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from streamfold.model.positions import StreamPosition
from streamfold.model.records import Header, Record, metered_size
from streamfold.records.protobuf import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    HEADER_NAME,
    HEADER_VALUE,
    RECORDS,
    varint,
)


class StreamRecord(Protocol):
    """A sequenced record. Each client may use its own class, which avoids copying records."""

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
    """The half-open seq_num range of an appended batch."""

    start: int
    end: int


@runtime_checkable
class StreamClient(Protocol):
    """A stream to read from and append to. Safe to share between tasks."""

    @property
    def name(self) -> str:
        """The stream's name in messages."""
        ...

    async def check_tail(self) -> StreamPosition:
        """Return the position after the last durable record. Linearizable with appends."""
        ...

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        """Return up to `count` records from `seq_num` on without waiting. Empty at the tail.

        Returns at most 1000 records and 1 MiB even if `count` asks for more: to continue, peek again
        after the last record. If `seq_num` is trimmed, starts at the first remaining record.
        """
        ...

    def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        """Yield all records from `seq_num` on in non-empty batches, and wait for more at the tail.

        Seq_nums jump where records were trimmed, which the caller must check. The caller must also
        close the generator, which ends the session.
        """
        ...

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        """Append 1 to 1000 records, at most 1 MiB in total, durably and all or nothing."""
        ...


class EncodedBatch(NamedTuple):
    """Records encoded as the `records` fields of S2's protobuf message AppendInput."""

    record_count: int
    #: Metered bytes, to which the limits apply.
    metered: int
    records: bytes
    #: Source rows up to and including this batch.
    rows: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> EncodedBatch:
        """Encode the records of one append."""
        encoded = b"".join(map(encoded_record, records))
        return cls(len(records), sum(map(metered_size, records)), encoded)


def encoded_record(record: Record) -> bytes:
    """Encode a record as an AppendInput field."""
    stamp, headers = record.timestamp, b"".join(map(encoded_header, record.headers))
    stamped = b"" if stamp is None else b"%c%b" % (APPEND_TIMESTAMP, varint(stamp))
    return _field(RECORDS, stamped + headers + _field(APPEND_BODY, record.body))


def encoded_header(header: Header) -> bytes:
    """Encode a header as an AppendRecord field."""
    pair = _field(HEADER_NAME, header.name) + _field(HEADER_VALUE, header.value)
    return _field(APPEND_HEADERS, pair)


def _field(tag: int, content: bytes) -> bytes:
    return b"%c%b%b" % (tag, varint(len(content)), content)


class EncodedClient(StreamClient, Protocol):
    """A client that also accepts records already encoded for the wire."""

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        """Append the batches in order and return the tail. Stops at the first that fails."""
        ...
