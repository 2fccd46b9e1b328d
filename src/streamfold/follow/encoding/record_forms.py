"""The forms of snapshot records: with headers, or plain JSON.

A plain one is a whole snapshot in one JSON object, without headers:

    {"type": "snapshot", "covers_before": 1000, "state": …}

It stands at its cursor, or right after the trim command that was appended with it; an object like
it anywhere else is a delta. A form of your own is a class below and a line in `FORMS`.

One with headers:

| header | in | value |
|---|---|---|
| `streamfold-snapshot` | every one | id of the snapshot, the same in all its records |
| `streamfold-version` | every one | `1` |
| `streamfold-index` | every one | index of the record in the snapshot, from 0 |
| `streamfold-covers-before` | index 0 | cursor: the state has all records before it; `here` = its own |
| `streamfold-codec` | index 0 | name of the codec |
| `streamfold-fold` | index 0, optional | name of the fold that made the state |
| `streamfold-final` | the last | number of records with a part of the state |
| `streamfold-bytes` | the last | length of the whole state |
| `streamfold-sha256` | the last | digest of the whole state, in hex |

Numbers are decimal. A snapshot in one record is both index 0 and the last, with `final` = 1 and the
state as its body. The last record of a framed one has no body: its index equals `final`. The first
one has no body either if its writer claimed the cursor before it encoded the state. Records with a
header `streamfold-snapshot` are never given to a fold, nor are command records.
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

#: Stands for the seq_num of the record itself, which its writer cannot know; and how a header says it.
HERE = -1
_HERE = "here"

#: Metered bytes that headers and overhead of one snapshot record, and of the trim command beside it,
#: never exceed: names and values above sum up to less than half of it.
FRAME_OVERHEAD = 1024
#: Every plain snapshot has this in its body; looking for it is all that other records cost.
_MARK: Final = b'"covers_before"'


@dataclass(frozen=True, slots=True)
class Opening:
    """What the record with index 0 says."""

    #: Writers may leave it open by HERE; once read, it is always a seq_num.
    covers_before: int
    codec: str
    fold: str | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """What the last record says."""

    count: int
    size: int
    #: None where the form has no digest.
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Frame:
    """One record of a snapshot."""

    snapshot: str
    index: int
    opening: Opening | None = None
    closing: Closing | None = None

    def record(self, body: bytes) -> Record:
        """The record to append for this frame."""
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
    """The id of the snapshot that the headers name; None without one."""
    for name, value in record.headers:
        if name == _ID:
            return bytes(value).decode("ascii", "replace")
    return None


def parse_frame(record: StreamRecord) -> Frame:
    """Read the headers of a snapshot record, or say which one breaks its rule."""
    found = {bytes(name): bytes(value) for name, value in record.headers}
    name = found[_ID].decode("ascii", "replace")
    version = found.get(_VERSION, b"none").decode("ascii", "replace")
    if version != str(VERSION):
        raise SnapshotUnsupportedError(
            label(name, record.seq_num),
            f"its version is {version} and this reader knows {VERSION}; update streamfold",
        )
    try:
        opening = _opening(found, record.seq_num)
        return Frame(name, _number(found, _INDEX), opening, _closing(found))
    except (KeyError, ValueError) as error:
        raise SnapshotCorruptError(
            label(name, record.seq_num), f"header missing or malformed: {error}"
        ) from None


def label(snapshot: str, seq_num: int) -> str:
    """What messages call a snapshot in the stream."""
    return f"{snapshot} in the stream at {seq_num}"


def _opening(found: dict[bytes, bytes], seq_num: int) -> Opening | None:
    if _COVERS not in found:
        return None
    covers = seq_num if found[_COVERS] == _HERE.encode() else _number(found, _COVERS)
    fold = found[_FOLD].decode("ascii", "replace") if _FOLD in found else None
    return Opening(covers, found[_CODEC].decode("ascii"), fold)


def _closing(found: dict[bytes, bytes]) -> Closing | None:
    if _FINAL not in found:
        return None
    digest = found[_SHA256].decode("ascii")
    return Closing(_number(found, _FINAL), _number(found, _BYTES), digest)


def _number(found: dict[bytes, bytes], name: bytes) -> int:
    value = found[name]
    if not value.isdigit():
        raise ValueError(f"{name.decode()} {value[:40]!r} is not a number")
    return int(value)


class RecordForm(ABC):
    """One way of writing a snapshot record, and of recognising it."""

    name: str

    @abstractmethod
    def snapshot_of(self, record: StreamRecord) -> str | None:
        """The id of the snapshot that the record belongs to; None if it is not of this form."""

    @abstractmethod
    def parse(self, record: StreamRecord) -> Frame:
        """What a record of this form says; raises SnapshotCorruptError or SnapshotUnsupportedError."""

    @abstractmethod
    def state_of(self, record: StreamRecord) -> bytes:
        """The part of the state that a record of this form holds."""

    @abstractmethod
    def record(self, frame: Frame, state: bytes) -> Record:
        """The record of a snapshot that is whole in one record."""


class HeaderForm(RecordForm):
    """Streamfold's own: everything but the state is in headers."""

    name = "streamfold"

    def snapshot_of(self, record: StreamRecord) -> str | None:
        return snapshot_id(record)

    def parse(self, record: StreamRecord) -> Frame:
        return parse_frame(record)

    def state_of(self, record: StreamRecord) -> bytes:
        return record.body

    def record(self, frame: Frame, state: bytes) -> Record:
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

    def parse(self, record: StreamRecord) -> Frame:
        name = f"plain-{record.seq_num}"
        found = self._decode(record)
        if found is None or isinstance(found.state, msgspec.UnsetType):
            reason = "it is a JSON object of type snapshot without a field 'state'"
            raise SnapshotUnsupportedError(label(name, record.seq_num), reason)
        closing = Closing(1, len(bytes(found.state)), None)
        return Frame(name, 0, Opening(found.covers_before, "json"), closing)

    def state_of(self, record: StreamRecord) -> bytes:
        found = self._decode(record)
        return b"" if found is None or not found.state else bytes(found.state)

    def record(self, frame: Frame, state: bytes) -> Record:
        if frame.opening is None or frame.opening.codec != "json":
            raise InvalidError("a plain snapshot record holds JSON: use it with JsonCodec")
        plain = _Plain("snapshot", frame.opening.covers_before, msgspec.Raw(state))
        return Record(msgspec.json.encode(plain))

    def _decode(self, record: StreamRecord) -> _Plain | None:
        if record.headers or _MARK not in record.body:
            return None
        try:
            found = msgspec.json.decode(record.body, type=_Plain)
        except UNDECODABLE:
            return None
        at_cursor = record.seq_num - 1 <= found.covers_before <= record.seq_num
        return found if found.type == "snapshot" and at_cursor else None


HEADERS: Final = HeaderForm()
PLAIN: Final = PlainForm()
#: All that readers recognise, and writers may choose, by name.
FORMS: Final[dict[str, RecordForm]] = {shape.name: shape for shape in (HEADERS, PLAIN)}


def form_named(name: str) -> RecordForm:
    """The form that a caller names, or InvalidError with the known names."""
    if name not in FORMS:
        raise InvalidError(f"snapshot shape {name!r} is unknown: use {' or '.join(FORMS)}")
    return FORMS[name]


def form_of(record: StreamRecord) -> RecordForm | None:
    """The shape of a snapshot record; None for deltas and commands."""
    form: RecordForm = HEADERS if record.headers else PLAIN
    return form if form.snapshot_of(record) is not None else None


def may_be_snapshot(record: StreamRecord) -> bool:
    """Whether a look at the record is needed to know that it is a delta; False for most."""
    return bool(record.headers) or _MARK in record.body


def is_delta(record: StreamRecord) -> bool:
    """Whether the record is one for folds: neither of a snapshot nor a command."""
    headers = record.headers
    if len(headers) == 1 and not headers[0][0]:
        return False
    return form_of(record) is None
