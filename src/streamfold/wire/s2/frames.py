"""s2s frames: the messages of a session, whatever pieces its bytes arrive in.

0..2  length, big-endian: bytes that follow (flag and body)
3     flag: terminal 0x80 | compression 0x60 | reconnect advised 0x10
4..   body: a protobuf message, or for a terminal frame a status and a JSON error
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from streamfold.errors import MalformedError
from streamfold.wire.compression import (
    ZSTD_LEVEL,
    Compression,
    compress_if_smaller,
    decompress,
)
from streamfold.wire.s2.errors import BadFrameError, Failure, OversizedError

#: Bytes after the length field: what official clients accept.
FRAME_MAX = 2 << 20
#: Bytes of a body, compressed or not: a frame without its flag.
BODY_MAX = FRAME_MAX - 1

_LENGTH_SIZE = 3
_HEAD_SIZE = _LENGTH_SIZE + 1
#: Bytes of a piece from which a decoder keeps it as it is: many small ones would take many times their
#: size as objects.
_PART_MIN = 4 << 10
_STATUS_SIZE = 2
_TERMINAL = 0x80
_COMPRESSION_MASK = 0x60
_RECONNECT_ADVISED = 0x10
_COMPRESSION_FLAGS: Final = {
    Compression.NONE: 0x00,
    Compression.ZSTD: 0x20,
    Compression.GZIP: 0x40,
}
_COMPRESSIONS: Final = {flag: compression for compression, flag in _COMPRESSION_FLAGS.items()}


@dataclass(frozen=True, slots=True)
class PackedFrame:
    """One frame as it arrived."""

    flag: int
    body: bytes

    @property
    def compressed(self) -> bool:
        return bool(self.flag & _COMPRESSION_MASK) and not self.flag & _TERMINAL

    def unpack(self) -> Frame:
        """The frame that was packed; BadFrameError if it cannot be inflated, or not in bounds."""
        # Bits without a meaning are ignored, as official peers do, so that they may get one.
        if self.flag & _TERMINAL:
            return Frame(self.body, terminal=True)
        compression = _COMPRESSIONS.get(self.flag & _COMPRESSION_MASK)
        if compression is None:
            raise BadFrameError(f"frame flag {self.flag:#04x} names an unknown compression")
        try:
            inflated = decompress(self.body, compression, BODY_MAX)
        except MalformedError as error:
            raise BadFrameError(f"a frame's body cannot be inflated: {error.message}") from None
        return Frame(inflated, reconnect_advised=bool(self.flag & _RECONNECT_ADVISED))


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame; `body` is already inflated."""

    body: bytes
    terminal: bool = False
    reconnect_advised: bool = False

    def failure(self) -> Failure:
        """What a terminal frame says: why the session ended."""
        if not self.terminal or len(self.body) < _STATUS_SIZE:
            raise BadFrameError("the frame carries no status: it is not a whole terminal frame")
        status = int.from_bytes(self.body[:_STATUS_SIZE], "big")
        return Failure(status, self.body[_STATUS_SIZE:])


class FrameDecoder:
    """Turns the bytes of a session into frames, in order, holding at most one unfinished frame.

    Frames before a bad one are all delivered; from the bad one on, every call raises the same.
    Call `next_frame` until it returns None before feeding more, else what was fed piles up.
    """

    def __init__(self) -> None:
        #: What was fed and not taken, as it came: a large frame is copied once, when it is complete.
        self._parts: list[bytes | bytearray] = []
        #: Where the next frame begins in the first part, and how many bytes there are from there on.
        self._start = 0
        self._held = 0
        self._refusal: BadFrameError | None = None

    @property
    def empty(self) -> bool:
        """Whether no frame is begun."""
        return not self._held

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the session, cut anywhere."""
        self._held += len(data)
        if len(data) >= _PART_MIN:
            self._parts.append(data)
        elif self._parts and isinstance(self._parts[-1], bytearray):
            self._parts[-1] += data
        elif data:
            self._parts.append(bytearray(data))

    def next_frame(self) -> Frame | None:
        """The next frame, or None until more bytes are fed."""
        packed = self.next_packed()
        if packed is None:
            return None
        try:
            return packed.unpack()
        except BadFrameError as error:
            raise self._refuse(error) from None

    def next_packed(self) -> PackedFrame | None:
        """The next frame as it arrived; the caller unpacks it, and continues only if that succeeds."""
        if self._refusal is not None:
            raise self._refusal
        try:
            return self._next_packed()
        except BadFrameError as error:
            raise self._refuse(error) from None

    def _refuse(self, error: BadFrameError) -> BadFrameError:
        self._refusal = error
        self._parts.clear()
        self._start = self._held = 0
        return error

    def finish(self) -> None:
        """Refuse a session that ends in the middle of a frame; call when no frame is left."""
        if self._refusal is not None:
            raise self._refusal
        if self._held:
            raise BadFrameError(f"the session ends {self._held} bytes into a frame")

    def _next_packed(self) -> PackedFrame | None:
        if self._held < _LENGTH_SIZE:
            return None
        head = self._copy(0, _HEAD_SIZE)
        length = int.from_bytes(head[:_LENGTH_SIZE], "big")
        if not 1 <= length <= FRAME_MAX:
            raise BadFrameError(f"frame length {length} must be 1 to {FRAME_MAX} bytes")
        end = _LENGTH_SIZE + length
        if self._held < end:
            return None
        body = self._copy(_HEAD_SIZE, end)
        self._drop(end)
        return PackedFrame(head[-1], body)

    def _copy(self, start: int, end: int) -> bytes:
        """Bytes of the next frame, by their offsets in it; fewer if fewer were fed."""
        start += self._start
        end += self._start
        first = self._parts[0]
        if end <= len(first):
            return bytes(first[start:end])  # nearly always: most frames are small
        pieces: list[memoryview] = []
        for part in self._parts:
            if start < len(part):
                pieces.append(memoryview(part)[max(start, 0) : end])
            start -= len(part)
            end -= len(part)
            if end <= 0:
                break
        return b"".join(pieces)

    def _drop(self, size: int) -> None:
        """Forget the first `size` bytes."""
        self._held -= size
        self._start += size
        parts, used = self._parts, 0
        while used < len(parts) and self._start >= len(parts[used]):
            self._start -= len(parts[used])
            used += 1
        del parts[:used]
        if parts and isinstance(first := parts[0], bytearray):
            # Small pieces may be added to it without end.
            del first[: self._start]
            self._start = 0


def encode_frame(
    message: bytes,
    compression: Compression = Compression.NONE,
    *,
    zstd_level: int = ZSTD_LEVEL,
    reconnect_advised: bool = False,
) -> bytes:
    """`message` as a regular frame, compressed where that makes it smaller."""
    if len(message) > BODY_MAX:
        raise OversizedError(
            f"a message of {len(message)} bytes does not fit a frame of {BODY_MAX}: "
            "read fewer records at once, or read without a session"
        )
    body, used = compress_if_smaller(message, compression, zstd_level)
    flag = _COMPRESSION_FLAGS[used] | (_RECONNECT_ADVISED if reconnect_advised else 0)
    return _assemble(flag, body)


def encode_terminal(failure: Failure) -> bytes:
    """The frame that ends a session which failed; nothing may follow it."""
    body = failure.status.to_bytes(_STATUS_SIZE, "big") + failure.body
    return _assemble(_TERMINAL, body)


def frame_head(size: int) -> bytes:
    """What precedes an uncompressed body of `size` bytes in a regular frame."""
    return _head(0, size)


def _assemble(flag: int, body: bytes) -> bytes:
    return _head(flag, len(body)) + body


def _head(flag: int, size: int) -> bytes:
    return (1 + size).to_bytes(_LENGTH_SIZE, "big") + bytes((flag,))
