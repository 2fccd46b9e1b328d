"""Content types, and the messages of JSON streams.

Only whitespace between tokens is removed. Numbers, escapes, duplicate members and the order of
members stay as they were written, so a reader loses nothing but whitespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from streamfold.errors import InvalidError, TooLargeError
from streamfold.wire.json_scan import (
    NESTED_MAX,
    Limits,
    Pieces,
    check_nesting,
    check_syntax,
    check_value,
    split_json,
)

#: Content type of a stream created without a type, or with one that cannot be parsed.
DEFAULT_CONTENT_TYPE: Final = "application/octet-stream"
JSON: Final = "application/json"

#: Maximum characters. A type is stored with its stream and sent with every read.
CONTENT_TYPE_MAX: Final = 256

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - RFC 9110's word for a name
_CONTENT_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}[ \t]*(?:;[ \t\x21-\x7e]*)?")
#: Maximum bytes and commas for which a single msgspec call is faster than a scan and takes little
#: time.
PLAIN_BYTES: Final = 64 << 10
PLAIN_COMMAS: Final = 2_000
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])


def normalise_content_type(text: str) -> str:
    """Return the media type in lower case, without parameters.

    Types with equal results are the same.
    """
    return text.partition(";")[0].strip(" \t").lower()


def is_json(content_type: str) -> bool:
    """Return whether records of this type are JSON messages."""
    return content_type == JSON or normalise_content_type(content_type) == JSON


def is_text(content_type: str) -> bool:
    """Return whether server-sent events carry the records as text instead of base64."""
    return is_json(content_type) or normalise_content_type(content_type).startswith("text/")


def parse_stream_type(value: str | None) -> str | None:
    """Return the content type for a new stream as it was written, or None if none was given.

    A malformed type is replaced by the default, as in the protocol's other servers, so every stored
    type can be sent in a header.
    """
    if value is None:
        return None
    text = value.strip(" \t")
    if len(text) > CONTENT_TYPE_MAX:
        raise InvalidError(
            f"content-type has {len(text)} characters: give at most {CONTENT_TYPE_MAX}"
        )
    return text if _CONTENT_TYPE.fullmatch(text) else DEFAULT_CONTENT_TYPE


def is_plain(body: bytes) -> bool:
    """Return whether a body can be split in about a millisecond, whatever it contains."""
    return len(body) <= PLAIN_BYTES and body.count(b",") <= PLAIN_COMMAS


def split_messages(body: bytes, limits: Limits, *, allow_empty: bool) -> list[bytes]:
    """Split a body into messages: an array's elements, or the one value that is not an array.

    `allow_empty` is for a creation, where `[]` means no messages yet. In an append, `[]` is
    rejected. Time and memory are linear in the body's size, and every step is short: see
    `json_scan`.
    """
    is_array, messages = _split_plain(body) if is_plain(body) else split_json(body, limits)
    if is_array and not messages and not allow_empty:
        raise InvalidError("the body is an empty array: append at least one message")
    _check(messages, limits)
    return messages


def join_messages(messages: Iterable[bytes]) -> bytes:
    """Join messages into the array that a read returns."""
    return b"[%b]" % b",".join(messages)


def check_message(body: bytes) -> None:
    """Raise unless a record is exactly one JSON value. Applies whichever protocol it arrived by."""
    check_value(body)


def _check(messages: list[bytes], limits: Limits) -> None:
    if len(messages) > limits.elements:
        raise TooLargeError(
            f"the body has more than {limits.elements} messages: send fewer at once"
        )
    longest = max(map(len, messages), default=0)
    if longest > limits.element_bytes:
        raise TooLargeError(
            f"a message of {longest} bytes is too large: at most {limits.element_bytes}"
        )


def _split_plain(body: bytes) -> Pieces:
    check_syntax(body)
    text = msgspec.json.format(body, indent=-1)
    if not text.startswith(b"["):
        check_nesting(text)
        return Pieces(False, [text])
    messages = list(map(bytes, _ARRAY.decode(text)))
    if (
        max(map(len, messages), default=0) > NESTED_MAX
    ):  # one call per message would take 25% longer
        for message in messages:
            check_nesting(message, outside=1)
    return Pieces(True, messages)
