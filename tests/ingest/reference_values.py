"""The slow reference for values of PostgreSQL as JSON, in plain Python."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from streamfold.ingest.postgres.values import (
    BOOL,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    OID,
    TIMESTAMP,
    TIMESTAMPTZ,
)

#: Text of one value to JSON.
ToJson: TypeAlias = Callable[[bytes], bytes]

_encode = msgspec.json.Encoder().encode
_INT32_MAX, _INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
_SECOND_US: Final = 1_000_000
_DAY_US: Final = 86_400 * _SECOND_US
#: Of the years 1 to 9999.
_DATE: Final = re.compile(rb"\d{4}-\d\d-\d\d")
_MOMENT: Final = re.compile(rb"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(\+00)?")
_FLOAT: Final = re.compile(rb"-?(?:0|[1-9]\d*)(\.\d+)?(e[+-]\d+)?")
_FLOAT_NAMES: Final = frozenset((b"NaN", b"Infinity", b"-Infinity"))
_DATED: Final = re.compile(
    rb"(\d+)-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:\+00)?)?( BC)?"
)


def to_json(type_oid: int) -> ToJson:
    """Return the function for a type; a domain is given as the type that it is based on.

    The function raises ValueError, without the value, for a text that is not one of the type.
    """
    return _FORMS.get(type_oid, _text)


def _text(raw: bytes) -> bytes:
    return _encode(raw.decode())


def _number(raw: bytes) -> bytes:
    digits = raw[1:] if raw[:1] == b"-" else raw
    if not digits.isdigit() or (digits[:1] == b"0" and len(digits) > 1):
        raise ValueError("it is not a whole number")
    return raw


def _float(raw: bytes) -> bytes:
    if raw in _FLOAT_NAMES:
        return b'"%s"' % raw
    match = _FLOAT.fullmatch(raw)
    if match is None:
        raise ValueError("it is not a number")
    # A point tells readers without a schema that it is not a whole number.
    return raw + b".0" if match[1] is None and match[2] is None else raw


def _bool(raw: bytes) -> bytes:
    if raw not in (b"t", b"f"):
        raise ValueError("it is not a boolean")
    return b"true" if raw == b"t" else b"false"


def _bytes(raw: bytes) -> bytes:
    if raw[:2] != b"\\x":
        raise ValueError("it is not bytes in hexadecimal digits")
    return b'"%s"' % base64.b64encode(binascii.unhexlify(raw[2:]))


def _date(raw: bytes) -> bytes:
    if _DATE.fullmatch(raw):
        return b'"%s"' % raw
    return _counted(raw, 1, _INT32_MAX)


def _timestamp(raw: bytes) -> bytes:
    match = _MOMENT.fullmatch(raw)
    if match is not None and match[3] is None:
        return b'"%sT%s"' % match.groups()[:2]
    return _counted(raw, _DAY_US, _INT64_MAX)


def _timestamptz(raw: bytes) -> bytes:
    match = _MOMENT.fullmatch(raw)
    if match is not None and match[3] is not None:
        return b'"%sT%sZ"' % match.groups()[:2]
    return _counted(raw, _DAY_US, _INT64_MAX)


def _counted(raw: bytes, per_day: int, greatest: int) -> bytes:
    """Return days or microseconds since 1970 as text."""
    if raw == b"infinity":
        return b'"%d"' % greatest
    if raw == b"-infinity":
        return b'"%d"' % (-greatest - 1)
    match = _DATED.fullmatch(raw)
    if match is None:
        raise ValueError("it is not a date or time")
    year, month, day = (int(part) for part in match.groups()[:3])
    days = _days(1 - year if match[8] else year, month, day)
    if per_day == 1:
        return b'"%d"' % days
    hour, minute, second = (int(part or 0) for part in match.groups()[3:6])
    fraction = int((match[7] or b"").ljust(6, b"0") or 0)
    seconds = hour * 3600 + minute * 60 + second
    return b'"%d"' % (days * per_day + seconds * _SECOND_US + fraction)


def _days(year: int, month: int, day: int) -> int:
    """Return days since 1970 in the Gregorian calendar, which PostgreSQL extends in both directions."""
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    day_of_era = year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year
    return era * 146_097 + day_of_era - 719_468


_FORMS: Final[dict[int, ToJson]] = {
    **dict.fromkeys((INT2, INT4, INT8, OID), _number),
    **dict.fromkeys((FLOAT4, FLOAT8), _float),
    BOOL: _bool,
    BYTEA: _bytes,
    DATE: _date,
    TIMESTAMP: _timestamp,
    TIMESTAMPTZ: _timestamptz,
}
