"""The data plane in JSON: decodes appends, encodes acks and batches.

A large append is decoded in short steps, one group of records or headers at a time. A single
msgspec call would hold the GIL for half a second: 4 MiB can contain half a million headers, or a
million records that are then rejected because there are too many. Freeing their objects, or a
garbage collection that visits them, would take as long. Hence each group is encoded as protobuf and
its objects are freed before the next group is decoded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from streamfold.errors import InvalidError
from streamfold.model.names import parse_token
from streamfold.model.positions import StreamPosition, Timestamp
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    HEADER_OVERHEAD,
    Header,
    Record,
)
from streamfold.records import AppendInput, RecordBatch, parse_append_input
from streamfold.records.payload import write_json
from streamfold.records.protobuf import encode_append, encode_append_header
from streamfold.records.rules import check_count, check_metered, check_types
from streamfold.wire.json_scan import GROUP, JsonLayout, lay_out
from streamfold.wire.s2.errors import BadJsonError, Failure
from streamfold.wire.s2.json_body import Unsigned, check_u64, decode_json

#: Maximum members of one object, and maximum bytes of a member that is decoded with its object. An
#: append has three members, and so has a record. Other members are ignored.
MEMBERS_MAX: Final = 100
SMALL_MEMBER: Final = 16 << 10

#: Maximum headers of one record. Even an empty header counts HEADER_OVERHEAD bytes of a batch.
_HEADERS_MAX: Final = BATCH_BYTES_MAX // HEADER_OVERHEAD

Input = TypeVar("Input", bound=Struct)
T = TypeVar("T")
#: Limits for decoding a body in one call: its bytes, and the brackets and commas in it. They allow
#: the largest legal batch in base64, and a thousand records with a few headers each.
LIGHT_BYTES: Final = 3 << 19
LIGHT_MARKS: Final = 16_000
#: Maximum streams whose tails one request may ask for.
TAILS_MAX: Final = 1000
_ENCODER: Final = msgspec.json.Encoder()


class StepDecoder(Generic[Input]):
    """Decodes an `input_type` object in steps: first its `records`, then each record's `headers`.

    `to_record` and `to_header` convert decoded values to Record and Header.
    """

    def __init__(
        self,
        input_type: type[Input],
        record: Any,
        headers: Any,
        to_record: Callable[[Any], Record],
        to_header: Callable[[Any], Header],
    ) -> None:
        self._to_record = to_record
        self._to_header = to_header
        self._input = msgspec.json.Decoder(input_type)
        self._record = msgspec.json.Decoder(record)
        self._records: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[record])
        self._headers: msgspec.json.Decoder[Any] = msgspec.json.Decoder(headers)

    def decode(self, body: bytes) -> tuple[Input, list[bytes]]:
        """Return the append, and its records each encoded as a field of a protobuf AppendInput.

        If `records` is small, its records stay members of the append instead. Raises BadJsonError
        if the body has a different form, and InvalidError if it has too many records.
        """
        members, records = _take_out(body, "records")
        if records is None:
            return decode_json(self._input, members), []
        layout = _lay_out(records, b"[]", BATCH_RECORDS_MAX, check_count)
        return decode_json(self._input, members), list(self._encode_records(layout))

    def _encode_records(self, layout: JsonLayout) -> Iterator[bytes]:
        index = 0
        for group in layout.groups():
            if len(group) <= GROUP:
                records = map(self._to_record, decode_json(self._records, b"[%b]" % group))
                encoded = [_encode(at, record) for at, record in enumerate(records, index)]
            else:
                encoded = [self._encode_record(index, group)]
            yield from encoded
            index += len(encoded)

    def _encode_record(self, index: int, text: bytes) -> bytes:
        members, headers = _take_out(text, "headers", whole="body")
        record = self._to_record(decode_json(self._record, members))
        if headers is None:
            return _encode(index, record)
        layout = _lay_out(headers, b"[]", _HEADERS_MAX, _check_headers)
        return _encode(index, record, b"".join(map(self._encode_headers, layout.groups())))

    def _encode_headers(self, group: bytes) -> bytes:
        headers = map(self._to_header, decode_json(self._headers, b"[%b]" % group))
        return b"".join(map(encode_append_header, headers))


def _encode(index: int, record: Record, headers: bytes | None = None) -> bytes:
    """Encode a record as an AppendInput field.

    `headers`, already encoded, replace the record's own.
    """
    check_types(index, record)
    return encode_append(record, headers)


def _take_out(text: bytes, name: str, whole: str | None = None) -> tuple[bytes, bytes | None]:
    """Take a large array out of an object: replace member `name` by [] and return both.

    The member's value is None if it is small. The member named `whole` may be large and stays in
    place.
    """
    member, members = None, []
    for part in _lay_out(text, b"{}", MEMBERS_MAX, _check_members).parts():
        if len(part) <= SMALL_MEMBER or (whole and part.startswith(b'"%b":' % whole.encode())):
            members.append(part)
        elif part.startswith(b'"%b":' % name.encode()):
            member = part.partition(b":")[2]
            members.append(b'"%b":[]' % name.encode())
        else:
            raise BadJsonError(
                f"member {part[:40]!r} has {len(part)} bytes, and is not a member of an append"
            )
    return b"{%b}" % b",".join(members), member


def _lay_out(
    value: bytes, brackets: bytes, parts_max: int, check: Callable[[int], None]
) -> JsonLayout:
    """Lay out an array or object. Calls `check`, which raises, if it has too many parts."""
    try:
        layout = lay_out(value, brackets, parts_max)
    except InvalidError as error:
        raise BadJsonError(error.message) from None
    if layout is None:
        check(parts_max + 1)
        raise AssertionError(f"{check} takes {parts_max + 1} parts")
    return layout


def _check_headers(count: int) -> None:
    check_metered(HEADER_OVERHEAD * count)


def _check_members(count: int) -> None:
    if count > MEMBERS_MAX:
        raise BadJsonError(f"an object has more than {MEMBERS_MAX} members: leave some out")


class RecordFormat(enum.StrEnum):
    """How record bytes become JSON strings."""

    #: As UTF-8. Reads replace bytes that are not valid UTF-8.
    RAW = "raw"
    #: Standard alphabet with padding. Preserves every byte.
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


_RAW_INPUT: Final = msgspec.json.Decoder(_RawInput)
_BASE64_INPUT: Final = msgspec.json.Decoder(_Base64Input)


def is_light(body: bytes) -> bool:
    """Return whether decoding an append takes a few milliseconds at most, whatever it contains."""
    if len(body) <= LIGHT_MARKS:
        return True
    marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    return len(body) <= LIGHT_BYTES and marks <= LIGHT_MARKS


def decode_append_body(body: bytes, record_format: RecordFormat) -> AppendInput:
    """Decode a unary append, enforcing every batch rule.

    A body that is not light is decoded in short steps and belongs in a thread, off the event loop.
    """
    if is_light(body):
        return _decode_at_once(body, record_format)
    if record_format is RecordFormat.RAW:
        raw, encoded = _RAW_STEPS.decode(body)
        check_count(len(raw.records or encoded))  # before converting a flood of empty records
        return _append_input(raw, list(map(_from_raw, raw.records)), encoded)
    safe, encoded = _decode_base64(_BASE64_STEPS.decode, body)
    check_count(len(safe.records or encoded))
    return _append_input(safe, list(map(_from_base64, safe.records)), encoded)


def _decode_at_once(body: bytes, record_format: RecordFormat) -> AppendInput:
    if record_format is not RecordFormat.RAW:
        safe = _decode_base64(partial(decode_json, _BASE64_INPUT), body)
        check_count(len(safe.records))
        return _append_input(safe, list(map(_from_base64, safe.records)))
    raw = decode_json(_RAW_INPUT, body)
    records = raw.records
    if len(records) == 1 and not records[0].headers:
        # A shortcut for one record without headers, with the same result as below.
        _check_conditions(raw)
        content = records[0].body.encode() if records[0].body else b""
        batch = RecordBatch.of_one(content, records[0].timestamp)
        return AppendInput(batch, raw.match_seq_num, raw.fencing_token)
    check_count(len(records))
    return _append_input(raw, list(map(_from_raw, records)))


def encode_append_ack(start: StreamPosition, end: StreamPosition, tail: StreamPosition) -> bytes:
    """Encode an AppendAck."""
    last = encode_position(end)
    return b'{"start":%b,"end":%b,"tail":%b}' % (
        encode_position(start),
        last,
        last if tail is end else encode_position(tail),
    )


def encode_read_batch(
    payload: bytes, record_format: RecordFormat, tail: StreamPosition | None = None
) -> bytes:
    """Encode stored records as a ReadBatch.

    Empty headers, empty bodies and an absent tail are omitted.
    """
    end = b"" if tail is None else b',"tail":%b' % encode_position(tail)
    return b'{"records":[%b]%b}' % (_encode_records(payload, record_format), end)


def encode_read_batches(payloads: Iterable[bytes], record_format: RecordFormat) -> bytes:
    """Encode the records of several payloads as one ReadBatch, one step per payload."""
    arrays = (_encode_records(one, record_format) for one in payloads)
    return b'{"records":[%b]}' % b",".join(array for array in arrays if array)


def _encode_records(payload: bytes, record_format: RecordFormat) -> bytes:
    """Encode a payload's records as array elements, without the brackets."""
    return write_json(payload, base64=record_format is RecordFormat.BASE64)


def encode_tail(tail: StreamPosition) -> bytes:
    """Encode a TailResponse."""
    return b'{"tail":%b}' % encode_position(tail)


class _TailsInput(Struct):
    streams: list[str]


_TAILS_INPUT: Final = msgspec.json.Decoder(_TailsInput)


def decode_tails_input(body: bytes) -> list[str]:
    """Decode the names of the streams whose tails the request asks for, unchecked."""
    streams = decode_json(_TAILS_INPUT, body).streams
    if len(streams) > TAILS_MAX:
        raise InvalidError(
            f"streams has {len(streams)} names, at most {TAILS_MAX} are allowed: split the request"
        )
    return streams


def encode_tails(streams: Sequence[str], tails: Sequence[StreamPosition | Failure]) -> bytes:
    """Encode each stream's tail, or the status and error of a request for that stream alone."""
    entries = [
        b'{"stream":%b,"status":%d,"error":%b}' % (_ENCODER.encode(stream), tail.status, tail.body)
        if isinstance(tail, Failure)
        else b'{"stream":%b,"tail":%b}' % (_ENCODER.encode(stream), encode_position(tail))
        for stream, tail in zip(streams, tails, strict=True)
    ]
    return b'{"tails":[%b]}' % b",".join(entries)


def encode_position(position: StreamPosition) -> bytes:
    """Encode a StreamPosition. Numbers are plain digits, however large."""
    return b'{"seq_num":%d,"timestamp":%d}' % (position.seq_num, position.timestamp)


def _decode_base64(decode_body: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode_body(body)
    except BadJsonError:
        # If only the base64 alphabet is wrong, the content is invalid, not the JSON.
        if is_light(body):
            decode_json(_RAW_INPUT, body)
        else:
            _RAW_STEPS.decode(body)
        raise InvalidError(
            "a header or body is not valid base64: use the standard alphabet with padding, or "
            "send text with s2-format: raw"
        ) from None


def _append_input(
    request: _RawInput | _Base64Input, records: list[Record], encoded: Sequence[bytes] = ()
) -> AppendInput:
    """Build an append from `records`, or from the records in `encoded` if there are any."""
    _check_conditions(request)
    batch = parse_append_input(b"".join(encoded)).batch if encoded else RecordBatch.of(records)
    return AppendInput(batch, request.match_seq_num, request.fencing_token)


def _check_conditions(request: _RawInput | _Base64Input) -> None:
    if request.match_seq_num is not None:
        check_u64(request.match_seq_num, "match_seq_num")
    if request.fencing_token is not None:
        parse_token(request.fencing_token, "fencing token")


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
