"""Snapshots on the wire: their digests, and the parts of the answer to a bootstrap.

    part_head(...)  snapshot, or nothing  PART_END
    part_head(...)  one update            PART_END      once per update
    closing(...)

The pieces go out one by one, so that no snapshot has to be in memory as a whole.
"""

from __future__ import annotations

import re
from typing import Final

from blake3 import blake3

from streamfold.errors import InvalidError

#: Bytes: a writer that could guess the boundary could forge parts.
BOUNDARY_RANDOM_MIN: Final = 16
#: Bytes: in hex, with the prefix, the 70 characters that RFC 2046 allows.
BOUNDARY_RANDOM_MAX: Final = 29

PART_END: Final = b"\r\n"

_PREFIX = "streamfold-"
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e]*")


def boundary(random_bytes: bytes) -> str:
    """What separates the parts: as hard to guess as `random_bytes`, which must be fresh."""
    if not BOUNDARY_RANDOM_MIN <= len(random_bytes) <= BOUNDARY_RANDOM_MAX:
        raise InvalidError(
            f"a boundary of {len(random_bytes)} random bytes: "
            f"give {BOUNDARY_RANDOM_MIN} to {BOUNDARY_RANDOM_MAX}"
        )
    return _PREFIX + random_bytes.hex()


def multipart_type(separator: str) -> str:
    """The content type of the whole answer."""
    return f"multipart/mixed; boundary={separator}"


def part_head(separator: str, content_type: str) -> bytes:
    """What goes before the bytes of a part; a type that would add headers of its own is refused."""
    if not _FIELD_VALUE.fullmatch(content_type):
        raise InvalidError(f"content type {content_type[:60]!r} is not valid in a header")
    return f"--{separator}\r\nContent-Type: {content_type}\r\n\r\n".encode()


def closing(separator: str) -> bytes:
    """What goes after the end of the last part; a body without it was cut off."""
    return f"--{separator}--\r\n".encode()


class SnapshotDigest:
    """BLAKE3 over the length of the content type (64 bits, little-endian), the type, and the bytes.

    The leading length separates the type from the snapshot unambiguously.
    """

    __slots__ = ("_hasher",)

    def __init__(self, content_type: str) -> None:
        text = content_type.encode()
        self._hasher = blake3(len(text).to_bytes(8, "little") + text)

    def update(self, data: bytes) -> None:
        """Take in the next bytes of the snapshot, in pieces of any size."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """64 hex digits in lower case, of everything so far."""
        return self._hasher.hexdigest()
