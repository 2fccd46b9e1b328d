"""The forms of snapshot records: with headers, as in `frames.py`, or plain JSON.

A plain one is a whole snapshot in one JSON object, without headers:

    {"type": "snapshot", "covers_before": 1000, "state": …}

It stands at its cursor, or right after the trim command that was appended with it; an object like it
anywhere else is a delta. A form of your own is a class below and a line in `FORMS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import msgspec

from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.encoding.frames import (
    Closing,
    Frame,
    Opening,
    label,
    parse_frame,
    snapshot_id,
)
from streamfold.follow.errors import SnapshotUnsupportedError
from streamfold.model.records import Record

#: Every plain snapshot has this in its body; looking for it is all that other records cost.
_MARK: Final = b'"covers_before"'


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
        except (msgspec.DecodeError, UnicodeDecodeError):
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
