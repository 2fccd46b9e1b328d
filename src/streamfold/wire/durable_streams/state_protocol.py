"""State Protocol messages: changes of a keyed state, and control messages, in a JSON stream.

Readers such as npm `@durable-streams/state` use `headers.offset` as a cursor. The protocol's reference
server adds it to every such message that a read returns, and so does this one: a read from that offset
continues behind the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from streamfold.wire.durable_streams.offsets import format_offset

#: Bytes by which a message grows at most: the member, its value, and a comma.
STAMP_BYTES: Final = len(',"offset":""') + len(format_offset(0))

_HEADERS: Final = "headers"
#: What every such message contains: a search for it is much quicker than a parser.
_MARK: Final = b'"headers"'
#: Members of the headers; one of them is a string in every such message.
_KINDS: Final = ("operation", "control")
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()


def stamp(messages: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """The messages, each given with its seq_num; those of the State Protocol with their offset."""
    return [
        _stamped(message, seq_num) if _MARK in message else message for seq_num, message in messages
    ]


def may_be_state(content: bytes) -> bool:
    """Whether there may be such a message among the records of `content`, in any encoding of them."""
    return _MARK in content


def _stamped(message: bytes, seq_num: int) -> bytes:
    """The message with its offset; values keep the writer's text, and an earlier offset is replaced."""
    try:
        members = _MEMBERS.decode(message)
        headers = _MEMBERS.decode(members[_HEADERS])
    except (msgspec.MsgspecError, KeyError):
        return message  # no object, or one whose headers are none
    if not any(bytes(headers[kind]).startswith(b'"') for kind in _KINDS if kind in headers):
        return message
    headers["offset"] = msgspec.Raw(b'"%b"' % format_offset(seq_num + 1).encode())
    members[_HEADERS] = msgspec.Raw(_ENCODER.encode(headers))
    return _ENCODER.encode(members)
