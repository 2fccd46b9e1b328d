"""State Protocol messages in a JSON stream: changes to a keyed state, and control messages.

Readers such as npm `@durable-streams/state` use `headers.offset` as a cursor. The protocol's
reference server adds it to every such message that a read returns, and so does this server. A read
from that offset continues after the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from streamfold.wire.durable_streams.offsets import format_offset

#: Maximum bytes that a stamp adds to a message: the member, its value, and a comma.
STAMP_BYTES: Final = len(',"offset":""') + len(format_offset(0))

#: Every such message contains this. Searching for it is much quicker than parsing.
_MARK: Final = b'"headers"'
_ABSENT: Final = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    headers: msgspec.Raw = _ABSENT


class _Headers(msgspec.Struct):
    """Headers of a message.

    In every State Protocol message, `operation` or `control` is a string.
    """

    operation: msgspec.Raw = _ABSENT
    control: msgspec.Raw = _ABSENT
    offset: msgspec.Raw = _ABSENT


# Undeclared members are skipped. Building a dict of all members in 1 MiB would hold the GIL for a
# tenth of a second.
_MESSAGES: Final = msgspec.json.Decoder(_Message)
_HEADERS: Final = msgspec.json.Decoder(_Headers)


def stamp(messages: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Return messages, given with their seq_nums, with offsets added to State Protocol messages."""
    return [
        _stamped(message, seq_num) if _MARK in message else message for seq_num, message in messages
    ]


def may_be_state(content: bytes) -> bool:
    """Return whether `content` may contain such a message, however its records are encoded."""
    return _MARK in content


def _stamped(message: bytes, seq_num: int) -> bytes:
    """Add the offset to a message. The rest of the text stays as the writer wrote it."""
    try:
        headers = _MESSAGES.decode(message).headers
        members = _HEADERS.decode(headers)
    except msgspec.MsgspecError:
        return message  # not an object, or its headers are not an object
    if not any(bytes(kind).startswith(b'"') for kind in (members.operation, members.control)):
        return message
    start = _position(headers, message)
    offset = b'"%b"' % format_offset(seq_num + 1).encode()
    if members.offset is _ABSENT:
        end = start + len(bytes(headers)) - 1  # after the last member: there is at least one
        return b'%b,"offset":%b%b' % (message[:end], offset, message[end:])
    start += _position(members.offset, headers)
    return b"%b%b%b" % (message[:start], offset, message[start + len(bytes(members.offset)) :])


def _position(part: msgspec.Raw, whole: bytes | msgspec.Raw) -> int:
    """Return the offset of `part` in the text it was decoded from."""
    content, text = bytes(part), bytes(whole)
    at = text.find(content)
    return at if text.find(content, at + 1) < 0 else _address(part) - _address(whole)


def _address(buffer: bytes | msgspec.Raw) -> int:
    # A decoder's Raw is a view into its input.
    address: int = np.frombuffer(memoryview(buffer), np.uint8).__array_interface__["data"][0]
    return address
