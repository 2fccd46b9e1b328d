"""Records from and to their byte forms in plain Python: complete, and the reference for `kernel`.

An AppendRecord and a SequencedRecord have the same headers and body under different tags. What
they share once sequenced, the *rest*, is encoded when a batch is made; sequencing only puts the
sequence number and the timestamp before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count

from streamfold.errors import MalformedError
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import (
    HEADER_OVERHEAD,
    Header,
    Record,
    SequencedRecord,
    metered_size,
)
from streamfold.records.protobuf import delimited, fields, varint
from streamfold.records.rules import Sequenced, Slot, assign_timestamps, check_metered

#: Tags (field number << 3 | wire type) of s2.v1; RECORDS is the same in AppendInput and ReadBatch.
RECORDS = 0x0A
HEADER_NAME, HEADER_VALUE = 0x0A, 0x12
APPEND_TIMESTAMP, APPEND_HEADERS, APPEND_BODY = 0x08, 0x12, 0x1A
SEQ_NUM, TIMESTAMP, HEADERS, BODY = 0x08, 0x10, 0x1A, 0x22


class PlainRecords:
    """Records that wait for their slot: timestamps as given, and encoded rests."""

    __slots__ = ("_rests", "_timestamps")

    def __init__(self, timestamps: Sequence[int | None], rests: Sequence[bytes]) -> None:
        self._timestamps = timestamps
        self._rests = rests

    @classmethod
    def of(cls, records: Sequence[Record]) -> PlainRecords:
        return cls([record.timestamp for record in records], [encode_rest(r) for r in records])

    def sequence(self, slot: Slot) -> Sequenced:
        stamps = assign_timestamps(self._timestamps, slot)
        parts: list[bytes] = []
        for seq_num, stamp, rest in zip(count(slot.first), stamps, self._rests, strict=False):
            position = encode_position(seq_num, stamp)
            parts += (b"\x0a", varint(len(position) + len(rest)), position, rest)
        return Sequenced(b"".join(parts), stamps[0], stamps[-1])


def encode_position(seq_num: int, timestamp: int) -> bytes:
    """The fields of a SequencedRecord that sequencing decides; zeros are left out, as in proto3."""
    stamp = _encode_timestamp(timestamp)
    return b"\x08" + varint(seq_num) + stamp if seq_num else stamp


@lru_cache(maxsize=256)
def _encode_timestamp(timestamp: int) -> bytes:
    """Cached: records that arrive together have the same."""
    return b"\x10" + varint(timestamp) if timestamp else b""


def encode_body(body: bytes) -> bytes:
    """The body as a field of a SequencedRecord."""
    return delimited(b"\x22", body)


def encode_rest(record: Record | SequencedRecord) -> bytes:
    """Headers and body as fields of a SequencedRecord."""
    body = encode_body(record.body)
    if not record.headers:
        return body
    return b"".join(map(_encode_header, record.headers)) + body


def _encode_header(header: Header) -> bytes:
    content = delimited(b"\x0a", header[0]) + delimited(b"\x12", header[1])
    return b"\x1a" + varint(len(content)) + content


def encode_sequenced(record: SequencedRecord) -> bytes:
    """One record of a payload, with the tag and length that make it a field of a ReadBatch."""
    content = encode_position(record.seq_num, record.timestamp) + encode_rest(record)
    return b"\x0a" + varint(len(content)) + content


def parse_record(raw: bytes, start: int, end: int) -> Record:
    """The AppendRecord message in `raw[start:end]`."""
    timestamp: Timestamp | None = None
    headers: list[Header] = []
    body = b""
    for tag, value, stop in fields(raw, start, end):
        if tag == APPEND_TIMESTAMP:
            timestamp = Timestamp(value)
        elif tag == APPEND_HEADERS:
            # Check before parsing: too large a record must not become millions of objects first.
            check_metered(HEADER_OVERHEAD * len(headers))
            headers.append(_parse_header(raw, value, stop))
        elif tag == APPEND_BODY:
            body = raw[value:stop]
    return Record(body, tuple(headers), timestamp)


def parse_sequenced(raw: bytes, start: int, end: int) -> SequencedRecord:
    """The SequencedRecord message in `raw[start:end]`."""
    seq_num = timestamp = 0
    headers: list[Header] = []
    body = b""
    for tag, value, stop in fields(raw, start, end):
        if tag == SEQ_NUM:
            seq_num = value
        elif tag == TIMESTAMP:
            timestamp = value
        elif tag == HEADERS:
            headers.append(_parse_header(raw, value, stop))
        elif tag == BODY:
            body = raw[value:stop]
    return SequencedRecord(SeqNum(seq_num), Timestamp(timestamp), tuple(headers), body)


def _parse_header(raw: bytes, start: int, end: int) -> Header:
    name = value = b""
    for tag, at, stop in fields(raw, start, end):
        if tag == HEADER_NAME:
            name = raw[at:stop]
        elif tag == HEADER_VALUE:
            value = raw[at:stop]
    return Header(name, value)


def walk(payload: bytes) -> Iterator[tuple[SequencedRecord, int]]:
    """Every record of a stored payload, and the offset after it."""
    for tag, start, end in fields(payload, 0, len(payload)):
        if tag != RECORDS:
            raise MalformedError(f"tag {tag} before byte {start} does not start a record")
        yield parse_sequenced(payload, start, end), end


def measure(payload: bytes) -> tuple[list[int], list[int], list[int], int]:
    """Offsets, timestamps and running metered size of a payload, and its first sequence number."""
    offsets, timestamps, metered = [0], [], [0]
    first = 0
    for index, (record, end) in enumerate(walk(payload)):
        first = first if index else record.seq_num
        if record.seq_num != first + index:
            raise MalformedError(
                f"record {index} has seq_num {record.seq_num}, not {first + index}"
            )
        offsets.append(end)
        timestamps.append(int(record.timestamp))
        metered.append(metered[-1] + metered_size(record))
    return offsets, timestamps, metered, first
