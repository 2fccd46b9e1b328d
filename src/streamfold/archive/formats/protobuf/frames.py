"""Length-delimited messages, and frames with a checksum.

A truncated file lacks its end frame, even if it was cut between two frames. A file changed anywhere
fails a checksum or is no longer a sequence of frames.

A message that is truncated, or announces more than the limit, is rejected.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.admission import PieceLimits
from streamfold.errors import MalformedError
from streamfold.records.protobuf import DELIMITED, VARINT, VARINT_MAX, fields, read_varint, varint

HEADER, BATCH, END = 1, 2, 3
_CRC_TAG = 15 << 3 | VARINT

#: Maximum bytes of a frame that a reader accepts. Batches have 16 MiB of values, or one row.
FRAME_BYTES_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class ContentFrame:
    """The bytes of a content message, with its field number in Frame."""

    number: int
    content: bytes


def write_frame(sink: BinaryIO, number: int, content: bytes) -> None:
    head = varint(number << 3 | DELIMITED) + varint(len(content))
    tail = varint(_CRC_TAG) + varint(zlib.crc32(content))
    sink.write(varint(len(head) + len(content) + len(tail)) + head)
    sink.write(content)
    sink.write(tail)


def read_frames(source: BinaryIO) -> Iterator[ContentFrame]:
    """Yield every frame before the end frame, verified. Raises ArtifactCorruptError otherwise."""
    while True:
        try:
            frame = _parsed(read_message(source))
        except EOFError:
            raise ArtifactCorruptError("the file has no end frame: it was cut off") from None
        except MalformedError as error:
            raise ArtifactCorruptError(f"a frame cannot be read: {error}") from None
        yield frame
        if frame.number == END:
            break
    if source.read(1):
        raise ArtifactCorruptError("bytes follow the end frame: the file was appended to")


def read_message(source: BinaryIO) -> bytes:
    """Return the next message. Raises EOFError at the end, MalformedError if it is truncated."""
    size = _read_size(source)
    if size > FRAME_BYTES_MAX:
        raise MalformedError(f"a message announces {size} bytes, more than {FRAME_BYTES_MAX}")
    message = source.read(size)
    if len(message) < size:
        raise MalformedError(f"a message announces {size} bytes, {len(message)} are left")
    return message


def _read_size(source: BinaryIO) -> int:
    digits = b""
    while not digits or digits[-1] >= 0x80:
        byte = source.read(1)
        if not byte and not digits:
            raise EOFError
        if not byte or len(digits) >= VARINT_MAX:
            raise MalformedError("the length of a message is cut off")
        digits += byte
    return read_varint(digits, 0, len(digits))[0]


def _parsed(message: bytes) -> ContentFrame:
    content: tuple[int, bytes] | None = None
    checksum = 0  # proto3 omits a zero
    for tag, value, after in fields(message, 0, len(message)):
        if tag == _CRC_TAG:
            checksum = value
        elif tag & 7 == DELIMITED and tag >> 3 in (HEADER, BATCH, END) and content is None:
            content = (tag >> 3, message[value:after])
        else:
            raise MalformedError(f"tag {tag} does not belong in a frame")
    if content is None:
        raise MalformedError("a frame without content")
    if zlib.crc32(content[1]) != checksum:
        raise MalformedError("the checksum does not match: the bytes were changed")
    return ContentFrame(*content)


def read_groups(source: BinaryIO, limits: PieceLimits) -> Iterator[list[bytes]]:
    """Yield all messages in groups within the limits. A larger message is a group of its own."""
    group: list[bytes] = []
    size = 0
    while True:
        try:
            message = read_message(source)
        except EOFError:
            break
        except MalformedError as error:
            raise ArtifactCorruptError(f"a message cannot be read: {error}") from None
        group.append(message)
        size += len(message)
        if len(group) >= limits.rows or size >= limits.size:
            yield group
            group, size = [], 0
    if group:
        yield group
