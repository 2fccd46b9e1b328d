"""Decodes the JSON of a large append in short steps: records and headers by the group.

One call of msgspec for all of it would keep the interpreter's lock for half a second: 4 MiB hold half a
million headers, or a million records that are refused because they are too many. So would freeing, or a
look of the garbage collector at, the objects that they become. Hence each group is encoded as protobuf,
and its objects are freed, before the next one is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from streamfold.errors import InvalidError
from streamfold.model.records import (
    BATCH_BYTES_MAX,
    BATCH_RECORDS_MAX,
    HEADER_OVERHEAD,
    Header,
    Record,
)
from streamfold.records.columns import encode_append, encode_append_header
from streamfold.records.rules import check_count, check_metered, check_types
from streamfold.wire.json_scan import GROUP, Layout, lay_out
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import decode_json

#: Members of one object, and bytes of one that is not decoded apart: an append has three members, and a
#: record has three; others are ignored.
MEMBERS_MAX: Final = 100
SMALL_MEMBER: Final = 16 << 10

#: Headers of one record: each costs so much of a batch, even if it is empty.
_HEADERS_MAX: Final = BATCH_BYTES_MAX // HEADER_OVERHEAD

Input = TypeVar("Input", bound=Struct)


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
