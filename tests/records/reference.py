"""The slow reference for the native codec: records from and to their byte forms in plain Python.

An AppendRecord and a SequencedRecord have the same headers and body under different tags. What
they share once sequenced, the *rest*, is encoded when a batch is made; sequencing only puts the
sequence number and the timestamp before it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import numpy as np

from streamfold.errors import MalformedError
from streamfold.model.names import parse_token
from streamfold.model.positions import SeqNum, Timestamp
from streamfold.model.records import Header, Record, SequencedRecord, metered_size
from streamfold.records import AppendInput, RecordBatch
from streamfold.records.columns import BytesColumn, Columns, HeaderColumn
from streamfold.records.protobuf import (
    APPEND_BODY,
    APPEND_HEADERS,
    APPEND_TIMESTAMP,
    BODY,
    HEADER_NAME,
    HEADER_VALUE,
    HEADERS,
    RECORDS,
    SEQ_NUM,
    TIMESTAMP,
    delimited,
    fields,
    varint,
)
from streamfold.records.rules import Command, check_count, check_metered, command_of

if TYPE_CHECKING:
    from streamfold._native import Batch

#: Tags of s2.v1.AppendInput beside its records.
MATCH_SEQ_NUM, FENCING_TOKEN = 0x10, 0x1A


class ReferenceRecords:
    """Records that wait for their slot, as the native `Batch` does."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    @property
    def unstamped(self) -> int | None:
        stamps = [record.timestamp for record in self._records]
        return stamps.index(None) if None in stamps else None

    def sequence(
        self, first: int, now: int, floor: int, arrival: bool, uncapped: bool
    ) -> tuple[bytes, int, int]:
        stamps, latest = [], floor
        for record in self._records:
            own = now if arrival or record.timestamp is None else record.timestamp
            latest = max(latest, own if uncapped else min(own, now))
            stamps.append(latest)
        payload = encode_records(
            SequencedRecord(SeqNum(number), Timestamp(stamp), record.headers, record.body)
            for number, (stamp, record) in enumerate(zip(stamps, self._records, strict=True), first)
        )
        return payload, stamps[0], stamps[-1]


def _commands(records: Sequence[Record]) -> Iterator[Command]:
    for index, record in enumerate(records):
        if not all(name for name, _ in record.headers):
            yield command_of(index, len(record.headers), record.headers[0].value, record.body)


def parse_append_input(raw: bytes) -> AppendInput:
    """Decode and check any legal encoding."""
    records: list[Record] = []
    match: int | None = None
    token: str | None = None
    for tag, value, end in fields(raw, 0, len(raw)):
        if tag == RECORDS:
            check_count(len(records) + 1)
            records.append(parse_record(raw, value, end))
        elif tag == MATCH_SEQ_NUM:
            match = value
        elif tag == FENCING_TOKEN:
            token = _decode_token(raw[value:end])
    if token is not None:
        parse_token(token, "fencing token")
    check_count(len(records))
    metered = sum(map(metered_size, records))
    check_metered(metered)
    waiting = cast("Batch", ReferenceRecords(records))
    batch = RecordBatch(len(records), metered, tuple(_commands(records)), waiting)
    return AppendInput(batch, match, token)


def _decode_token(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedError(f"fencing token {raw[:64]!r} is not UTF-8") from None


def encode_records(records: Iterable[SequencedRecord]) -> bytes:
    """The payload that holds `records`, as sequencing writes it."""
    return b"".join(map(_encode_sequenced, records))


def _encode_sequenced(record: SequencedRecord) -> bytes:
    content = b"".join(
        (
            b"\x08" + varint(record.seq_num) if record.seq_num else b"",
            b"\x10" + varint(record.timestamp) if record.timestamp else b"",
            *map(_encode_header, record.headers),
            delimited(b"\x22", record.body),
        )
    )
    return b"\x0a" + varint(len(content)) + content


def _encode_header(header: Header) -> bytes:
    content = delimited(b"\x0a", header[0]) + delimited(b"\x12", header[1])
    return b"\x1a" + varint(len(content)) + content


def parse_record(raw: bytes, start: int, end: int) -> Record:
    """The AppendRecord message in `raw[start:end]`."""
    timestamp: Timestamp | None = None
    headers: list[Header] = []
    body = b""
    for tag, value, stop in fields(raw, start, end):
        if tag == APPEND_TIMESTAMP:
            timestamp = Timestamp(value)
        elif tag == APPEND_HEADERS:
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


def write_json(payload: bytes, *, as_base64: bool) -> bytes:
    """The records as the elements of a JSON array, in the member order of S2."""
    return b",".join(_json(record, as_base64) for record, _ in walk(payload))


def _json(record: SequencedRecord, as_base64: bool) -> bytes:
    def text(raw: bytes) -> str:
        return base64.b64encode(raw).decode() if as_base64 else raw.decode(errors="replace")

    members: dict[str, object] = {"seq_num": record.seq_num, "timestamp": record.timestamp}
    if record.headers:
        members["headers"] = [[text(name), text(value)] for name, value in record.headers]
    if record.body:
        members["body"] = text(record.body)
    return json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()


def read_columns(payload: bytes, *, headers: bool = True, bodies: bool = True) -> Columns:
    """The records of ReadBatches as columns."""
    records = [
        parse_sequenced(payload, start, end)
        for tag, start, end in fields(payload, 0, len(payload))
        if tag == RECORDS
    ]
    for record in records:
        if record.seq_num >= 2**63:
            raise MalformedError(f"seq_num {record.seq_num} does not fit a signed column")
    found = [header for record in records for header in record.headers]
    ends = np.array([0, *accumulate(len(record.headers) for record in records)], np.int32)
    names = bytes_column([header.name for header in found])
    values = bytes_column([header.value for header in found])
    return Columns(
        np.array([record.seq_num for record in records], np.int64),
        np.array([record.timestamp for record in records], np.uint64),
        HeaderColumn(ends, names, values) if headers else None,
        bytes_column([record.body for record in records]) if bodies else None,
    )


def bytes_column(values: list[bytes]) -> BytesColumn:
    offsets = np.array([0, *accumulate(map(len, values))], np.int32)
    return BytesColumn(offsets, np.frombuffer(b"".join(values), np.uint8))
