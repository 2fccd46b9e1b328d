"""Decodes pgoutput version 1, PostgreSQL's logical replication protocol, without I/O or state.

Version 1 sends whole transactions at their commit: `Begin`, the changes in order, `Commit`. Values are
in PostgreSQL's text form.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, TypeAlias

from streamfold.errors import MalformedError

#: A position in the write-ahead log, in bytes from its start.
Lsn = NewType("Lsn", int)
#: The position before everything.
LSN_ZERO: Final = Lsn(0)

#: Microseconds from 1970 to 2000, where PostgreSQL's clock starts.
EPOCH_US: Final = 946_684_800_000_000


class Unchanged(Enum):
    """A large value that an update did not change, and that PostgreSQL therefore omits."""

    TOAST = "unchanged"


UNCHANGED: Final = Unchanged.TOAST
Value: TypeAlias = bytes | Unchanged | None
Row: TypeAlias = tuple[Value, ...]


def lsn_text(lsn: int) -> str:
    """Format a position as PostgreSQL does, for example `0/16B3748`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> Lsn:
    """Parse a position such as `0/16B3748`. Raises MalformedError for anything else."""
    high, slash, low = text.partition("/")
    try:
        lsn = (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        lsn = -1
    if not slash or lsn < 0 or len(high) > 8 or len(low) > 8:
        raise MalformedError(f"{text!r} is not a position in the log: write it as in 0/16B3748")
    return Lsn(lsn)


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a transaction that was committed at `commit_lsn`."""

    commit_lsn: Lsn
    #: Microseconds since 1970.
    commit_time: int
    xid: int

    @property
    def milliseconds(self) -> int:
        """The commit time in ms since the Unix epoch; 1970 if a wrong clock is before that."""
        return max(0, self.commit_time // 1000)


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transaction."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a published table."""

    name: str
    type_oid: int
    modifier: int
    #: Part of the replica identity.
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """The columns of a table, sent before its first change and after each change of its columns."""

    id: int
    schema: str
    name: str
    #: Replica identity: d default, n nothing, f full, i index.
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Insert:
    relation: int
    new: Row


@dataclass(frozen=True, slots=True)
class Update:
    """An updated row. `key` is sent only if the key changed, `old` only with replica identity full."""

    relation: int
    key: Row | None
    old: Row | None
    new: Row


@dataclass(frozen=True, slots=True)
class Delete:
    """A deleted row: either `key` or, with replica identity full, `old`."""

    relation: int
    key: Row | None
    old: Row | None


@dataclass(frozen=True, slots=True)
class Truncate:
    relations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Other:
    """A message that changes no row: a type, an origin or an application's message."""

    kind: str


Event: TypeAlias = Begin | Commit | Relation | Insert | Update | Delete | Truncate | Other
_U16, _I32, _U32 = struct.Struct(">H"), struct.Struct(">i"), struct.Struct(">I")
_BEGIN, _COMMIT = struct.Struct(">QqI"), struct.Struct(">BQQq")
_NULL, _TEXT, _UNCHANGED = ord("n"), ord("t"), ord("u")
_OTHERS = {"Y", "O", "M"}


def decode_message(payload: bytes) -> Event:
    """Decode one message. Raises MalformedError if it is truncated, too long or of an unknown kind."""
    kind = payload[:1].decode("latin-1")
    if kind in _OTHERS:
        return Other(kind)
    decode = _DECODERS.get(kind)
    if decode is None:
        raise MalformedError(f"pgoutput message of unknown kind {kind!r}: it is not of version 1")
    try:
        event, end = decode(payload)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise MalformedError(f"pgoutput message {kind!r} cannot be decoded: {error}") from None
    if end != len(payload):
        raise MalformedError(
            f"pgoutput message {kind!r} has {len(payload)} bytes, {end} were expected"
        )
    return event


def _begin(payload: bytes) -> tuple[Event, int]:
    lsn, moment, xid = _BEGIN.unpack_from(payload, 1)
    return Begin(Lsn(lsn), moment + EPOCH_US, xid), 1 + _BEGIN.size


def _commit(payload: bytes) -> tuple[Event, int]:
    _, lsn, end, moment = _COMMIT.unpack_from(payload, 1)
    return Commit(Lsn(lsn), Lsn(end), moment + EPOCH_US), 1 + _COMMIT.size


def _relation(payload: bytes) -> tuple[Event, int]:
    (number,) = _U32.unpack_from(payload, 1)
    schema, at = _text(payload, 5)
    name, at = _text(payload, at)
    identity = chr(payload[at])
    (count,) = _U16.unpack_from(payload, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = payload[at]
        column, at = _text(payload, at + 1)
        (oid,), (modifier,) = _U32.unpack_from(payload, at), _I32.unpack_from(payload, at + 4)
        at += 8
        columns.append(RelationColumn(column, oid, modifier, bool(flags & 1)))
    # The system catalog has an empty name here.
    return Relation(number, schema or "pg_catalog", name, identity, tuple(columns)), at


def _insert(payload: bytes) -> tuple[Event, int]:
    (number,) = _U32.unpack_from(payload, 1)
    _expect(payload, 5, "N")
    new, at = _row(payload, 6)
    return Insert(number, new), at


def _update(payload: bytes) -> tuple[Event, int]:
    (number,) = _U32.unpack_from(payload, 1)
    images, at = _old_images(payload, 5)
    _expect(payload, at, "N")
    new, at = _row(payload, at + 1)
    return Update(number, *images, new), at


def _delete(payload: bytes) -> tuple[Event, int]:
    (number,) = _U32.unpack_from(payload, 1)
    images, at = _old_images(payload, 5)
    if images == (None, None):
        raise ValueError("a delete has neither a key nor a row")
    return Delete(number, *images), at


def _truncate(payload: bytes) -> tuple[Event, int]:
    (count,) = _U32.unpack_from(payload, 1)
    relations = struct.unpack_from(f">{count}I", payload, 6)
    return Truncate(relations), 6 + 4 * count


def _old_images(payload: bytes, at: int) -> tuple[tuple[Row | None, Row | None], int]:
    kind = chr(payload[at])
    if kind not in "KO":
        return (None, None), at
    row, at = _row(payload, at + 1)
    return ((row, None) if kind == "K" else (None, row)), at


def _row(payload: bytes, at: int) -> tuple[Row, int]:
    (count,) = _U16.unpack_from(payload, at)
    at += 2
    values: list[Value] = []
    for _ in range(count):
        kind = payload[at]
        at += 1
        if kind == _TEXT:
            (size,) = _U32.unpack_from(payload, at)
            start, at = at + 4, at + 4 + size
            if at > len(payload):
                raise ValueError("a value is cut off")
            values.append(payload[start:at])
        elif kind == _NULL:
            values.append(None)
        elif kind == _UNCHANGED:
            values.append(UNCHANGED)
        else:
            raise ValueError(f"a value has the unknown form {chr(kind)!r}")
    return tuple(values), at


def _text(payload: bytes, at: int) -> tuple[str, int]:
    end = payload.index(0, at)
    return payload[at:end].decode(), end + 1


def _expect(payload: bytes, at: int, kind: str) -> None:
    if chr(payload[at]) != kind:
        raise ValueError(f"expected {kind!r} at byte {at}")


_DECODERS: Final = {
    "B": _begin,
    "C": _commit,
    "R": _relation,
    "I": _insert,
    "U": _update,
    "D": _delete,
    "T": _truncate,
}
