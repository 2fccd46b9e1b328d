"""Frames as a client writes and reads them, from the wire's own codec."""

from __future__ import annotations

from streamfold.wire.s2.frames import Frame, FrameDecoder, encode_frame

SESSION = (("s2-basin", "test-basin"), ("content-type", "s2s/proto"))
PATH = "/v1/streams/orders/records"


def append_frame(*bodies: bytes, match_seq_num: int | None = None) -> bytes:
    """One AppendInput."""
    message = b""
    for body in bodies:
        record = b"\x1a" + _varint(len(body)) + body
        message += b"\x0a" + _varint(len(record)) + record
    if match_seq_num is not None:
        message += b"\x10" + _varint(match_seq_num)
    return encode_frame(message)


def frames_in(body: bytes) -> list[Frame]:
    """All whole frames in what came so far."""
    decoder = FrameDecoder()
    decoder.feed(body)
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


__all__ = ["PATH", "SESSION", "append_frame", "frames_in"]
