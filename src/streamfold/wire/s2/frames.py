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
        self._buffer = bytearray()
        self._refusal: BadFrameError | None = None

    @property
    def empty(self) -> bool:
        """Whether no frame is begun."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the session, cut anywhere."""
        self._buffer += data

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
        self._buffer.clear()
        return error

    def finish(self) -> None:
        """Refuse a session that ends in the middle of a frame; call when no frame is left."""
        if self._refusal is not None:
            raise self._refusal
        if self._buffer:
            raise BadFrameError(f"the session ends {len(self._buffer)} bytes into a frame")

    def _next_packed(self) -> PackedFrame | None:
        if len(self._buffer) < _LENGTH_SIZE:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_SIZE], "big")
        if not 1 <= length <= FRAME_MAX:
            raise BadFrameError(f"frame length {length} must be 1 to {FRAME_MAX} bytes")
        end = _LENGTH_SIZE + length
        if len(self._buffer) < end:
            return None
        flag = self._buffer[_LENGTH_SIZE]
        body = bytes(memoryview(self._buffer)[_LENGTH_SIZE + 1 : end])
        del self._buffer[:end]
        return PackedFrame(flag, body)


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
