"""The data plane in JSON: appends in, acknowledgements and batches out."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.errors import InvalidError
from streamfold.model.names import parse_token
from streamfold.model.positions import StreamPosition, Timestamp
from streamfold.model.records import Header, Record, SequencedRecord
from streamfold.records import AppendInput, RecordBatch, decode, parse_append_input
from streamfold.records.rules import check_count
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import Unsigned, check_u64, decode_json
from streamfold.wire.s2.large_appends import StepDecoder

#: Bytes of a body, and brackets and commas in it, up to which it is decoded by one call: the largest
#: legal batch in base64, and a thousand records with a few headers each.
LIGHT_BYTES: Final = 3 << 19
LIGHT_MARKS: Final = 16_000


class RecordFormat(enum.StrEnum):
    """How the bytes of records become JSON strings."""

    #: As UTF-8; what is not valid UTF-8 is replaced when read.
    RAW = "raw"
    #: Standard alphabet, padded: every byte survives.
    BASE64 = "base64"


class _RawRecord(Struct, gc=False):
    timestamp: Unsigned | None = None
    headers: list[tuple[str, str]] | None = None
    body: str | None = None


class _RawInput(Struct):
    records: list[_RawRecord]
    match_seq_num: Unsigned | None = None
    fencing_token: str | None = None


class _Base64Record(Struct, gc=False):
    timestamp: Unsigned | None = None
    headers: list[tuple[bytes, bytes]] | None = None
    body: bytes | None = None


class _Base64Input(Struct):
    records: list[_Base64Record]
    match_seq_num: Unsigned | None = None
    fencing_token: str | None = None


class _RawSequenced(Struct, gc=False):
    seq_num: int
    timestamp: int
    headers: list[tuple[str, str]] | UnsetType = UNSET
    body: str | UnsetType = UNSET


class _Base64Sequenced(Struct, gc=False):
    seq_num: int
    timestamp: int
    headers: tuple[Header, ...] | UnsetType = UNSET
    body: bytes | UnsetType = UNSET


class _Batch(Struct):
    records: list[_RawSequenced] | list[_Base64Sequenced]
    tail: StreamPosition | UnsetType = UNSET


_RAW_INPUT: Final = msgspec.json.Decoder(_RawInput)
_BASE64_INPUT: Final = msgspec.json.Decoder(_Base64Input)
_ENCODER: Final = msgspec.json.Encoder()


def is_light(body: bytes) -> bool:
    """Whether to decode an append takes some milliseconds at most, whatever is in it."""
    marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    return len(body) <= LIGHT_BYTES and marks <= LIGHT_MARKS


def decode_append_body(body: bytes, record_format: RecordFormat) -> AppendInput:
    """The append that a unary request asks for, with every rule of a batch already kept.

    A body that is not light is decoded in short steps: for a thread beside the event loop.
    """
    if record_format is RecordFormat.RAW:
        raw, encoded = _decode_raw(body)
        check_count(len(raw.records or encoded))  # first: a flood of empty ones is not converted
        return _append_input(raw, list(map(_from_raw, raw.records)), encoded)
    safe, encoded = _decode_base64(body)
    check_count(len(safe.records or encoded))
    return _append_input(safe, list(map(_from_base64, safe.records)), encoded)


def encode_append_ack(start: StreamPosition, end: StreamPosition, tail: StreamPosition) -> bytes:
    """An AppendAck."""
    return b'{"start":%b,"end":%b,"tail":%b}' % (
        encode_position(start),
        encode_position(end),
        encode_position(tail),
    )


def encode_read_batch(
    payload: bytes, record_format: RecordFormat, tail: StreamPosition | None = None
) -> bytes:
    """A ReadBatch of stored records; empty headers and bodies, and no tail, are left out."""
    records = decode(payload)
    batch = _Batch(
        list(map(_to_raw, records))
        if record_format is RecordFormat.RAW
        else list(map(_to_base64, records)),
        UNSET if tail is None else tail,
    )
    return _ENCODER.encode(batch)


def encode_read_batches(payloads: Iterable[bytes], record_format: RecordFormat) -> bytes:
    """The records of several payloads as one ReadBatch, encoded in a step for each payload."""
    convert = _to_raw if record_format is RecordFormat.RAW else _to_base64
    arrays = (_ENCODER.encode([convert(record) for record in decode(one)]) for one in payloads)
    return b'{"records":[%b]}' % b",".join(array[1:-1] for array in arrays if len(array) > 2)


def encode_tail(tail: StreamPosition) -> bytes:
    """A TailResponse."""
    return b'{"tail":%b}' % encode_position(tail)


def encode_position(position: StreamPosition) -> bytes:
    """A StreamPosition; numbers are plain however large."""
    return b'{"seq_num":%d,"timestamp":%d}' % (position.seq_num, position.timestamp)


def _decode_raw(body: bytes) -> tuple[_RawInput, list[bytes]]:
    return (decode_json(_RAW_INPUT, body), []) if is_light(body) else _RAW_STEPS.decode(body)


def _decode_base64(body: bytes) -> tuple[_Base64Input, list[bytes]]:
    light = is_light(body)
    try:
        return (decode_json(_BASE64_INPUT, body), []) if light else _BASE64_STEPS.decode(body)
    except BadJsonError:
        # Strings that fit everything but the alphabet are a fault of content, not of form.
        _decode_raw(body)
        raise InvalidError(
            "a header or body is not valid base64: use the standard alphabet with padding, or "
            "send text with s2-format: raw"
        ) from None


def _append_input(
    request: _RawInput | _Base64Input, records: list[Record], encoded: list[bytes]
) -> AppendInput:
    check_u64(request.match_seq_num, "match_seq_num")
    if request.fencing_token is not None:
        parse_token(request.fencing_token, "fencing token")
    batch = parse_append_input(b"".join(encoded)).batch if encoded else RecordBatch.of(records)
    return AppendInput(batch, request.match_seq_num, request.fencing_token)


def _from_raw(record: _RawRecord) -> Record:
    return Record(
        record.body.encode() if record.body else b"",
        tuple([Header(name.encode(), value.encode()) for name, value in record.headers])
        if record.headers
        else (),
        None if record.timestamp is None else Timestamp(record.timestamp),
    )


def _header_from_raw(header: tuple[str, str]) -> Header:
    return Header(header[0].encode(), header[1].encode())


def _from_base64(record: _Base64Record) -> Record:
    return Record(
        record.body or b"",
        tuple([Header(name, value) for name, value in record.headers]) if record.headers else (),
        None if record.timestamp is None else Timestamp(record.timestamp),
    )


_RAW_STEPS: Final = StepDecoder(
    _RawInput, _RawRecord, list[tuple[str, str]], _from_raw, _header_from_raw
)
_BASE64_STEPS: Final = StepDecoder(
    _Base64Input, _Base64Record, list[tuple[bytes, bytes]], _from_base64, Header._make
)


def _to_raw(record: SequencedRecord) -> _RawSequenced:
    return _RawSequenced(
        record.seq_num,
        record.timestamp,
        [(_text(name), _text(value)) for name, value in record.headers] or UNSET,
        _text(record.body) or UNSET,
    )


def _to_base64(record: SequencedRecord) -> _Base64Sequenced:
    return _Base64Sequenced(
        record.seq_num, record.timestamp, record.headers or UNSET, record.body or UNSET
    )


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
