"""Parses numbers, text and JSON from clients, with limits and with uniform errors.

`from_bytes` turns any client bytes into text: undecodable bytes survive as lone surrogates. Such
text never appears in a response, because names reject it and URLs escape it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec

from streamfold.errors import InvalidError, StreamfoldError

T = TypeVar("T")

#: Characters of a rejected value that an error message quotes.
SHOWN: Final = 60
#: Decimal digits of the largest 64-bit number.
_DIGITS_MAX: Final = 20
#: Characters allowed in a URL besides letters and digits. `%` keeps existing escapes unchanged.
_URL: Final = "%-._~:/?#[]@!$&'()*+,;="


def from_bytes(raw: bytes) -> str:
    """Decode bytes to text that `to_bytes` turns back into the same bytes."""
    return raw.decode(errors="surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def parse_unsigned(text: str, largest: int) -> int | None:
    """Parse ASCII digits as a number. Returns None for other text and for numbers above `largest`.

    `int` alone would accept signs, spaces, underscores and digits of other scripts, and would raise
    its own error above 4,300 digits.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > _DIGITS_MAX:
        return None
    number = int(digits)
    return number if number <= largest else None


def decode_segment(segment: str) -> str | None:
    """Decode a percent-encoded URL segment. Returns None if it is not UTF-8."""
    try:
        return unquote_to_bytes(to_bytes(segment)).decode()
    except UnicodeDecodeError:
        return None


def ascii_url(text: str) -> str:
    """Escape everything in `text` that is not valid in a URL, and thus in a header."""
    return quote(to_bytes(text), safe=_URL)


def decode_json(
    decoder: msgspec.json.Decoder[T],
    body: bytes,
    refusal: Callable[[str], StreamfoldError] = InvalidError,
) -> T:
    """Decode `body` as the decoder's type. The error names the member that does not fit."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        reason = f"does not fit the request: {error}"
    except UnicodeDecodeError:
        reason = "is not valid UTF-8"
    except RecursionError:
        reason = "is nested too deeply"
    raise refusal(f"the body {reason}")


def parse_parameters(query: str) -> dict[str, list[str]]:
    """Return all values of each query parameter."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError as error:
        raise InvalidError(f"the query cannot be decoded: {error}") from None
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return values
