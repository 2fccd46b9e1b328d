"""The data plane in JSON: appends in, acknowledgements and batches out.

The JSON of a large append is decoded in short steps: records and headers by the group. One call of
msgspec for all of it would keep the interpreter's lock for half a second: 4 MiB hold half a million
headers, or a million records that are refused because they are too many. So would freeing their
objects, or a garbage collection among them. Hence each group is encoded as protobuf, and its objects
are freed, before the next one is decoded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.errors import InvalidError
from streamfold.model.names import parse_token
from streamfold.model.positions import StreamPosition, Timestamp
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    HEADER_OVERHEAD,
    Header,
    Record,
    SequencedRecord,
)
from streamfold.records import AppendInput, RecordBatch, decode, parse_append_input
from streamfold.records.columns import encode_append, encode_append_header
from streamfold.records.kernels import compiled
from streamfold.records.rules import check_count, check_metered, check_types
from streamfold.wire.json_scan import GROUP, Layout, lay_out
from streamfold.wire.s2.errors import BadJsonError, Failure
from streamfold.wire.s2.json_body import Unsigned, check_u64, decode_json

#: Members of one object, and bytes of one that is not decoded apart: an append has three members, and a
#: record has three; others are ignored.
MEMBERS_MAX: Final = 100
SMALL_MEMBER: Final = 16 << 10

#: Headers of one record: each costs so much of a batch, even if it is empty.
_HEADERS_MAX: Final = BATCH_BYTES_MAX // HEADER_OVERHEAD

Input = TypeVar("Input", bound=Struct)
T = TypeVar("T")
#: Bytes of a body, and brackets and commas in it, up to which it is decoded by one call: the largest
#: legal batch in base64, and a thousand records with a few headers each.
LIGHT_BYTES: Final = 3 << 19
LIGHT_MARKS: Final = 16_000
#: Streams whose tails one request may ask for.
TAILS_MAX: Final = 1000
_ENCODER: Final = msgspec.json.Encoder()


class StepDecoder(Generic[Input]):
    """Decodes what a decoder of `input_type` would: an object with `records`, these with `headers`.

    `to_record` and `to_header` make the model's values of what was decoded.
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
        """The append and its records, each a field of a protobuf AppendInput.

        A few that are small are decoded as members of the append instead. BadJsonError if it has
        another form, InvalidError if it has too many records.
        """
        members, records = _take_out(body, "records")
        if records is None:
            return decode_json(self._input, members), []
        layout = _lay_out(records, b"[]", BATCH_RECORDS_MAX, check_count)
        return decode_json(self._input, members), list(self._encode_records(layout))

    def _encode_records(self, layout: Layout) -> Iterator[bytes]:
        index = 0
        for group in layout.groups():
            if len(group) <= GROUP:
                found = map(self._to_record, decode_json(self._records, b"[%b]" % group))
                encoded = [_encode(at, record) for at, record in enumerate(found, index)]
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
        found = map(self._to_header, decode_json(self._headers, b"[%b]" % group))
        return b"".join(map(encode_append_header, found))


def _encode(index: int, record: Record, headers: bytes | None = None) -> bytes:
    """A record as a field of an AppendInput; `headers` replace its own, encoded."""
    check_types(index, record)
    return encode_append(record, headers)


def _take_out(text: bytes, name: str, whole: str | None = None) -> tuple[bytes, bytes | None]:
    """An object with an empty array for its member `name` if that is large, and the member's value.

    `whole` is a member that may be large and stays where it is.
    """
    taken, kept = None, []
    for part in _lay_out(text, b"{}", MEMBERS_MAX, _check_members).parts():
        if len(part) <= SMALL_MEMBER or (whole and part.startswith(b'"%b":' % whole.encode())):
            kept.append(part)
        elif part.startswith(b'"%b":' % name.encode()):
            taken = part.partition(b":")[2]
            kept.append(b'"%b":[]' % name.encode())
        else:
            raise BadJsonError(
                f"member {part[:40]!r} has {len(part)} bytes, and is not a member of an append"
            )
    return b"{%b}" % b",".join(kept), taken


def _lay_out(value: bytes, brackets: bytes, parts_max: int, check: Callable[[int], None]) -> Layout:
    """The layout of an array or object; `check` raises for a number of parts that is too large."""
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


_RAW_INPUT: Final = msgspec.json.Decoder(_RawInput)
_BASE64_INPUT: Final = msgspec.json.Decoder(_Base64Input)


def is_light(body: bytes) -> bool:
    """Whether decoding an append takes some milliseconds at most, whatever it contains."""
    marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    return len(body) <= LIGHT_BYTES and marks <= LIGHT_MARKS


def decode_append_body(body: bytes, record_format: RecordFormat) -> AppendInput:
    """The append that a unary request asks for, with every rule of a batch already kept.

    A body that is not light is decoded in short steps: for a thread beside the event loop.
    """
    light = decode_light_body(body, record_format)
    if light is not None:
        return light
    if record_format is RecordFormat.RAW:
        raw, encoded = _RAW_STEPS.decode(body)
        check_count(len(raw.records or encoded))  # first: a flood of empty ones is not converted
        return _append_input(raw, list(map(_from_raw, raw.records)), encoded)
    safe, encoded = _decode_base64(_BASE64_STEPS.decode, body)
    check_count(len(safe.records or encoded))
    return _append_input(safe, list(map(_from_base64, safe.records)), encoded)


def decode_light_body(body: bytes, record_format: RecordFormat) -> AppendInput | None:
    """The same in some milliseconds, whatever is in the body; None if it would take longer."""
    if not is_light(body):
        return None
    if record_format is not RecordFormat.RAW:
        safe = _decode_base64(partial(decode_json, _BASE64_INPUT), body)
        check_count(len(safe.records))
        return _append_input(safe, list(map(_from_base64, safe.records)))
    raw = decode_json(_RAW_INPUT, body)
    records = raw.records
    if len(records) == 1 and not records[0].headers:
        # The same as below, in fewer steps.
        _check_conditions(raw)
        content = records[0].body.encode() if records[0].body else b""
        batch = RecordBatch.of_one(content, records[0].timestamp)
        return AppendInput(batch, raw.match_seq_num, raw.fencing_token)
    check_count(len(records))
    return _append_input(raw, list(map(_from_raw, records)))


def encode_append_ack(start: StreamPosition, end: StreamPosition, tail: StreamPosition) -> bytes:
    """An AppendAck."""
    last = encode_position(end)
    return b'{"start":%b,"end":%b,"tail":%b}' % (
        encode_position(start),
        last,
        last if tail is end else encode_position(tail),
    )


def encode_read_batch(
    payload: bytes, record_format: RecordFormat, tail: StreamPosition | None = None
) -> bytes:
    """A ReadBatch of stored records; empty headers and bodies, and no tail, are left out."""
    end = b"" if tail is None else b',"tail":%b' % encode_position(tail)
    return b'{"records":[%b]%b}' % (_encode_records(payload, record_format), end)


def encode_read_batches(payloads: Iterable[bytes], record_format: RecordFormat) -> bytes:
    """The records of several payloads as one ReadBatch, encoded in a step for each payload."""
    arrays = (_encode_records(one, record_format) for one in payloads)
    return b'{"records":[%b]}' % b",".join(array for array in arrays if array)


def _encode_records(payload: bytes, record_format: RecordFormat) -> bytes:
    """The elements of the array: by compiled code, unless it leaves them to Python."""
    twin = compiled()
    base64 = record_format is RecordFormat.BASE64
    quick = None if twin is None else twin.to_json(payload, base64=base64)
    return encode_plain(payload, record_format) if quick is None else quick


def encode_plain(payload: bytes, record_format: RecordFormat) -> bytes:
    """The same in Python; what is not valid UTF-8 is replaced."""
    convert = _to_raw if record_format is RecordFormat.RAW else _to_base64
    return _ENCODER.encode([convert(record) for record in decode(payload)])[1:-1]


def encode_tail(tail: StreamPosition) -> bytes:
    """A TailResponse."""
    return b'{"tail":%b}' % encode_position(tail)


class _TailsInput(Struct):
    streams: list[str]


_TAILS_INPUT: Final = msgspec.json.Decoder(_TailsInput)


def decode_tails_input(body: bytes) -> list[str]:
    """The names of the streams whose tails are asked for, unchecked."""
    streams = decode_json(_TAILS_INPUT, body).streams
    if len(streams) > TAILS_MAX:
        raise InvalidError(
            f"streams has {len(streams)} names, at most {TAILS_MAX} are allowed: split the request"
        )
    return streams


def encode_tails(streams: Sequence[str], tails: Sequence[StreamPosition | Failure]) -> bytes:
    """The tail of each stream, or the status and the error that a request for it alone would get."""
    entries = [
        b'{"stream":%b,"status":%d,"error":%b}' % (_ENCODER.encode(stream), tail.status, tail.body)
        if isinstance(tail, Failure)
        else b'{"stream":%b,"tail":%b}' % (_ENCODER.encode(stream), encode_position(tail))
        for stream, tail in zip(streams, tails, strict=True)
    ]
    return b'{"tails":[%b]}' % b",".join(entries)


def encode_position(position: StreamPosition) -> bytes:
    """A StreamPosition; numbers are plain however large."""
    return b'{"seq_num":%d,"timestamp":%d}' % (position.seq_num, position.timestamp)


def _decode_base64(decode_body: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode_body(body)
    except BadJsonError:
        # Strings that fit everything but the alphabet are a fault of content, not of form.
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
    """An append of `records`, or of those that were `encoded` already."""
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
