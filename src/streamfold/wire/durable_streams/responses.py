"""Read responses: cursors and entity tags for caches, server-sent events, parts of a bootstrap.

A writer's data can never become an event or an event field: every line break that an event-stream
parser knows (CRLF, CR, LF) starts a new `data:` line.

    part_head(...)  snapshot, or nothing  PART_END
    part_head(...)  one update            PART_END      once per update
    closing(...)

A bootstrap is sent piece by piece, so no whole snapshot has to fit in memory.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Final

import msgspec
from blake3 import blake3

from streamfold.errors import InvalidError

#: Milliseconds: 2024-10-09T00:00:00Z. Every server of the protocol counts intervals from there.
CURSOR_EPOCH_MS: Final = 1_728_432_000_000
#: Milliseconds for which all readers at one offset use the same URL.
CURSOR_INTERVAL_MS: Final = 20_000
#: Maximum seconds that a cursor jumps ahead, which lets a reader leave a cached response behind.
CURSOR_JITTER_MAX: Final = 3600

_INTERVAL_SECONDS = CURSOR_INTERVAL_MS // 1000
#: A longer cursor was never issued, and is treated like any other invalid cursor.
_CURSOR = re.compile(r"[0-9]{1,20}")
_OPAQUE_TAG = re.compile(r'"[^"]*"')
#: Header for binary streams. Events of text streams omit it.
DATA_ENCODING_HEADER: Final = "stream-sse-data-encoding"
BASE64: Final = "base64"


def next_cursor(client: str | None, now_ms: int, randint: Callable[[int, int], int]) -> str:
    """Return a response's cursor: the current interval, but always beyond the client's cursor.

    `randint(a, b)` returns a number from a to b inclusive.
    """
    interval = max(0, now_ms - CURSOR_EPOCH_MS) // CURSOR_INTERVAL_MS
    if client is None or not _CURSOR.fullmatch(client) or int(client) < interval:
        return str(interval)
    seconds = randint(1, CURSOR_JITTER_MAX)
    return str(int(client) + max(1, -(-seconds // _INTERVAL_SECONDS)))


def etag(stream_id: int | str, start: int, end: int, closed: bool) -> str:
    """Return a strong entity tag for a stream's records from `start` to `end`.

    It changes when the stream closes. `stream_id` must differ between a stream and a later stream
    of the same name.
    """
    text = str(stream_id) if isinstance(stream_id, int) else _quotable(stream_id)
    return f'"{text}:{start}:{end}{":c" if closed else ""}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Return whether any of the client's tags matches `tag` under weak comparison."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _OPAQUE_TAG.findall(if_none_match)


def _quotable(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


class _Control(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    stream_next_offset: str
    stream_cursor: str | None = None
    up_to_date: bool = False
    stream_closed: bool = False


def data_event(payload: bytes) -> bytes:
    """Encode text as one event. A parser decodes it with LF for every line break."""
    # `replace` throughout, so that a megabyte of line breaks takes only milliseconds.
    lines = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # A parser strips one space after the colon, so a line that begins with a space gets another.
    lines = lines.replace(b"\n ", b"\n  ").replace(b"\n", b"\ndata:")
    shield = b" " if lines.startswith(b" ") else b""
    return b"event: data\ndata:%b%b\n\n" % (shield, lines)


def base64_event(payload: bytes) -> bytes:
    """Encode bytes as one event that can be decoded on its own."""
    return b"event: data\ndata:%b\n\n" % base64.b64encode(payload)


def control_event(next_offset: str, cursor: str | None, up_to_date: bool, closed: bool) -> bytes:
    """Encode where the next read starts. A closed stream has no cursor."""
    control = _Control(next_offset, None if closed else cursor, up_to_date, closed)
    return b"event: control\ndata:%b\n\n" % msgspec.json.encode(control)


#: Minimum random bytes. A writer that could guess the boundary could forge parts.
BOUNDARY_RANDOM_MIN: Final = 16
#: Maximum random bytes. In hex and with the prefix, they fill the 70 characters that RFC 2046
#: allows.
BOUNDARY_RANDOM_MAX: Final = 29

PART_END: Final = b"\r\n"

_PREFIX = "streamfold-"
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e]*")


def boundary(random_bytes: bytes) -> str:
    """Return a part boundary that is as hard to guess as `random_bytes`, which must be fresh."""
    if not BOUNDARY_RANDOM_MIN <= len(random_bytes) <= BOUNDARY_RANDOM_MAX:
        raise InvalidError(
            f"a boundary of {len(random_bytes)} random bytes: "
            f"give {BOUNDARY_RANDOM_MIN} to {BOUNDARY_RANDOM_MAX}"
        )
    return _PREFIX + random_bytes.hex()


def multipart_type(separator: str) -> str:
    """Return the content type of the whole response."""
    return f"multipart/mixed; boundary={separator}"


def part_head(separator: str, content_type: str) -> bytes:
    """Return the bytes before a part's body.

    Raises if the content type could add headers of its own.
    """
    if not _FIELD_VALUE.fullmatch(content_type):
        raise InvalidError(f"content type {content_type[:60]!r} is not valid in a header")
    return f"--{separator}\r\nContent-Type: {content_type}\r\n\r\n".encode()


def closing(separator: str) -> bytes:
    """Return the bytes after the last part's end. A body without them was cut off."""
    return f"--{separator}--\r\n".encode()


class SnapshotDigest:
    """BLAKE3 over the content type's length (64 bits, little-endian), the type, and the bytes.

    The leading length separates the type from the snapshot unambiguously.
    """

    __slots__ = ("_hasher",)

    def __init__(self, content_type: str) -> None:
        text = content_type.encode()
        self._hasher = blake3(len(text).to_bytes(8, "little") + text)

    def update(self, data: bytes) -> None:
        """Add the snapshot's next bytes, in pieces of any size."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far as 64 lower-case hex digits."""
        return self._hasher.hexdigest()
