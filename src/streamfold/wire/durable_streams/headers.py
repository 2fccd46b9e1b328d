"""Request headers, checked as far as possible without the stream; names of answer headers."""

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

#: Seconds: with it any moment of expiry, in milliseconds, still fits 63 bits.
TTL_MAX: Final = 2**53 - 1

#: Characters of a refused value that a message repeats.
_SHOWN = 60

#: `datetime.fromisoformat` knows the calendar, but takes far more than RFC 3339 has: since Python
#: 3.14 also 24:00.
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
#: Headers of answers, as they are sent.
NEXT_OFFSET: Final = b"stream-next-offset"
UP_TO_DATE: Final = (b"stream-up-to-date", b"true")
STREAM_CLOSED: Final = (b"stream-closed", b"true")
#: Of epochs, sequences and sub-offsets: the integers that every JavaScript client can hold.
INTEGER_MAX: Final = 2**53 - 1
#: Bytes of a producer's id, and of a Stream-Seq: both are kept for as long as the stream.
NAME_MAX: Final = 256
#: The value of a header by its name in lower case; None where it is absent.
Header: TypeAlias = Callable[[str], str | None]


def parse_ttl(value: str | None) -> int | None:
    """Seconds, from a `Stream-TTL` header."""
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
    """Milliseconds since the Unix epoch, rounded down, from a `Stream-Expires-At` header."""
    if value is None:
        return None
    match = _RFC_3339.fullmatch(value)
    try:
        moment = None if match is None else _moment(match)
    except (ValueError, OverflowError):  # not in the calendar, or not once it is in UTC
        moment = None
    if moment is None:
        raise InvalidError(
            f"stream-expires-at {value[:_SHOWN]!r} must be a moment by RFC 3339, "
            "such as 2030-01-31T12:00:00Z or 2030-01-31T12:00:00+02:00"
        )
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def format_expires_at(ms: int) -> str:
    """A moment in UTC with milliseconds, for whatever `parse_expires_at` gave."""
    moment = _EPOCH + timedelta(milliseconds=ms)
    return f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def _moment(match: re.Match[str]) -> datetime:
    date, time, fraction, offset = match.groups()
    micros = (fraction or "0")[:6].ljust(6, "0")
    return datetime.fromisoformat(f"{date}T{time}.{micros}{offset or '+00:00'}").astimezone(UTC)


#: Characters of a refused value that a message repeats.


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """What a PUT asks for."""

    #: As written; None where a stream has the default, and a fork the type of its source.
    content_type: str | None = None
    #: Seconds.
    ttl: int | None = None
    #: Milliseconds since the Unix epoch; negative before it.
    expires_at: int | None = None
    closed: bool = False
    #: The path of the source, as the client sees it: still percent-encoded, with its mount point.
    forked_from: str | None = None
    #: End of what is inherited; None for the tail of the source.
    fork_offset: SeqNum | None = None
    #: Bytes or messages past `fork_offset`.
    fork_sub_offset: int = 0
    #: A snapshot moves the head of the stream to where it was taken.
    #: None = as the server does by default.
    trim_on_snapshot: bool | None = None


@dataclass(frozen=True, slots=True)
class ProducerTuple:
    """The producer of an append, its epoch, and the append's sequence number in that epoch."""

    id: str
    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """What a POST says about its body."""

    #: As written, whatever it is; None where it is absent or empty.
    content_type: str | None = None
    closed: bool = False
    #: Valid Unicode, so that its order as text is its order as bytes.
    stream_seq: str | None = None
    producer: ProducerTuple | None = None


def parse_create(header: Header) -> CreateOptions:
    """The options of a PUT."""
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
    """The options of a POST."""
    return AppendOptions(
        header(CONTENT_TYPE) or None,
        parse_closed(header),
        _name(header, STREAM_SEQ, NAME_MAX),
        parse_producer(header),
    )


def parse_closed(header: Header) -> bool:
    """Whether the stream is to be closed; every value but `true` says no, and none is refused."""
    return (header(CLOSED) or "").lower() == "true"


def parse_producer(header: Header) -> ProducerTuple | None:
    """The producer's three headers: all of them, or none."""
    given = [
        name for name in (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ) if header(name) is not None
    ]
    if not given:
        return None
    name = _name(header, PRODUCER_ID, NAME_MAX)
    epoch = _integer(header, PRODUCER_EPOCH)
    seq = _integer(header, PRODUCER_SEQ)
    if name is None or epoch is None or seq is None:
        raise InvalidError(
            f"{', '.join(given)} alone cannot identify a repeated append: "
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
    """Whether a snapshot is to trim what it covers; None where the header is missing."""
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
    """A number; a strict one has no leading zeros."""
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
