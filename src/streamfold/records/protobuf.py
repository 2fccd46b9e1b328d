"""The parts of the protobuf wire format that records need: varints and message fields.

Accepts every legal encoding, not only what serializers emit: fields in any order, overlong varints,
unknown fields and groups. Plain Python, so that clients need no native code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from streamfold.errors import MalformedError
from streamfold.model.positions import U64_MAX
from streamfold.model.records import Header, Record

VARINT, FIXED64, DELIMITED, GROUP_START, GROUP_END, FIXED32 = range(6)

#: Maximum bytes of a varint and of a tag that decoders accept.
VARINT_MAX, TAG_MAX = 10, 5
#: Maximum nesting of groups, as in the official decoders.
GROUP_DEPTH_MAX = 100

_LAST = tuple(bytes((bits,)) for bits in range(0x80))
_MORE = tuple(bytes((bits | 0x80,)) for bits in range(0x80))


def varint(value: int) -> bytes:
    """Return the shortest encoding of an unsigned 64-bit number."""
    if value < 0x80:
        return _LAST[value]
    if value < 0x4000:
        return _MORE[value & 0x7F] + _LAST[value >> 7]
    return _MORE[value & 0x7F] + _MORE[value >> 7 & 0x7F] + _high_varint(value >> 14)


@lru_cache(maxsize=1024)
def _high_varint(value: int) -> bytes:
    """Return `varint(value)`, cached: the upper bits of seq_nums and timestamps rarely change."""
    return varint(value)


def delimited(tag: bytes, content: bytes) -> bytes:
    """Return a field of bytes, or nothing if empty, because proto3 omits defaults."""
    return b"%b%b%b" % (tag, varint(len(content)), content) if content else b""


def read_varint(raw: bytes, at: int, end: int, longest: int = VARINT_MAX) -> tuple[int, int]:
    """Return the number at `at` and the offset after it. Drops bits beyond the 64th."""
    if at < end and raw[at] < 0x80:
        return raw[at], at + 1
    if at + 1 < end and raw[at + 1] < 0x80:
        return raw[at] & 0x7F | raw[at + 1] << 7, at + 2
    value = shift = 0
    for here in range(at, min(end, at + longest)):
        byte = raw[here]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & U64_MAX, here + 1
        shift += 7
    raise MalformedError(f"the number at byte {at} is cut off or longer than {longest} bytes")


def fields(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield varint fields as (tag, value, offset after) and delimited ones as (tag, start, end).

    Validates and skips fields of other types, which none of our messages has.
    """
    while at < end:
        tag, at = _read_tag(raw, at, end)
        kind = tag & 7
        if kind == VARINT:
            value, at = read_varint(raw, at, end)
            yield tag, value, at
        elif kind == DELIMITED:
            start, at = _read_delimited(raw, at, end)
            yield tag, start, at
        else:
            at = _skip(raw, tag, at, end)


def _read_tag(raw: bytes, at: int, end: int) -> tuple[int, int]:
    tag, after = read_varint(raw, at, end, TAG_MAX)
    if not 8 <= tag < 1 << 32:
        raise MalformedError(f"tag {tag} at byte {at} has an illegal field number")
    return tag, after


def _read_delimited(raw: bytes, at: int, end: int) -> tuple[int, int]:
    size, start = read_varint(raw, at, end)
    if size > end - start:
        raise MalformedError(f"{size} bytes are announced at byte {at}, {end - start} are left")
    return start, start + size


def _skip(raw: bytes, tag: int, at: int, end: int) -> int:
    """Return the offset after the field whose tag was read. Walks groups to their end."""
    groups: list[int] = []
    while True:
        kind = tag & 7
        if kind == GROUP_START and len(groups) < GROUP_DEPTH_MAX:
            groups.append(tag >> 3)
        elif kind == GROUP_END and groups and groups[-1] == tag >> 3:
            groups.pop()
        elif kind == VARINT:
            at = read_varint(raw, at, end)[1]
        elif kind == DELIMITED:
            at = _read_delimited(raw, at, end)[1]
        elif kind in (FIXED32, FIXED64):
            at += 4 if kind == FIXED32 else 8
        else:
            raise MalformedError(f"tag {tag} before byte {at} is not allowed there")
        if at > end:
            raise MalformedError(f"the field before byte {end} is cut off")
        if not groups:
            return at
        tag, at = _read_tag(raw, at, end)


#: Tags (field number << 3 | wire type) of s2.v1. AppendInput and ReadBatch share RECORDS.
RECORDS = 0x0A
HEADER_NAME, HEADER_VALUE = 0x0A, 0x12
APPEND_TIMESTAMP, APPEND_HEADERS, APPEND_BODY = 0x08, 0x12, 0x1A
SEQ_NUM, TIMESTAMP, HEADERS, BODY = 0x08, 0x10, 0x1A, 0x22


def encode_append(record: Record, headers: bytes | None = None) -> bytes:
    """Encode an AppendInput record with tag and length. Encoded `headers` replace its own."""
    stamp = b"" if record.timestamp is None else b"\x08" + varint(record.timestamp)
    if headers is None:
        headers = b"".join(map(encode_append_header, record.headers))
    content = stamp + headers + delimited(b"\x1a", record.body)
    return b"\x0a" + varint(len(content)) + content


def encode_append_header(header: Header) -> bytes:
    """Encode a header of an AppendInput record with tag and length."""
    content = delimited(b"\x0a", header.name) + delimited(b"\x12", header.value)
    return b"\x12" + varint(len(content)) + content
