"""Decodes the JSON of a large append in short steps: records and headers by the group.

One call of msgspec for all of it would keep the interpreter's lock for half a second: 4 MiB hold half a
million headers, or a million records that are refused because they are too many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from streamfold.errors import InvalidError
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX, HEADER_OVERHEAD
from streamfold.records.rules import check_count, check_metered
from streamfold.wire.json_scan import GROUP, Layout, lay_out
from streamfold.wire.s2.failures import BadJsonError
from streamfold.wire.s2.json_body import decode_json

#: Members of one object, and bytes of one that is not decoded apart: an append has three members, and a
#: record has three; others are ignored.
MEMBERS_MAX: Final = 100
SMALL_MEMBER: Final = 16 << 10

#: Headers of one record: each costs so much of a batch, even if it is empty.
_HEADERS_MAX: Final = BATCH_BYTES_MAX // HEADER_OVERHEAD

Input = TypeVar("Input", bound=Struct)


class StepDecoder(Generic[Input]):
    """Decodes what a decoder of `input_type` would: an object with `records`, these with `headers`."""

    def __init__(self, input_type: type[Input], record: Any, headers: Any) -> None:
        self._input = msgspec.json.Decoder(input_type)
        self._record = msgspec.json.Decoder(record)
        self._records: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[record])
        self._headers: msgspec.json.Decoder[Any] = msgspec.json.Decoder(headers)

    def decode(self, body: bytes) -> Input:
        """The append; BadJsonError if it has another form, InvalidError if it has too many records."""
        members, records = _take_out(body, "records")
        if records is None:
            return decode_json(self._input, members)
        layout = _lay_out(records, b"[]", BATCH_RECORDS_MAX, check_count)
        found = decode_json(self._input, members)
        return msgspec.structs.replace(found, records=self._decode_records(layout))

    def _decode_records(self, layout: Layout) -> list[Any]:
        found: list[Any] = []
        for group in layout.groups():
            if len(group) <= GROUP:
                found += decode_json(self._records, b"[%b]" % group)
            else:
                found.append(self._decode_record(group))
        return found

    def _decode_record(self, text: bytes) -> Any:
        members, headers = _take_out(text, "headers", whole="body")
        record = decode_json(self._record, members)
        if headers is None:
            return record
        found: list[Any] = []
        for group in _lay_out(headers, b"[]", _HEADERS_MAX, _check_headers).groups():
            found += decode_json(self._headers, b"[%b]" % group)
        return msgspec.structs.replace(record, headers=found)


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
                f"member {part[:40]!r} has {len(part)} bytes, and is none that an append has"
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
