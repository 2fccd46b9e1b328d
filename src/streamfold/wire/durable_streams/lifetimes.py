"""How long a stream lives: a ttl that every use renews, or a fixed time of expiry."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from streamfold.errors import InvalidError
from streamfold.wire.text import parse_unsigned

#: Seconds: with it any moment of expiry, in milliseconds, still fits 63 bits.
TTL_MAX: Final = 2**53 - 1

#: Characters of a refused value that a message repeats.
_SHOWN = 60

#: `datetime.fromisoformat` knows the calendar, but takes far more than RFC 3339 has.
_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,30}))?"
    r"(?:[Zz]|([+-](?:[01][0-9]|2[0-3]):[0-5][0-9]))"
)
_EPOCH = datetime.fromtimestamp(0, UTC)


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
