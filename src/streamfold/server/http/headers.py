"""Headers of requests and answers, in bytes as they are sent."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from streamfold.model.positions import U64_MAX
from streamfold.wire.text import from_bytes, parse_unsigned

#: Names in lower case.
Headers: TypeAlias = Iterable[tuple[bytes, bytes]]

#: On every answer with status 401, as RFC 9110 demands: some clients do not show such an answer to
#: their callers without it.
CHALLENGE: Final = (b"www-authenticate", b"Bearer")

#: Headers that decide who is calling, and from where.
_SINGLE: Final = frozenset((b"host", b"origin", b"authorization", b"s2-basin"))
#: Digits below which a number is certainly less than 2**64.
_DIGITS_SURE: Final = 20

#: Names of headers as bytes: the same few dozen, again and again.
encoded_name = lru_cache(maxsize=256)(str.encode)

#: The value of a header as text.
text_of = from_bytes


def is_ambiguous(repeated: Iterable[bytes]) -> bool:
    """Whether a header that must be single is among those that come more than once."""
    return not _SINGLE.isdisjoint(repeated)


def parse_content_length(raw: bytes) -> int | None:
    """The number of bytes that the header declares; None if it is not a number of 64 bits."""
    if len(raw) < _DIGITS_SURE and raw.isdigit():
        return int(raw)  # in fewer steps: nearly every request with a body has one
    return parse_unsigned(text_of(raw), U64_MAX)
