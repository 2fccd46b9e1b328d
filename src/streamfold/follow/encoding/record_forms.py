"""Snapshot record forms: with headers, or plain JSON.

A plain record is a whole snapshot in one JSON object, without headers:

    {"type": "snapshot", "covers_before": 1000, "state": …}

It stands at its cursor, or right after the trim command appended with it. Such an object anywhere
else is a delta. To add a form, write a class below and add it to `FORMS`.

A record with headers:

| header | in records | value |
|---|---|---|
| `streamfold-snapshot` | all | snapshot id, the same in all its records |
| `streamfold-version` | all | `1` |
| `streamfold-index` | all | index of the record in the snapshot, from 0 |
| `streamfold-covers-before` | index 0 | cursor: the state has all records before it; `here` = its own |
| `streamfold-codec` | index 0 | codec name |
| `streamfold-fold` | index 0, optional | name of the fold that made the state |
| `streamfold-final` | last | number of records before this one; 1 for a single-record snapshot |
| `streamfold-bytes` | last | length of the whole state |
| `streamfold-sha256` | last | digest of the whole state, in hex |

Numbers are decimal. The record of a single-record snapshot is both index 0 and the last, with
`final` = 1 and the state as its body. A framed snapshot's last record has no body, and its index
equals `final`. The first one has no body either if its writer claimed the cursor before encoding the
state. Folds never receive records with a `streamfold-snapshot` header, nor command records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import msgspec

from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.model.records import Header, Record
from streamfold.undecodable import UNDECODABLE

VERSION = 1

_ID = b"streamfold-snapshot"
_VERSION = b"streamfold-version"
_INDEX = b"streamfold-index"
_COVERS = b"streamfold-covers-before"
_CODEC = b"streamfold-codec"
_FOLD = b"streamfold-fold"
_FINAL = b"streamfold-final"
_BYTES = b"streamfold-bytes"
_SHA256 = b"streamfold-sha256"

#: Stands for the record's own seq_num, which its writer cannot know. In headers, `here`.
HERE = -1
_HERE = "here"

#: Upper bound of the metered bytes for the headers and overhead of one snapshot record and its trim
#: command. The names and values above add up to less than half of it.
FRAME_OVERHEAD = 1024
#: Every plain snapshot contains this. For other records, only the search for it costs time.
_MARK: Final = b'"covers_before"'


@dataclass(frozen=True, slots=True)
class Opening:
    """The fields of the record with index 0."""

    #: Writers may leave it open with HERE. Once parsed, it is always a seq_num.
    covers_before: int
    codec: str
    fold: str | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """The fields of the last record."""

    count: int
    size: int
    #: None if the form has no digest.
    sha256: str | None


@dataclass(frozen=True, slots=True)
class SnapshotFrame:
    """One record of a snapshot."""

    snapshot: str
    index: int
    opening: Opening | None = None
    closing: Closing | None = None

    def record(self, body: bytes) -> Record:
        """Return the record to append for this frame."""
        headers = [(_ID, self.snapshot), (_VERSION, VERSION), (_INDEX, self.index)]
        if self.opening:
            covers = self.opening.covers_before
            headers += [(_COVERS, _HERE if covers == HERE else covers)]
            headers += [(_CODEC, self.opening.codec)]
            if self.opening.fold is not None:
                headers += [(_FOLD, self.opening.fold)]
        if self.closing:
            headers += [(_FINAL, self.closing.count), (_BYTES, self.closing.size)]
            headers += [(_SHA256, self.closing.sha256 or "")]
        return Record(body, tuple(Header(name, str(value).encode()) for name, value in headers))


def snapshot_id(record: StreamRecord) -> str | None:
    """Return the snapshot id in the record's headers, or None without one."""
    for name, value in record.headers:
        if name == _ID:
            return bytes(value).decode("ascii", "replace")
    return None


def parse_frame(record: StreamRecord) -> SnapshotFrame:
    """Parse a snapshot record's headers.

    Raises SnapshotCorruptError for a missing or malformed header, and SnapshotUnsupportedError for
    another version.
    """
    headers = {bytes(name): bytes(value) for name, value in record.headers}
    name = headers[_ID].decode("ascii", "replace")
    version = headers.get(_VERSION, b"none").decode("ascii", "replace")
    if version != str(VERSION):
        raise SnapshotUnsupportedError(
            label(name, record.seq_num),
            f"its version is {version} and this reader knows {VERSION}; update streamfold",
        )
    try:
        opening = _opening(headers, record.seq_num)
        return SnapshotFrame(name, _number(headers, _INDEX), opening, _closing(headers))
    except (KeyError, ValueError) as error:
        raise SnapshotCorruptError(
            label(name, record.seq_num), f"header missing or malformed: {error}"
        ) from None


def label(snapshot: str, seq_num: int) -> str:
    """Return the name of a snapshot in the stream, for messages."""
    return f"{snapshot} in the stream at {seq_num}"


def _opening(headers: dict[bytes, bytes], seq_num: int) -> Opening | None:
    if _COVERS not in headers:
        return None
    covers = seq_num if headers[_COVERS] == _HERE.encode() else _number(headers, _COVERS)
    fold = headers[_FOLD].decode("ascii", "replace") if _FOLD in headers else None
    return Opening(covers, headers[_CODEC].decode("ascii"), fold)


def _closing(headers: dict[bytes, bytes]) -> Closing | None:
    if _FINAL not in headers:
        return None
    digest = headers[_SHA256].decode("ascii")
    return Closing(_number(headers, _FINAL), _number(headers, _BYTES), digest)


def _number(headers: dict[bytes, bytes], name: bytes) -> int:
    value = headers[name]
    if not value.isdigit():
        raise ValueError(f"{name.decode()} {value[:40]!r} is not a number")
    return int(value)


class RecordForm(ABC):
    """A format for writing and recognising snapshot records."""

    name: str

    @abstractmethod
    def snapshot_of(self, record: StreamRecord) -> str | None:
        """Return the id of the record's snapshot, or None if the record is not of this form."""

    @abstractmethod
    def parse(self, record: StreamRecord) -> SnapshotFrame:
        """Parse a record of this form. Raises SnapshotCorruptError or SnapshotUnsupportedError."""

    @abstractmethod
    def state_of(self, record: StreamRecord) -> bytes:
        """Return the part of the state in a record of this form."""

    @abstractmethod
    def record(self, frame: SnapshotFrame, state: bytes) -> Record:
        """Return the record of a single-record snapshot."""


class HeaderForm(RecordForm):
    """Streamfold's own form: everything except the state is in headers."""

    name = "streamfold"

    def snapshot_of(self, record: StreamRecord) -> str | None:
        return snapshot_id(record)

    def parse(self, record: StreamRecord) -> SnapshotFrame:
        return parse_frame(record)

    def state_of(self, record: StreamRecord) -> bytes:
        return record.body

    def record(self, frame: SnapshotFrame, state: bytes) -> Record:
        return frame.record(state)


class _Plain(msgspec.Struct):
    type: str
    covers_before: int
    state: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class PlainForm(RecordForm):
    """One JSON object with the cursor and the state, for readers and writers without this library."""

    name = "plain"

    def snapshot_of(self, record: StreamRecord) -> str | None:
        return None if self._decode(record) is None else f"plain-{record.seq_num}"

    def parse(self, record: StreamRecord) -> SnapshotFrame:
        name = f"plain-{record.seq_num}"
        plain = self._decode(record)
        if plain is None or isinstance(plain.state, msgspec.UnsetType):
            reason = "it is a JSON object of type snapshot without a field 'state'"
            raise SnapshotUnsupportedError(label(name, record.seq_num), reason)
        closing = Closing(1, len(bytes(plain.state)), None)
        return SnapshotFrame(name, 0, Opening(plain.covers_before, "json"), closing)

    def state_of(self, record: StreamRecord) -> bytes:
        plain = self._decode(record)
        return b"" if plain is None or not plain.state else bytes(plain.state)

    def record(self, frame: SnapshotFrame, state: bytes) -> Record:
        if frame.opening is None or frame.opening.codec != "json":
            raise InvalidError("a plain snapshot record holds JSON: use it with JsonCodec")
        plain = _Plain("snapshot", frame.opening.covers_before, msgspec.Raw(state))
        return Record(msgspec.json.encode(plain))

    def _decode(self, record: StreamRecord) -> _Plain | None:
        if record.headers or _MARK not in record.body:
            return None
        try:
            plain = msgspec.json.decode(record.body, type=_Plain)
        except UNDECODABLE:
            return None
        at_cursor = record.seq_num - 1 <= plain.covers_before <= record.seq_num
        return plain if plain.type == "snapshot" and at_cursor else None


HEADERS: Final = HeaderForm()
PLAIN: Final = PlainForm()
#: Every form that readers recognise and writers may choose, by name.
FORMS: Final[dict[str, RecordForm]] = {shape.name: shape for shape in (HEADERS, PLAIN)}


def form_named(name: str) -> RecordForm:
    """Return the form called `name`. Raises InvalidError, which lists the known names."""
    if name not in FORMS:
        raise InvalidError(f"snapshot shape {name!r} is unknown: use {' or '.join(FORMS)}")
    return FORMS[name]


def form_of(record: StreamRecord) -> RecordForm | None:
    """Return a snapshot record's form, or None for deltas and commands."""
    form: RecordForm = HEADERS if record.headers else PLAIN
    return form if form.snapshot_of(record) is not None else None


def may_be_snapshot(record: StreamRecord) -> bool:
    """Return whether the record must be inspected to rule out a snapshot. False for most records."""
    return bool(record.headers) or _MARK in record.body


def is_delta(record: StreamRecord) -> bool:
    """Return whether folds get the record, because it is neither a snapshot record nor a command."""
    headers = record.headers
    if len(headers) == 1 and not headers[0][0]:
        return False
    return form_of(record) is None
