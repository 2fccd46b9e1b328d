"""Reads stored payloads as records, or as byte ranges that can be sent unchanged."""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from streamfold import _native
from streamfold._native import CodecError, Index
from streamfold.errors import DataCorruptError, MalformedError
from streamfold.model.records import Header, SequencedRecord

#: Message templates by fault code.
_MESSAGES: Final = {
    "varint": "the number at byte {} is cut off or longer than {} bytes",
    "tag": "tag {} at byte {} has an illegal field number",
    "cut_off": "{} bytes are announced at byte {}, {} are left",
    "kind": "tag {} before byte {} is not allowed there",
    "short": "the field before byte {} is cut off",
    "not_record": "tag {} before byte {} does not start a record",
    "gap": "record {} has seq_num {}, not {}",
    "unsigned": "seq_num {} does not fit a signed column",
    "large": "{} bytes are too many to be decoded at once: at most 2 GiB are possible",
    "offsets": "row {} is not within its column",
}


def malformed(error: CodecError) -> MalformedError:
    """Return the error for undecodable bytes."""
    code, *fields = error.args
    return MalformedError(_MESSAGES[code].format(*fields))


__all__ = ["Contents", "Index", "contents", "decode", "measure", "write_json"]


class Contents(NamedTuple):
    """The records of a payload that are not commands."""

    seq_nums: list[int]
    bodies: list[bytes]


def decode(payload: bytes | memoryview) -> list[SequencedRecord]:
    """Decode the records of a stored payload."""
    try:
        seq_nums, timestamps, ends, names, values, bodies = _native.decode(payload)
    except CodecError as error:
        raise _corrupt(payload, error) from error
    if names:
        every = list(map(Header, names, values))
        headers = [tuple(every[start:end]) for start, end in pairwise([0, *ends])]
    else:
        headers = [()] * len(bodies)
    return list(map(SequencedRecord, seq_nums, timestamps, headers, bodies))  # type: ignore[arg-type]


def contents(payload: bytes | memoryview) -> Contents:
    """Locate a stored payload's records that are not commands, and their bodies."""
    try:
        return Contents(*_native.contents(payload))
    except CodecError as error:
        raise _corrupt(payload, error) from error


def measure(payload: bytes | memoryview) -> Index:
    """Locate all records of a stored payload without decoding them."""
    try:
        return _native.measure(payload)
    except CodecError as error:
        raise _corrupt(payload, error) from error


def write_json(payload: bytes | memoryview, *, base64: bool) -> bytes:
    """Return a stored payload's records as JSON array elements, joined by commas.

    Names, values and bodies are base64, or text with invalid UTF-8 replaced.
    """
    try:
        return _native.write_records(payload, base64)
    except CodecError as error:
        raise _corrupt(payload, error) from error


def _corrupt(payload: bytes | memoryview, error: CodecError) -> DataCorruptError:
    return DataCorruptError(
        f"a stored payload of {len(payload)} bytes cannot be read: {malformed(error).message}"
    )
