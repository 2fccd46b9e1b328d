"""Parses numbers, text and JSON that clients send: bounded, and refused alike everywhere.

`from_bytes` turns any bytes of a client into text: those that are not UTF-8 survive as lone surrogates.
Such text never appears in an answer: names refuse it, and URLs escape it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec

from streamfold.errors import InvalidError, StreamfoldError

T = TypeVar("T")

#: Characters of a refused value that a message repeats.
SHOWN: Final = 60
#: Digits of the largest 64-bit number.
_DIGITS_MAX: Final = 20
#: What a URL may have beside letters and digits; what is escaped already stays so.
_URL: Final = "%-._~:/?#[]@!$&'()*+,;="


def from_bytes(raw: bytes) -> str:
    """Bytes as text, which `to_bytes` turns back into the same bytes."""
    return raw.decode(errors="surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def parse_unsigned(text: str, largest: int) -> int | None:
    """The number that ASCII digits write, if nothing else is there and it is at most `largest`.

    `int` alone would take signs, spaces, underscores and digits of other scripts, and refuse more than
    4,300 digits in its own way.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    if len(digits) > _DIGITS_MAX:
        return None
    number = int(digits)
    return number if number <= largest else None


def decode_segment(segment: str) -> str | None:
    """A percent-encoded part of a URL as text; None if it is not UTF-8."""
    try:
        return unquote_to_bytes(to_bytes(segment)).decode()
    except UnicodeDecodeError:
        return None


def ascii_url(text: str) -> str:
    """`text` with everything escaped that is not valid in a URL, and so in a header."""
    return quote(to_bytes(text), safe=_URL)


def decode_json(
    decoder: msgspec.json.Decoder[T],
    body: bytes,
    refusal: Callable[[str], StreamfoldError] = InvalidError,
) -> T:
    """`body` as the decoder's type; the refusal names the member that does not fit."""
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
    """All values of each parameter of a query."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=100)
    except ValueError as error:
        raise InvalidError(f"the query cannot be decoded: {error}") from None
    given: dict[str, list[str]] = {}
    for name, value in pairs:
        given.setdefault(name, []).append(value)
    return given
