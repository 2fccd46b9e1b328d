"""PostgreSQL values as lossless JSON, and column types for readers.

| PostgreSQL | JSON | type |
|---|---|---|
| smallint, integer, bigint, oid | number | SMALLINT, INT, BIGINT |
| real, double precision | number; `"NaN"`, `"Infinity"`, `"-Infinity"` | REAL, DOUBLE |
| boolean | true, false | BOOLEAN |
| numeric(p, s) up to 38 digits | text, with all digits | DECIMAL(p, s) |
| bytea | text in base64 | BINARY |
| date, timestamp, timestamptz | text in ISO 8601, timestamptz in UTC | DATE, TIMESTAMP_NTZ, TIMESTAMP |
| all others | PostgreSQL's own text | STRING |

ISO 8601 has the years 1 to 9999. Other dates and times are whole numbers as text: days or microseconds
since 1970. As in PostgreSQL, `infinity` is the type's largest number and `-infinity` its smallest.
Domains are treated as their base types.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from streamfold._native import CodecError, write_value

#: Converts the text of one value to JSON.
ToJson: TypeAlias = Callable[[bytes], bytes]

#: Digits of a 128-bit decimal.
_DIGITS_MAX: Final = 38
#: Bytes that a type modifier has before its value.
_MODIFIER_HEAD: Final = 4
BOOL, BYTEA, OID = 16, 17, 26
INT8, INT2, INT4 = 20, 21, 23
FLOAT4, FLOAT8, NUMERIC = 700, 701, 1700
DATE, TIMESTAMP, TIMESTAMPTZ = 1082, 1114, 1184


#: How a column's text becomes JSON, as native code's numbers.
NUMBER, TEXT, _BOOL, FLOAT, _DATE, _TIMESTAMP, _TIMESTAMPTZ, _BYTEA = range(8)
_KINDS: Final = {
    **dict.fromkeys((INT2, INT4, INT8, OID), NUMBER),
    **dict.fromkeys((FLOAT4, FLOAT8), FLOAT),
    BOOL: _BOOL,
    BYTEA: _BYTEA,
    DATE: _DATE,
    TIMESTAMP: _TIMESTAMP,
    TIMESTAMPTZ: _TIMESTAMPTZ,
}
#: A date, or a date and a time in UTC, of any year.
_FAR_MOMENT: Final = re.compile(
    rb"(\d+)-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(?P<fraction>\d{1,6}))?(?:\+00)?)?(?P<bc> BC)?"
)
#: Days from 1 March of year 0 to 1 January 1970.
_DAYS_TO_1970: Final = 719_468
#: What is wrong with a text, by native code's error code.
_FAULTS: Final = {
    "whole": "it is not a whole number",
    "number": "it is not a number",
    "boolean": "it is not a boolean",
    "bytes": "it is not bytes in hexadecimal digits",
    "moment": "it is not a date or time",
}


def kind_of(type_oid: int) -> int:
    """Return how native code writes values of a type. Pass domains as their base types."""
    return _KINDS.get(type_oid, TEXT)


def to_json(type_oid: int) -> ToJson:
    """Return the function for a type. Pass domains as their base types.

    The function raises ValueError, without revealing the value, for a text that does not fit the
    type.
    """
    return partial(_written, kind_of(type_oid))


def _written(kind: int, raw: bytes) -> bytes:
    try:
        return write_value(kind, raw)
    except CodecError as error:
        code = error.args[0]
        if code == "utf8":
            raw.decode()  # its error says where
        if code == "moment" and (match := _FAR_MOMENT.fullmatch(raw)):
            return _counted(kind, match)
        raise ValueError(_FAULTS[code]) from None


def _counted(kind: int, match: re.Match[bytes]) -> bytes:
    """Return days or microseconds since 1970 in the proleptic Gregorian calendar."""
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    year = (1 - year if match["bc"] else year) - (month <= 2)
    era, year_of_era = divmod(year, 400)
    days = era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100
    days += (153 * ((month + 9) % 12) + 2) // 5 + day - 1 - _DAYS_TO_1970
    if kind == _DATE:
        return b'"%d"' % days
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second
    return b'"%d"' % (seconds * 1_000_000 + int((match["fraction"] or b"").ljust(6, b"0")))


def column_type(type_oid: int, modifier: int) -> str:
    """Return the type for readers, as a snapshotter's `schema` names it."""
    if type_oid != NUMERIC:
        return _TYPES.get(type_oid, "STRING")
    if modifier < _MODIFIER_HEAD:
        return "STRING"
    digits, scale = (modifier - _MODIFIER_HEAD) >> 16, (modifier - _MODIFIER_HEAD) & 0x7FF
    # The scale is a signed 11-bit number. Other systems do not support scales that are negative or
    # larger than the digits.
    return f"DECIMAL({digits},{scale})" if scale <= digits <= _DIGITS_MAX else "STRING"


_TYPES: Final = {
    BOOL: "BOOLEAN",
    INT2: "SMALLINT",
    INT4: "INT",
    INT8: "BIGINT",
    OID: "BIGINT",
    FLOAT4: "REAL",
    FLOAT8: "DOUBLE",
    BYTEA: "BINARY",
    DATE: "DATE",
    TIMESTAMP: "TIMESTAMP_NTZ",
    TIMESTAMPTZ: "TIMESTAMP",
}
