"""The data plane in protobuf: decodes appends, encodes acks and batches.

An outgoing batch is the stored bytes plus at most one field.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamfold import _native
from streamfold.errors import MalformedError
from streamfold.model.positions import StreamPosition
from streamfold.records import AppendInput, measure, parse_append_input
from streamfold.wire.s2.errors import BadFrameError, BadProtoError
from streamfold.wire.s2.frames import BODY_MAX, Frame, frame_head

#: Protobuf tag of a batch's tail.
_BATCH_TAIL = 0x12
#: Maximum bytes of a tail: tag, length, and two tags with a ten-byte number each.
_TAIL_MAX = 24
#: Bytes of records that fit a frame along with a tail.
FRAME_PAYLOAD_MAX = BODY_MAX - _TAIL_MAX

#: Bytes that parse in a millisecond, whatever they contain.
LIGHT_BYTES = 64 << 10
#: Fields, counted on all levels, that parse in a millisecond. A batch may have 350,000 headers.
FIELDS_MAX = 20_000


def is_light(raw: bytes) -> bool:
    """Return whether decoding an append takes a few milliseconds at most, whatever it contains."""
    return len(raw) <= LIGHT_BYTES or _native.count_fields(raw, FIELDS_MAX) <= FIELDS_MAX


def decode_append_body(body: bytes) -> AppendInput:
    """Decode a unary append."""
    try:
        return parse_append_input(body)
    except MalformedError as error:
        raise _bad_body(error) from None


def decode_append_frame(frame: Frame) -> AppendInput:
    """Decode an append from a session frame. Raises if a client sends a terminal frame."""
    if frame.terminal:
        raise BadFrameError("a client may not send a terminal frame: end the request body instead")
    try:
        return parse_append_input(frame.body)
    except MalformedError as error:
        raise _bad_frame(error) from None


def _bad_body(error: MalformedError) -> BadProtoError:
    return BadProtoError(f"the body is not a valid AppendInput: {error.message}")


def _bad_frame(error: MalformedError) -> BadFrameError:
    return BadFrameError(f"the frame holds no valid AppendInput: {error.message}")


def encode_append_ack(start: StreamPosition, end: StreamPosition, tail: StreamPosition) -> bytes:
    """Encode an AppendAck. All three positions are present, even where they are zero."""
    return _native.encode_ack(
        start.seq_num, start.timestamp, end.seq_num, end.timestamp, tail.seq_num, tail.timestamp
    )


def encode_read_batch(payload: bytes, tail: StreamPosition | None = None) -> bytes:
    """Encode a ReadBatch of stored records. A given tail is always present, even if it is zero.

    Clients treat a session batch with neither records nor tail as an error.
    """
    return payload if tail is None else payload + _tail(tail)


def encode_frame_parts(
    parts: Sequence[bytes | memoryview], tail: StreamPosition | None = None
) -> tuple[bytes | memoryview, ...]:
    """Encode a frame with a ReadBatch of stored records, in parts that are not copied.

    The records must fit a frame: FRAME_PAYLOAD_MAX bytes.
    """
    end = b"" if tail is None else _tail(tail)
    return (frame_head(sum(map(len, parts)) + len(end)), *parts, end)


def encode_frame_batches(payload: bytes, tail: StreamPosition | None = None) -> list[bytes]:
    """Encode stored records as ReadBatches that each fit a frame.

    This is one batch unless small headers swell the records. The tail goes with the last batch,
    since a client that sees it must have all records below it.
    """
    if len(payload) <= FRAME_PAYLOAD_MAX:
        return [encode_read_batch(payload, tail)]
    pieces, start, end = [], 0, 0
    for following in measure(payload).offsets[1:]:
        if following - start > FRAME_PAYLOAD_MAX and end > start:
            pieces.append(payload[start:end])
            start = end
        end = following
    return [*pieces, encode_read_batch(payload[start:], tail)]


def _tail(position: StreamPosition) -> bytes:
    return _native.encode_position(_BATCH_TAIL, position.seq_num, position.timestamp)
