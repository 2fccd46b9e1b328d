"""The data plane in protobuf: appends in, acknowledgements and batches out.

The messages that leave are so small and so fixed that they are written by hand: a batch is the
stored bytes plus at most one field, and a position is two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamfold.errors import MalformedError
from streamfold.model.positions import StreamPosition
from streamfold.records import AppendInput, measure, parse_append_input
from streamfold.records.append_input import parse_quickly
from streamfold.records.plain import encode_position
from streamfold.wire.s2.errors import BadFrameError, BadProtoError
from streamfold.wire.s2.frames import BODY_MAX, Frame, frame_head

#: First byte of a field: its number and type. A varint, or bytes after a length.
_BATCH_TAIL = b"\x12"
#: Of a position: at most 22 bytes.
_LENGTHS = tuple(bytes((length,)) for length in range(23))
#: Bytes of a tail at most: tag, length, and two tags with ten bytes of number each.
_TAIL_MAX = 24
#: Bytes of records that fit a frame with a tail.
FRAME_PAYLOAD_MAX = BODY_MAX - _TAIL_MAX

#: Bytes that may be walked through in Python at once: two per field at least, a microsecond each.
PLAIN_MAX = 16 << 10


def decode_append_body(body: bytes) -> AppendInput:
    """The append that a unary request asks for."""
    try:
        return parse_append_input(body)
    except MalformedError as error:
        raise _bad_body(error) from None


def decode_light_body(body: bytes) -> AppendInput | None:
    """The same in a few milliseconds, whatever is in the body; None if it would take longer."""
    try:
        return parse_quickly(body, PLAIN_MAX)
    except MalformedError as error:
        raise _bad_body(error) from None


def decode_append_frame(frame: Frame) -> AppendInput:
    """The append that a frame of a session asks for; clients may not send terminal frames."""
    _check_kind(frame)
    try:
        return parse_append_input(frame.body)
    except MalformedError as error:
        raise _bad_frame(error) from None


def decode_light_frame(frame: Frame) -> AppendInput | None:
    """The same in a few milliseconds, whatever is in the frame; None if it would take longer."""
    _check_kind(frame)
    try:
        return parse_quickly(frame.body, PLAIN_MAX)
    except MalformedError as error:
        raise _bad_frame(error) from None


def _check_kind(frame: Frame) -> None:
    if frame.terminal:
        raise BadFrameError("a client may not send a terminal frame: end the request body instead")


def _bad_body(error: MalformedError) -> BadProtoError:
    return BadProtoError(f"the body is not a valid AppendInput: {error.message}")


def _bad_frame(error: MalformedError) -> BadFrameError:
    return BadFrameError(f"the frame holds no valid AppendInput: {error.message}")


def encode_append_ack(start: StreamPosition, end: StreamPosition, tail: StreamPosition) -> bytes:
    """An AppendAck in which all three positions are present, even where they are zero."""
    first = encode_position(start.seq_num, start.timestamp)
    last = encode_position(end.seq_num, end.timestamp)
    newest = last if tail is end else encode_position(tail.seq_num, tail.timestamp)
    return b"\x0a%c%b\x12%c%b\x1a%c%b" % (
        len(first),
        first,
        len(last),
        last,
        len(newest),
        newest,
    )


def encode_read_batch(payload: bytes, tail: StreamPosition | None = None) -> bytes:
    """A ReadBatch of stored records; a tail is present whenever given, even where it is zero.

    Clients treat a batch of a session with neither records nor tail as an error.
    """
    return payload if tail is None else payload + _BATCH_TAIL + _position(tail)


def encode_frame_parts(
    parts: Sequence[bytes | memoryview], tail: StreamPosition | None = None
) -> tuple[bytes | memoryview, ...]:
    """A frame with a ReadBatch of stored records, in parts that are not copied.

    The records must fit a frame: FRAME_PAYLOAD_MAX bytes.
    """
    end = b"" if tail is None else _BATCH_TAIL + _position(tail)
    return (frame_head(sum(map(len, parts)) + len(end)), *parts, end)


def encode_frame_batches(payload: bytes, tail: StreamPosition | None = None) -> list[bytes]:
    """The same as ReadBatches that each fit a frame: one, unless small headers swell the records.

    The tail goes with the last, since a client that sees it must have all records below it.
    """
    if len(payload) <= FRAME_PAYLOAD_MAX:
        return [encode_read_batch(payload, tail)]
    pieces, start, end = [], 0, 0
    for following in map(int, measure(payload).offsets[1:]):
        if following - start > FRAME_PAYLOAD_MAX and end > start:
            pieces.append(payload[start:end])
            start = end
        end = following
    return [*pieces, encode_read_batch(payload[start:], tail)]


def _position(position: StreamPosition) -> bytes:
    """A position as a field without its tag."""
    message = encode_position(position.seq_num, position.timestamp)
    return _LENGTHS[len(message)] + message
