"""Parses request headers and checks them, except against the stream. Names response headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from streamfold.errors import InvalidError
from streamfold.model.positions import SeqNum
from streamfold.wire.durable_streams.content import parse_stream_type
from streamfold.wire.durable_streams.offsets import parse_offset
from streamfold.wire.text import parse_unsigned

#: Seconds. Any expiry with this TTL, in milliseconds, still fits 63 bits.
TTL_MAX: Final = 2**53 - 1

#: Characters of a rejected value that an error message quotes.
_SHOWN = 60

#: `datetime.fromisoformat` checks the calendar but accepts far more than RFC 3339, since Python
#: 3.14 even 24:00.
_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]((?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,30}))?"
    r"(?:[Zz]|([+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
)
_EPOCH = datetime.fromtimestamp(0, UTC)
CONTENT_TYPE: Final = "content-type"
TTL: Final = "stream-ttl"
EXPIRES_AT: Final = "stream-expires-at"
CLOSED: Final = "stream-closed"
STREAM_SEQ: Final = "stream-seq"
PRODUCER_ID: Final = "producer-id"
PRODUCER_EPOCH: Final = "producer-epoch"
PRODUCER_SEQ: Final = "producer-seq"
FORKED_FROM: Final = "stream-forked-from"
FORK_OFFSET: Final = "stream-fork-offset"
FORK_SUB_OFFSET: Final = "stream-fork-sub-offset"
TRIM_ON_SNAPSHOT: Final = "stream-trim-on-snapshot"
#: Headers that `parse_append` reads besides the content type.
APPEND_HEADERS: Final = (CLOSED, STREAM_SEQ, PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ)
#: Response headers, as they are sent.
NEXT_OFFSET: Final = b"stream-next-offset"
UP_TO_DATE: Final = (b"stream-up-to-date", b"true")
STREAM_CLOSED: Final = (b"stream-closed", b"true")
#: Maximum of epochs, sequence numbers and sub-offsets: the largest integer that every JavaScript
#: client can represent.
INTEGER_MAX: Final = 2**53 - 1
#: Maximum bytes of a producer's id, and of a Stream-Seq. Both are stored as long as the stream
#: exists.
NAME_MAX: Final = 256
#: Returns a header's value by its name in lower case, or None if the header is absent.
Header: TypeAlias = Callable[[str], str | None]


def parse_ttl(value: str | None) -> int | None:
    """Parse a `Stream-TTL` header to seconds."""
    if value is None:
        return None
    padded = value.startswith("0") and value != "0"
    ttl = None if padded else parse_unsigned(value, TTL_MAX)
    if ttl is None:
        raise InvalidError(
            f"stream-ttl {value[:_SHOWN]!r} must be whole seconds from 0 to {TTL_MAX}, "
            "in decimal digits without leading zeros"
        )
    return ttl


def parse_expires_at(value: str | None) -> int | None:
    """Parse a `Stream-Expires-At` header to milliseconds since the Unix epoch, rounded down."""
    if value is None:
        return None
    match = _RFC_3339.fullmatch(value)
    try:
        moment = None if match is None else _moment(match)
    except (ValueError, OverflowError):  # not in the calendar, or out of range in UTC
        moment = None
    if moment is None:
        raise InvalidError(
            f"stream-expires-at {value[:_SHOWN]!r} must be a moment by RFC 3339, "
            "such as 2030-01-31T12:00:00Z or 2030-01-31T12:00:00+02:00"
        )
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def format_expires_at(ms: int) -> str:
    """Format any result of `parse_expires_at` as a UTC time with milliseconds."""
    moment = _EPOCH + timedelta(milliseconds=ms)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _moment(match: re.Match[str]) -> datetime:
    date, time, fraction, offset = match.groups()
    micros = (fraction or "0")[:6].ljust(6, "0")
    return datetime.fromisoformat(f"{date}T{time}.{micros}{offset or '+00:00'}").astimezone(UTC)


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """Options of a PUT."""

    #: As written. None means the default type, or for a fork the type of its source.
    content_type: str | None = None
    #: Seconds.
    ttl: int | None = None
    #: Milliseconds since the Unix epoch, negative before it.
    expires_at: int | None = None
    closed: bool = False
    #: The source's path as the client sees it: still percent-encoded, and with its mount point.
    forked_from: str | None = None
    #: End of the inherited records. None means the tail of the source.
    fork_offset: SeqNum | None = None
    #: Bytes or messages past `fork_offset`.
    fork_sub_offset: int = 0
    #: Whether a snapshot trims the stream up to the snapshot's position. None means the server
    #: default.
    trim_on_snapshot: bool | None = None


@dataclass(frozen=True, slots=True)
class ProducerTuple:
    """An append's producer, its epoch, and the append's sequence number in that epoch."""

    id: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """Options of a POST."""

    #: As written, without any check. None if absent or empty.
    content_type: str | None = None
    closed: bool = False
    #: Valid Unicode, so that its text order equals its byte order.
    stream_seq: str | None = None
    producer: ProducerTuple | None = None


def parse_create(header: Header) -> CreateOptions:
    """Parse the options of a PUT."""
    ttl, expires_at = parse_ttl(header(TTL)), parse_expires_at(header(EXPIRES_AT))
    if ttl is not None and expires_at is not None:
        raise InvalidError(f"{TTL} and {EXPIRES_AT} are two lifetimes of one stream: give one")
    forked_from = _name(header, FORKED_FROM, limit=None)
    fork_offset, fork_sub_offset = _fork_point(header, forked_from)
    return CreateOptions(
        parse_stream_type(header(CONTENT_TYPE)),
        ttl,
        expires_at,
        parse_closed(header),
        forked_from,
        fork_offset,
        fork_sub_offset,
        parse_trim_on_snapshot(header),
    )


def parse_append(header: Header) -> AppendOptions:
    """Parse the options of a POST."""
    return AppendOptions(
        header(CONTENT_TYPE) or None,
        parse_closed(header),
        _name(header, STREAM_SEQ, NAME_MAX),
        parse_producer(header),
    )


def parse_closed(header: Header) -> bool:
    """Return whether to close the stream.

    Every value except `true` means no. No value is an error.
    """
    return (header(CLOSED) or "").lower() == "true"


def parse_producer(header: Header) -> ProducerTuple | None:
    """Parse the three producer headers.

    Raises InvalidError unless all of them or none are present.
    """
    sent = [
        name for name in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ) if header(name) is not None
    ]
    if not sent:
        return None
    name = _name(header, PRODUCER_ID, NAME_MAX)
    epoch = _integer(header, PRODUCER_EPOCH)
    seq = _integer(header, PRODUCER_SEQ)
    if name is None or epoch is None or seq is None:
        raise InvalidError(
            f"{', '.join(sent)} alone cannot identify a repeated append: "
            f"send {PRODUCER_ID}, {PRODUCER_EPOCH} and {PRODUCER_SEQ}, or none of them"
        )
    return ProducerTuple(name, epoch, seq)


def _fork_point(header: Header, forked_from: str | None) -> tuple[SeqNum | None, int]:
    for name in (FORK_OFFSET, FORK_SUB_OFFSET):
        if forked_from is None and header(name) is not None:
            raise InvalidError(f"{name} needs {FORKED_FROM}: name the stream to fork")
    sub_offset = _integer(header, FORK_SUB_OFFSET, strict=True) or 0
    offset = header(FORK_OFFSET)
    if offset is None:
        return None, sub_offset
    try:
        return parse_offset(offset), sub_offset
    except InvalidError as error:
        raise InvalidError(f"{FORK_OFFSET}: {error.message}") from None


def parse_trim_on_snapshot(header: Header) -> bool | None:
    """Return whether a snapshot trims the records it covers, or None if the header is missing."""
    value = header(TRIM_ON_SNAPSHOT)
    if value is None:
        return None
    text = value.lower()
    if text not in ("true", "false"):
        raise InvalidError(f"{TRIM_ON_SNAPSHOT} {text[:_SHOWN]!r} must be true or false")
    return text == "true"


def _name(header: Header, name: str, limit: int | None) -> str | None:
    value = header(name)
    if value is None:
        return None
    if not value:
        raise InvalidError(f"{name} is empty: give it a value, or leave it out")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidError(f"{name} {value[:_SHOWN]!r} is not valid UTF-8") from None
    if limit is not None and size > limit:
        raise InvalidError(f"{name} has {size} bytes: give at most {limit}")
    return value


def _integer(header: Header, name: str, *, strict: bool = False) -> int | None:
    """Parse a number. `strict` forbids leading zeros."""
    value = header(name)
    if value is None:
        return None
    padded = value.startswith("0") and value != "0"
    number = None if strict and padded else parse_unsigned(value, INTEGER_MAX)
    if number is None:
        raise InvalidError(
            f"{name} {value[:_SHOWN]!r} must be a whole number from 0 to {INTEGER_MAX}, "
            "in decimal digits alone"
        )
    return number
