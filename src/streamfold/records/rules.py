"""Rules for record batches, their commands and their timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from streamfold.errors import InvalidError
from streamfold.model.configs import TimestampMode
from streamfold.model.names import TOKEN_MAX
from streamfold.model.positions import U64_MAX
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    FENCE_COMMAND,
    TRIM_COMMAND,
    Record,
)

#: Bytes in a trim command's body, a big-endian number.
TRIM_BODY = 8


@dataclass(frozen=True, slots=True)
class Fence:
    """A command record, at `index` in its batch, that sets the stream's fencing token."""

    index: int
    token: str


@dataclass(frozen=True, slots=True)
class Trim:
    """A command record, at `index` in its batch, that trims all records before `seq_num`."""

    index: int
    seq_num: int


Command: TypeAlias = Fence | Trim


def check_count(count: int) -> None:
    if count == 0:
        raise InvalidError(f"the batch has no records: send 1 to {BATCH_RECORDS_MAX}")
    if count > BATCH_RECORDS_MAX:
        raise too_many_records()


def too_many_records() -> InvalidError:
    return InvalidError(f"the batch has more than {BATCH_RECORDS_MAX} records: split it")


def check_metered(metered: int) -> None:
    if metered > BATCH_BYTES_MAX:
        raise InvalidError(
            f"the batch has {metered} metered bytes, at most {BATCH_BYTES_MAX} are allowed: "
            "split it"
        )


def check_types(index: int, record: Record) -> None:
    """Reject a record whose members have the wrong types."""
    if not isinstance(record.body, bytes):
        raise InvalidError(f"record {index}: the body is {type(record.body).__name__}, not bytes")
    for header in record.headers:
        if (
            not isinstance(header, tuple)
            or len(header) != 2
            or not all(isinstance(part, bytes) for part in header)
        ):
            raise InvalidError(f"record {index}: header {header!r} is not a pair of bytes")
    if record.timestamp is not None:
        check_timestamp(index, record.timestamp)


def check_timestamp(index: int, timestamp: int) -> None:
    if not isinstance(timestamp, int) or not 0 <= timestamp <= U64_MAX:
        raise InvalidError(f"record {index}: timestamp {timestamp!r} is not within 0 to {U64_MAX}")


def command_of(index: int, headers: int, command: bytes, body: bytes) -> Command:
    """Parse the command in a record with a nameless header. Rejects malformed commands.

    `command` is the value of the record's first header.
    """
    if headers != 1:
        raise InvalidError(
            f"record {index}: a header with an empty name marks a command and must be the only "
            f"one, but the record has {headers} headers"
        )
    if command == FENCE_COMMAND:
        return Fence(index, _token(index, body))
    if command == TRIM_COMMAND:
        return Trim(index, _trim_point(index, body))
    raise InvalidError(
        f"record {index}: {command[:TOKEN_MAX]!r} is not a command, only 'fence' and 'trim' are; "
        "give the header a name if the record is data"
    )


def _token(index: int, body: bytes) -> str:
    if len(body) > TOKEN_MAX:
        raise InvalidError(
            f"record {index}: fencing token of {len(body)} bytes is too long: "
            f"at most {TOKEN_MAX} bytes"
        )
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise InvalidError(f"record {index}: fencing token {body!r} is not UTF-8") from None


def _trim_point(index: int, body: bytes) -> int:
    if len(body) != TRIM_BODY:
        raise InvalidError(
            f"record {index}: the body of a trim command has {len(body)} bytes, it must be a "
            f"big-endian sequence number of {TRIM_BODY}"
        )
    return int.from_bytes(body, "big")


class Slot(msgspec.Struct, frozen=True, gc=False):
    """The seq_nums of a batch, and the rules for its timestamps."""

    first: int
    mode: TimestampMode
    #: Whether timestamps may be in the future.
    uncapped: bool
    now: int
    #: Timestamp of the record before the batch, which is the minimum.
    floor: int


class Sequenced(msgspec.Struct, frozen=True, gc=False):
    """A batch with its seq_nums and timestamps, as stored and read."""

    payload: bytes
    first_timestamp: int
    last_timestamp: int


def missing_timestamp(index: int) -> InvalidError:
    return InvalidError(
        f"record {index} has no timestamp: this stream requires one from the client "
        "(timestamp mode client-require)"
    )
