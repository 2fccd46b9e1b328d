"""Snapshot records: how they differ from deltas, and what their headers say.

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
one has no body either if its writer claimed the cursor before it encoded the state.
Records with a header `streamfold-snapshot` are never given to a fold, nor are command records.
`record_forms.py` has the other form of a snapshot record, without headers.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamfold.follow.clients.client import StreamRecord
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError
from streamfold.model.records import Header, Record

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
