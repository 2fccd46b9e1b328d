"""From the bytes of an append request to a batch and its conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from streamfold.errors import MalformedError
from streamfold.model.names import parse_token
from streamfold.model.records import Record
from streamfold.records.batch import RecordBatch, SingleRecord, scan_single, validate
from streamfold.records.kernels import compiled
from streamfold.records.plain import APPEND_HEADERS, RECORDS, parse_record
from streamfold.records.protobuf import fields
from streamfold.records.rules import (
    Command,
    check_count,
    check_lone_header,
    check_metered,
    command_of,
)

if TYPE_CHECKING:
    # Only for types: at run time this would load the compiler.
    from streamfold.records.compiled import ScannedRecords

#: Records and headers that compiled code walks through in a millisecond. A batch may have 350,000.
PARTS_MAX = 20_000
#: Bytes of a message that cannot have many more.
FEW_PARTS_BYTES = 64 << 10

#: Tags of s2.v1.AppendInput beside its records.
MATCH_SEQ_NUM, FENCING_TOKEN = 0x10, 0x1A


class AppendInput(msgspec.Struct, frozen=True, gc=False):
    """A batch, and what must hold for it to be appended; None asks for nothing."""

    batch: RecordBatch
    match_seq_num: int | None
    fencing_token: str | None


def parse_append_input(raw: bytes) -> AppendInput:
    """Decode and check a protobuf `s2.v1.AppendInput`, in the quickest way that fits it."""
    return parse_quickly(raw, len(raw)) or parse_plain(raw)


def parse_quickly(raw: bytes, plain_max: int) -> AppendInput | None:
    """The same; None if more than `plain_max` bytes would have to be walked through in Python.

    What serializers write is walked through by compiled code. Everything else costs a microsecond per
    field, and a client may send millions of them.
    """
    record = scan_single(raw)
    if record is not None and record.end == len(raw):
        check_metered(record.metered)
        return AppendInput(RecordBatch(1, record.metered, (), record), None, None)
    if plain_max < len(raw) and _has_many_parts(raw):
        return None
    scanned = record or _scan_compiled(raw)
    if scanned is not None:
        walked = len(raw) if scanned.nameless() else len(raw) - scanned.end
        if walked > plain_max:
            return None
        if parsed := parse_scanned(raw, scanned):
            return parsed
    return parse_plain(raw) if len(raw) <= plain_max else None


def parse_plain(raw: bytes) -> AppendInput:
    """Decode and check any legal encoding."""
    records, match, token = _parse_fields(raw, 0)
    return AppendInput(validate(records), match, token)


def parse_scanned(raw: bytes, scanned: SingleRecord | ScannedRecords) -> AppendInput | None:
    """Check records that were scanned, and what follows them; None if that is more records."""
    if scanned.end == len(raw):
        return AppendInput(_validate_scanned(raw, scanned), None, None)
    others, match, token = _parse_fields(raw, scanned.end)
    return None if others else AppendInput(_validate_scanned(raw, scanned), match, token)


def _has_many_parts(raw: bytes) -> bool:
    twin = compiled()
    if twin is None or len(raw) <= FEW_PARTS_BYTES:
        return False
    return twin.count_parts(raw, PARTS_MAX) > PARTS_MAX


def _scan_compiled(raw: bytes) -> ScannedRecords | None:
    twin = compiled()
    return twin.scan(raw) if twin is not None else None


def _validate_scanned(raw: bytes, scanned: SingleRecord | ScannedRecords) -> RecordBatch:
    """A batch of records whose encoding was checked; a nameless header needs a closer look."""
    check_metered(scanned.metered)  # first: so many headers need not be looked at one by one
    commands: tuple[Command, ...] = ()
    if nameless := scanned.nameless():
        for at, start, end in nameless:
            # Counted first: hundreds of thousands need not become objects to be refused.
            tags = (tag for tag, _, _ in fields(raw, start, end))
            check_lone_header(at, sum(tag == APPEND_HEADERS for tag in tags))
        found = (command_of(at, parse_record(raw, start, end)) for at, start, end in nameless)
        commands = tuple(command for command in found if command is not None)
    return RecordBatch(scanned.count, scanned.metered, commands, scanned)


def _parse_fields(raw: bytes, at: int) -> tuple[list[Record], int | None, str | None]:
    """Records, match_seq_num and fencing token from `raw[at:]`."""
    records: list[Record] = []
    match: int | None = None
    token: str | None = None
    for tag, value, end in fields(raw, at, len(raw)):
        if tag == RECORDS:
            # Before the next is parsed: a flood of empty records must not cost their parsing.
            check_count(len(records) + 1)
            records.append(parse_record(raw, value, end))
        elif tag == MATCH_SEQ_NUM:
            match = value
        elif tag == FENCING_TOKEN:
            token = _decode_token(raw[value:end])
    if token is not None:
        parse_token(token, "fencing token")
    return records, match, token


def _decode_token(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedError(f"fencing token {raw[:64]!r} is not UTF-8") from None
