"""JSON streams: a body becomes messages, messages become a body, and the writer's text is kept.

Only whitespace between tokens is taken out. Numbers, escapes, duplicate members and the order of
members stay as they were written, so a reader loses nothing but whitespace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from streamfold.errors import InvalidError, TooLargeError
from streamfold.wire.json_scan import Limits, Pieces, check_value, split_json

#: Bytes, and commas, up to which one call of msgspec is quicker than a scan, and short enough.
PLAIN_BYTES: Final = 64 << 10
PLAIN_COMMAS: Final = 2_000

_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])


def is_plain(body: bytes) -> bool:
    """Whether a body is split in about a millisecond, whatever is in it."""
    return len(body) <= PLAIN_BYTES and body.count(b",") <= PLAIN_COMMAS


def split_messages(body: bytes, limits: Limits, *, allow_empty: bool) -> list[bytes]:
    """The messages of a body: the elements of an array, or the one value that is not an array.

    `allow_empty` is for a creation, in which `[]` means no message yet; in an append it is refused.
    Time and memory are linear in the body's size, and no step of it is long: see `json_scan`.
    """
    is_array, messages = _split_plain(body) if is_plain(body) else split_json(body, limits)
    if is_array and not messages and not allow_empty:
        raise InvalidError("the body is an empty array: append at least one message")
    _check(messages, limits)
    return messages


def join_messages(messages: Iterable[bytes]) -> bytes:
    """The array of messages that a read returns."""
    return b"[%b]" % b",".join(messages)


def check_message(body: bytes) -> None:
    """Refuse a record that is not exactly one JSON value, whichever protocol it arrived by."""
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
    check_value(body)
    text = msgspec.json.format(body, indent=-1)
    if not text.startswith(b"["):
        return Pieces(False, [text])
    return Pieces(True, list(map(bytes, _ARRAY.decode(text))))
