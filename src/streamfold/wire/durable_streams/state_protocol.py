"""State Protocol messages: changes of a keyed state, and control messages, in a JSON stream.

Readers such as npm `@durable-streams/state` use `headers.offset` as a cursor. The protocol's reference
server adds it to every such message that a read returns, and so does this one: a read from that offset
continues behind the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from streamfold.wire.durable_streams.offsets import format_offset

#: Bytes by which a message grows at most: the member, its value, and a comma.
STAMP_BYTES: Final = len(',"offset":""') + len(format_offset(0))

#: What every such message contains: a search for it is much quicker than a parser.
_MARK: Final = b'"headers"'
_ABSENT: Final = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    headers: msgspec.Raw = _ABSENT


class _Headers(msgspec.Struct):
    """One of the first two is a string in every such message."""

    operation: msgspec.Raw = _ABSENT
    control: msgspec.Raw = _ABSENT
    offset: msgspec.Raw = _ABSENT


# Members that are not declared are skipped: to make a dict of all those in 1 MiB would keep the
# interpreter's lock for a tenth of a second.
_MESSAGES: Final = msgspec.json.Decoder(_Message)
_HEADERS: Final = msgspec.json.Decoder(_Headers)


def stamp(messages: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """The messages, each given with its seq_num; those of the State Protocol with their offset."""
    return [
        _stamped(message, seq_num) if _MARK in message else message for seq_num, message in messages
    ]


def may_be_state(content: bytes) -> bool:
    """Whether there may be such a message among the records of `content`, in any encoding of them."""
    return _MARK in content


def _stamped(message: bytes, seq_num: int) -> bytes:
    """The message with its offset; everything else keeps the writer's text."""
    try:
        headers = _MESSAGES.decode(message).headers
        members = _HEADERS.decode(headers)
    except msgspec.MsgspecError:
        return message  # no object, or one whose headers are none
    if not any(bytes(kind).startswith(b'"') for kind in (members.operation, members.control)):
        return message
    start = _position(headers, message)
    offset = b'"%b"' % format_offset(seq_num + 1).encode()
    if members.offset is _ABSENT:
        end = start + len(bytes(headers)) - 1  # of the last member: one is there
        return b'%b,"offset":%b%b' % (message[:end], offset, message[end:])
    start += _position(members.offset, headers)
    return b"%b%b%b" % (message[:start], offset, message[start + len(bytes(members.offset)) :])


def _position(part: msgspec.Raw, whole: bytes | msgspec.Raw) -> int:
    """Where `part` begins in what it was decoded from."""
    content, text = bytes(part), bytes(whole)
    at = text.find(content)
    return at if text.find(content, at + 1) < 0 else _address(part) - _address(whole)


def _address(buffer: bytes | msgspec.Raw) -> int:
    # A decoder's Raw is a view of what it decodes.
    address: int = np.frombuffer(memoryview(buffer), np.uint8).__array_interface__["data"][0]
    return address
