"""Records as appended and as read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streamfold.model.positions import SeqNum, Timestamp

#: Maximum records per append.
BATCH_RECORDS_MAX = 1000
#: Maximum metered bytes per append, and so per record.
BATCH_BYTES_MAX = 1 << 20

#: Metered bytes of each record, and of each header beyond its name and value.
RECORD_OVERHEAD = 8
HEADER_OVERHEAD = 2

FENCE_COMMAND = b"fence"
TRIM_COMMAND = b"trim"


class Header(NamedTuple):
    """One header. An empty name marks a command record."""

    name: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append. Without a timestamp, it gets its arrival time."""

    body: bytes = b""
    headers: tuple[Header, ...] = ()
    timestamp: int | None = None


class SequencedRecord(msgspec.Struct, frozen=True, gc=False):
    """A stream record with its position. Cheap to make, because reads return thousands."""

    seq_num: SeqNum
    timestamp: Timestamp
    headers: tuple[Header, ...]
    body: bytes


def metered_size(record: Record | SequencedRecord) -> int:
    """Return the metered bytes of `record`. Timestamps and framing are free."""
    headers = sum(HEADER_OVERHEAD + len(name) + len(value) for name, value in record.headers)
    return RECORD_OVERHEAD + headers + len(record.body)


def fence_record(token: str) -> Record:
    """Return a command that sets the stream's fencing token. An empty token clears it."""
    return Record(token.encode(), (Header(b"", FENCE_COMMAND),))


def trim_record(seq_num: int) -> Record:
    """Return a command that trims all records before `seq_num`."""
    return Record(seq_num.to_bytes(8, "big"), (Header(b"", TRIM_COMMAND),))


#: Marks every record of an append except the last, which preserves append boundaries. Used only if
#: an append has several records and arrived over a protocol in which an append is a unit.
CONTINUED = Header(b"ds-more", b"")


def is_command(record: SequencedRecord) -> bool:
    """Return whether the record is a command rather than content."""
    return bool(record.headers) and not record.headers[0].name
