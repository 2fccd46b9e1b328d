"""Records: what is appended, and what is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streamfold.model.positions import SeqNum, Timestamp

#: Records in one append.
BATCH_RECORDS_MAX = 1000
#: Metered bytes in one append, and so in one record.
BATCH_BYTES_MAX = 1 << 20

#: Metered bytes that every record costs, and that every header costs beyond its name and value.
RECORD_OVERHEAD = 8
HEADER_OVERHEAD = 2

FENCE_COMMAND = b"fence"
TRIM_COMMAND = b"trim"


class Header(NamedTuple):
    """One header; an empty name marks a command record."""

    name: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A record to append; without a timestamp it gets its time of arrival."""

    body: bytes = b""
    headers: tuple[Header, ...] = ()
    timestamp: int | None = None


class SequencedRecord(msgspec.Struct, frozen=True, gc=False):
    """A record of a stream, with its position; cheap, because readers get thousands at once."""

    seq_num: SeqNum
    timestamp: Timestamp
    headers: tuple[Header, ...]
    body: bytes


def metered_size(record: Record | SequencedRecord) -> int:
    """Bytes that limits and accounting count for `record`; timestamps and framing are free."""
    headers = sum(HEADER_OVERHEAD + len(name) + len(value) for name, value in record.headers)
    return RECORD_OVERHEAD + headers + len(record.body)


def fence_record(token: str) -> Record:
    """A command that sets the stream's fencing token; the empty token clears it."""
    return Record(token.encode(), (Header(b"", FENCE_COMMAND),))


def trim_record(seq_num: int) -> Record:
    """A command that trims everything below `seq_num`."""
    return Record(seq_num.to_bytes(8, "big"), (Header(b"", TRIM_COMMAND),))


#: On a record that is not the last of its append: boundaries of appends survive by it. It is there only
#: where an append has several records that came in by a protocol whose appends are units.
CONTINUED = Header(b"ds-more", b"")


def is_command(record: SequencedRecord) -> bool:
    """Whether the record is an order to the stream, not content."""
    return bool(record.headers) and not record.headers[0].name
