"""Yjs updates: their lib0 frames, and which changes they carry. No I/O.

The encoding is version 1 of Yjs' update format. Only clocks matter here: pycrdt reads the content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pycrdt


class MalformedUpdateError(ValueError):
    """The bytes are not a sequence of framed Yjs updates."""


class _Reader:
    """Reads lib0's primitives from the start of some bytes to their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def ended(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise MalformedUpdateError("the update ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 70:
                raise MalformedUpdateError("a number has more than 64 bits")

    def sized(self) -> bytes:
        return self.take(self.number())

    def text(self) -> str:
        try:
            return self.sized().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise MalformedUpdateError("a text is not UTF-8") from None


def frame(update: bytes) -> bytes:
    """An update with its length before it."""
    size, prefix = len(update), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(prefix) + bytes([size]) + update


def unframed(body: bytes) -> list[bytes]:
    """The updates of a request, each of which Yjs can read."""
    reader, updates = _Reader(body), []
    while not reader.ended:
        update = reader.sized()
        try:
            pycrdt.merge_updates(update)
        except ValueError:
            raise MalformedUpdateError("a frame has no Yjs update in it") from None
        updates.append(update)
    return updates


def compacted(updates: Iterable[bytes]) -> bytes | None:
    """One update with the state of all, or None if some of them build on changes that are missing.

    Such changes would be lost: pycrdt encodes only what it could integrate.
    """
    document: pycrdt.Doc[Any] = pycrdt.Doc()
    named: dict[int, int] = {}
    for update in updates:
        document.apply_update(update)
        for client, clock in _clocks(update).items():
            named[client] = max(named.get(client, 0), clock)
    integrated = _state(document.get_state())
    if any(clock > integrated.get(client, 0) for client, clock in named.items()):
        return None
    return bytes(document.get_update())


def _state(vector: bytes) -> dict[int, int]:
    """The clock behind the last change of each client, from a state vector."""
    reader = _Reader(vector)
    return {reader.number(): reader.number() for _ in range(reader.number())}


def _clocks(update: bytes) -> dict[int, int]:
    """The clock behind the last change of each client that an update has or deletes."""
    reader = _Reader(update)
    clocks: dict[int, int] = {}
    for _ in range(reader.number()):
        structs, client, clock = reader.number(), reader.number(), reader.number()
        for _ in range(structs):
            clock += _struct_length(reader)
        clocks[client] = max(clocks.get(client, 0), clock)
    for _ in range(reader.number()):
        client = reader.number()
        for _ in range(reader.number()):
            end = reader.number() + reader.number()
            clocks[client] = max(clocks.get(client, 0), end)
    return clocks


def _struct_length(reader: _Reader) -> int:
    """How many clocks a struct takes; the reader moves behind it."""
    info = reader.take(1)[0]
    kind = info & 0x1F
    if kind in (0, 10):  # collected, skipped
        return reader.number()
    has_left, has_right = info & 0x80, info & 0x40
    for present in (has_left, has_right):
        if present:
            reader.number(), reader.number()  # an id: client, clock
    if not has_left and not has_right:
        if reader.number():  # the parent is a type of the document, by name
            reader.sized()
        else:
            reader.number(), reader.number()
        if info & 0x20:
            reader.sized()  # the key in the parent
    return _content_length(reader, kind)


def _content_length(reader: _Reader, kind: int) -> int:
    match kind:
        case 1:  # deleted
            return reader.number()
        case 2:  # JSON values, as texts
            count = reader.number()
            for _ in range(count):
                reader.sized()
            return count
        case 3 | 5:  # bytes, an embedded JSON value
            reader.sized()
        case 4:  # text, counted as JavaScript does
            return len(reader.text().encode("utf-16-le", "surrogatepass")) // 2
        case 6:  # a format: key and JSON value
            reader.sized(), reader.sized()
        case 7:  # a shared type; two of them have a name
            if reader.number() in (3, 5):
                reader.sized()
        case 8:  # values
            count = reader.number()
            for _ in range(count):
                _skip_value(reader)
            return count
        case 9:  # a document in the document
            reader.sized()
            _skip_value(reader)
        case _:
            raise MalformedUpdateError(f"content of kind {kind} is not known")
    return 1


def _skip_value(reader: _Reader) -> None:
    """Move behind one of lib0's values."""
    match reader.take(1)[0]:
        case 127 | 126 | 121 | 120:  # undefined, null, false, true
            pass
        case 125:  # integer: its sign is in the second bit of the first byte
            while reader.take(1)[0] & 0x80:
                pass
        case 124:
            reader.take(4)
        case 123 | 122:
            reader.take(8)
        case 119 | 116:  # text, bytes
            reader.sized()
        case 118:  # object
            for _ in range(reader.number()):
                reader.sized()
                _skip_value(reader)
        case 117:  # array
            for _ in range(reader.number()):
                _skip_value(reader)
        case kind:
            raise MalformedUpdateError(f"a value of kind {kind} is not known")
