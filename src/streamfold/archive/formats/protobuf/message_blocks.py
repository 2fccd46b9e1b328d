"""Length-delimited messages in blocks of bytes: read once, cut where a message ends.

A message that is cut off, or announces more than the limit, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from streamfold.archive.errors import ArtifactCorruptError
from streamfold.archive.formats.batching import Limits
from streamfold.archive.formats.protobuf.typed_frames import FRAME_BYTES_MAX
from streamfold.errors import MalformedError
from streamfold.records.protobuf import VARINT_MAX, read_varint


@dataclass(frozen=True, slots=True)
class Block:
    """One or more whole messages, and where each begins and ends."""

    data: bytes
    starts: list[int]
    ends: list[int]

    def messages(self, most: int) -> Iterator[list[bytes]]:
        """Yield the messages, so many at once at most."""
        for first in range(0, len(self.starts), most):
            bounds = zip(
                self.starts[first : first + most], self.ends[first : first + most], strict=True
            )
            yield [self.data[start:end] for start, end in bounds]


def read_blocks(source: BinaryIO, limits: Limits) -> Iterator[Block]:
    """Yield all messages, in blocks of about `limits.size` bytes or of one message."""
    rest, wanted = b"", limits.size
    while more := source.read(wanted):
        block, lacking = _cut(rest + more)
        if block.starts:
            yield block
        rest = block.data[block.ends[-1] if block.ends else 0 :]
        wanted = max(limits.size, lacking)
    if rest:
        raise ArtifactCorruptError(f"a message cannot be read: {_cut_off(rest)}")


def _cut(data: bytes) -> tuple[Block, int]:
    """Return the whole messages, and how many bytes the last one lacks as far as is known."""
    starts: list[int] = []
    ends: list[int] = []
    at, limit = 0, len(data)
    while at < limit:
        size, start = data[at], at + 1
        if size >= 0x80 and start < limit and data[start] < 0x80:  # as most lengths are
            size, start = size & 0x7F | data[start] << 7, start + 1
        elif size >= 0x80:
            if (found := _length(data, at)) is None:
                break
            size, start = found
        if start + size > limit:
            return Block(data, starts, ends), start + size - limit
        starts.append(start)
        ends.append(start + size)
        at = start + size
    return Block(data, starts, ends), 0


def _length(data: bytes, at: int) -> tuple[int, int] | None:
    """Return a length and the offset after it; None if more bytes are needed."""
    try:
        size, start = read_varint(data, at, len(data))
    except MalformedError as error:
        if len(data) - at < VARINT_MAX:
            return None
        raise ArtifactCorruptError(f"a message cannot be read: {error}") from None
    if size > FRAME_BYTES_MAX:
        raise ArtifactCorruptError(
            f"a message cannot be read: it announces {size} bytes, more than {FRAME_BYTES_MAX}"
        )
    return size, start


def _cut_off(rest: bytes) -> str:
    found = _length(rest, 0)
    if found is None:
        return "its length is cut off"
    return f"it announces {found[0]} bytes, {len(rest) - found[1]} are left"
