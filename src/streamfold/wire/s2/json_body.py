"""Error handling and basic types shared by all JSON bodies of the protocol."""

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

#: A JSON number without sign or fraction. msgspec cannot set a bound above 63 bits: see
#: `check_u64`.
Unsigned: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

_EPOCH = datetime.fromtimestamp(0, UTC)

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode `body` as the decoder's type. The error names the member that does not fit."""
    return wire_text.decode_json(decoder, body, BadJsonError)


def check_u64(value: int | None, what: str) -> None:
    """Raise if a number does not fit 64 bits."""
    if value is not None and value > U64_MAX:
        raise BadJsonError(f"{what} {value} is too large: at most {U64_MAX}")


def choose(choices: type[E], text: str, what: str) -> E:
    """Return `text` as one of `choices`. The error lists them."""
    if text not in list(choices):
        raise BadJsonError(f"{what} {text[:40]!r} is unknown: choose from {', '.join(choices)}")
    return choices(text)


@contextmanager
def names_in_body() -> Iterator[None]:
    """Turn InvalidError for names in the block into BadJsonError: the body is at fault."""
    try:
        yield
    except InvalidError as error:
        raise BadJsonError(error.message) from None


def rfc3339(ms: int) -> datetime:
    """Return a time that msgspec writes to JSON as RFC 3339 in UTC."""
    return _EPOCH + timedelta(milliseconds=ms)
