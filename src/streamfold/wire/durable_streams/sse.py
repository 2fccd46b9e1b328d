"""Server-sent events of a live read: data, and after each the control event that says where it is.

What a writer put into a stream can never become an event, or a field of one: every line break that
an event-stream parser knows (CRLF, CR, LF) starts a new `data:` line.
"""

from __future__ import annotations

import base64
from typing import Final

import msgspec

#: Of binary streams; events of text streams go without it.
DATA_ENCODING_HEADER: Final = "stream-sse-data-encoding"
BASE64: Final = "base64"


class _Control(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    stream_next_offset: str
    stream_cursor: str | None = None
    up_to_date: bool = False
    stream_closed: bool = False


def data_event(payload: bytes) -> bytes:
    """Text as one event; a parser gives it back with LF for every line break."""
    # All by `replace`, so that a megabyte of line breaks takes milliseconds.
    lines = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # A parser takes one space after the colon for its own: a line that begins with one gets two.
    lines = lines.replace(b"\n ", b"\n  ").replace(b"\n", b"\ndata:")
    shield = b" " if lines.startswith(b" ") else b""
    return b"event: data\ndata:%b%b\n\n" % (shield, lines)


def base64_event(payload: bytes) -> bytes:
    """Bytes as one event that decodes on its own."""
    return b"event: data\ndata:%b\n\n" % base64.b64encode(payload)


def control_event(next_offset: str, cursor: str | None, up_to_date: bool, closed: bool) -> bytes:
    """Where the next read starts; a stream that has ended has no cursor."""
    control = _Control(next_offset, None if closed else cursor, up_to_date, closed)
    return b"event: control\ndata:%b\n\n" % msgspec.json.encode(control)
