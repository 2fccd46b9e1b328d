"""What every JSON body of the protocol shares: how it is refused, and its basic types."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from streamfold.errors import InvalidError
from streamfold.model.positions import U64_MAX
from streamfold.wire import text as wire_text
from streamfold.wire.s2.errors import BadJsonError

#: A JSON number without sign or fraction. msgspec cannot bound beyond 63 bits: see `check_u64`.
Unsigned: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

_EPOCH = datetime.fromtimestamp(0, UTC)

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """`body` as the decoder's type; the refusal names the member that does not fit."""
    return wire_text.decode_json(decoder, body, BadJsonError)


def check_u64(value: int | None, what: str) -> None:
    """Refuse a number that does not fit 64 bits."""
    if value is not None and value > U64_MAX:
        raise BadJsonError(f"{what} {value} is too large: at most {U64_MAX}")


def choose(choices: type[E], text: str, what: str) -> E:
    """`text` as one of `choices`; the refusal lists them."""
    if text not in list(choices):
        raise BadJsonError(f"{what} {text[:40]!r} is unknown: choose from {', '.join(choices)}")
    return choices(text)


@contextmanager
def names_in_body() -> Iterator[None]:
    """Report a name that breaks its rules as a bad body, not as an invalid request."""
    try:
        yield
    except InvalidError as error:
        raise BadJsonError(error.message) from None


def rfc3339(ms: int) -> datetime:
    """A time as msgspec writes it to JSON: RFC 3339 in UTC."""
    return _EPOCH + timedelta(milliseconds=ms)
