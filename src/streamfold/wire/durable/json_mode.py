"""JSON streams: a body becomes messages, messages become a body, and the writer's text is kept.

Only whitespace between tokens is taken out. Numbers, escapes, duplicate members and the order of
members stay as they were written, so nothing is lost that a reader could have told.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from streamfold.errors import InvalidError

_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])


def split_messages(body: bytes, *, allow_empty: bool) -> list[bytes]:
    """The messages of a body: the elements of an array, or the one value that is none.

    `allow_empty` is for a creation, in which `[]` means no message yet; in an append it is refused.
    """
    text = _compact(body)
    if not text.startswith(b"["):
        return [text]
    messages = list(map(bytes, _ARRAY.decode(text)))
    if not messages and not allow_empty:
        raise InvalidError("the body is an empty array: append at least one message")
    return messages


def join_messages(messages: Iterable[bytes]) -> bytes:
    """The array of messages that a read returns."""
    return b"[%b]" % b",".join(messages)


def check_message(body: bytes) -> None:
    """Refuse a record that is not exactly one JSON value, whichever protocol it came by."""
    _compact(body)


def _compact(body: bytes) -> bytes:
    """`body` without insignificant whitespace, once it is known to be JSON.

    msgspec checks everything while it formats, except that strings are UTF-8: done here, once.
    """
    try:
        if not body.isascii():
            body.decode()
        return msgspec.json.format(body, indent=-1)
    except UnicodeDecodeError as error:
        raise InvalidError(f"the body is not valid UTF-8 at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise InvalidError(f"the body is not one valid JSON value: {error}") from None
    except RecursionError:
        raise InvalidError("the body is nested too deeply: send flatter JSON") from None
