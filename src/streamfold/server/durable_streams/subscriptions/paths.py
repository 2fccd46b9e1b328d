"""Names in the calls of subscriptions: ids, and streams by the path below the root."""

from __future__ import annotations

from typing import Final

from streamfold.errors import InvalidError
from streamfold.model.names import parse_stream_name
from streamfold.wire.text import SHOWN, decode_segment

#: Bytes of UTF-8 in a subscription's id, and in the name of a worker.
ID_MAX: Final = 256
#: First segment that no stream can have.
_CONTROL: Final = "__ds"


def parse_id(segment: str) -> str:
    """The id of a subscription, as a segment of the path has it."""
    return parse_name(decode(segment), "subscription id")


def parse_name(text: str, what: str) -> str:
    """`text` as the name of something that is kept with a subscription."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidError(f"{what} {text[:60]!r} is not valid Unicode text") from None
    if not 0 < size <= ID_MAX or "\0" in text:
        raise InvalidError(f"{what} of {size} bytes must have 1 to {ID_MAX}, and no NUL")
    return text


def parse_path(text: str) -> str:
    """The path of a stream; slashes at its ends do not count."""
    path = parse_stream_name(text.strip("/"))
    if path.partition("/")[0] == _CONTROL:
        raise InvalidError(f"stream {path[:80]!r} begins with {_CONTROL}, which is reserved")
    return path


def decode(segment: str) -> str:
    text = decode_segment(segment)
    if text is None:
        raise InvalidError(f"path segment {segment[:SHOWN]!r} is not percent-encoded UTF-8")
    return text
