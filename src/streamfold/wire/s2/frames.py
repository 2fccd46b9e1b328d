"""s2s frames: the messages of a session, however its bytes are split on arrival.

0..2  length, big-endian: bytes that follow (flag and body)
3     flag: terminal 0x80 | compression 0x60 | reconnect advised 0x10
4..   body: a protobuf message, or for a terminal frame a status and a JSON error
"""

from __future__ import annotations

from typing import Final

import msgspec

from streamfold.errors import MalformedError
from streamfold.wire.compression import (
    ZSTD_LEVEL,
    Compression,
    compress_if_smaller,
    decompress,
)
from streamfold.wire.s2.errors import BadFrameError, Failure, OversizedError

#: Maximum bytes after the length field. Official clients accept this many.
FRAME_MAX = 2 << 20
#: Maximum bytes of a body, compressed or not: a frame without its flag.
BODY_MAX = FRAME_MAX - 1

_LENGTH_SIZE = 3
_HEAD_SIZE = _LENGTH_SIZE + 1
#: Smallest piece in bytes that a decoder keeps as its own object. Many small objects would take
#: many times their content's size.
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
# Looked up once: in Python 3.11 each lookup of a member takes as long as a call.
_PLAIN: Final = Compression.NONE
_COMPRESSIONS: Final = {flag: compression for compression, flag in _COMPRESSION_FLAGS.items()}


class PackedFrame(msgspec.Struct, frozen=True, gc=False):
    """One frame as it arrived, still compressed."""

    flag: int
    body: bytes

    @property
    def compressed(self) -> bool:
        return bool(self.flag & _COMPRESSION_MASK) and not self.flag & _TERMINAL

    def unpack(self) -> Frame:
        """Unpack the frame. Raises BadFrameError if it cannot be inflated or exceeds BODY_MAX."""
        # Undefined flag bits are ignored, as official peers do, so that they can be defined later.
        if not self.flag:
            return Frame(self.body)  # a shortcut: nearly all frames are like this
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


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame with its body already inflated."""

    body: bytes
    terminal: bool = False
    reconnect_advised: bool = False

    def failure(self) -> Failure:
        """Return the failure that a terminal frame reports as the reason for the session's end."""
        if not self.terminal or len(self.body) < _STATUS_SIZE:
            raise BadFrameError("the frame carries no status: it is not a whole terminal frame")
        status = int.from_bytes(self.body[:_STATUS_SIZE], "big")
        return Failure(status, self.body[_STATUS_SIZE:])


class FrameDecoder:
    """Splits a session's bytes into frames, in order, holding at most one unfinished frame.

    Delivers all frames before a bad one. From the bad one on, every call raises the same error.
    Call `next_frame` until it returns None before feeding more, or the bytes pile up.
    """

    def __init__(self) -> None:
        #: Bytes fed but not yet consumed, in their original pieces. A large frame is copied once,
        #: when it is complete.
        self._parts: list[bytes | bytearray] = []
        #: Offset of the next frame in the first part, and the number of bytes from there on.
        self._start = 0
        self._buffered = 0
        self._refusal: BadFrameError | None = None

    @property
    def empty(self) -> bool:
        """Whether no unfinished frame is buffered."""
        return not self._buffered

    def feed(self, data: bytes) -> None:
        """Add the next bytes of the session, split anywhere."""
        self._buffered += len(data)
        if len(data) >= _PART_MIN:
            self._parts.append(data)
        elif not self._parts:
            if data:
                self._parts.append(data)
        elif len(last := self._parts[-1]) < _PART_MIN or isinstance(last, bytearray):
            if not isinstance(last, bytearray):
                last = self._parts[-1] = bytearray(last)
            last += data
        elif data:
            self._parts.append(bytearray(data))

    def next_frame(self) -> Frame | None:
        """Return the next frame, or None until more bytes are fed."""
        packed = self.next_packed()
        if packed is None:
            return None
        try:
            return packed.unpack()
        except BadFrameError as error:
            raise self._refuse(error) from None

    def next_packed(self) -> PackedFrame | None:
        """Return the next frame as it arrived, or None.

        The caller must unpack it, and may continue only if that succeeds.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._buffered < _LENGTH_SIZE:
            return None
        try:
            return self._next_packed()
        except BadFrameError as error:
            raise self._refuse(error) from None

    def _refuse(self, error: BadFrameError) -> BadFrameError:
        self._refusal = error
        self._parts.clear()
        self._start = self._buffered = 0
        return error

    def finish(self) -> None:
        """Raise if the session ends inside a frame. Call this once no complete frame is left."""
        if self._refusal is not None:
            raise self._refusal
        if self._buffered:
            raise BadFrameError(f"the session ends {self._buffered} bytes into a frame")

    def _next_packed(self) -> PackedFrame | None:
        head = self._copy(0, _HEAD_SIZE)
        length = int.from_bytes(head[:_LENGTH_SIZE], "big")
        if not 1 <= length <= FRAME_MAX:
            raise BadFrameError(f"frame length {length} must be 1 to {FRAME_MAX} bytes")
        end = _LENGTH_SIZE + length
        if self._buffered < end:
            return None
        body = self._copy(_HEAD_SIZE, end)
        if end == self._buffered:
            self._parts.clear()
            self._start = self._buffered = 0
        else:
            self._drop(end)
        return PackedFrame(head[-1], body)

    def _copy(self, start: int, end: int) -> bytes:
        """Return bytes of the next frame by their offsets in it, fewer if fewer were fed."""
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
        """Drop the first `size` bytes."""
        self._buffered -= size
        self._start += size
        parts, used = self._parts, 0
        while used < len(parts) and self._start >= len(parts[used]):
            self._start -= len(parts[used])
            used += 1
        del parts[:used]
        if parts and isinstance(first := parts[0], bytearray):
            # `feed` may append small pieces to this part indefinitely.
            del first[: self._start]
            self._start = 0


def encode_frame(
    message: bytes,
    compression: Compression = _PLAIN,
    *,
    zstd_level: int = ZSTD_LEVEL,
    reconnect_advised: bool = False,
) -> bytes:
    """Encode `message` as a regular frame, compressed if that makes it smaller."""
    if len(message) > BODY_MAX:
        raise OversizedError(
            f"a message of {len(message)} bytes does not fit a frame of {BODY_MAX}: "
            "read fewer records at once, or read without a session"
        )
    advice = _RECONNECT_ADVISED if reconnect_advised else 0
    if compression is _PLAIN:
        return _head(advice, len(message)) + message  # in fewer steps: all acks are like this
    body, used = compress_if_smaller(message, compression, zstd_level)
    return _assemble(_COMPRESSION_FLAGS[used] | advice, body)


def encode_terminal(failure: Failure) -> bytes:
    """Encode the frame that ends a failed session. Nothing may follow it."""
    body = failure.status.to_bytes(_STATUS_SIZE, "big") + failure.body
    return _assemble(_TERMINAL, body)


def frame_head(size: int) -> bytes:
    """Return the bytes before an uncompressed body of `size` bytes in a regular frame."""
    return _head(0, size)


def _assemble(flag: int, body: bytes) -> bytes:
    return _head(flag, len(body)) + body


def _head(flag: int, size: int) -> bytes:
    return (1 + size).to_bytes(_LENGTH_SIZE, "big") + bytes((flag,))
