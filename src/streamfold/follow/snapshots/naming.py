"""How snapshots outside the stream are named, and what is in their blobs.

| naming | key below the prefix | content |
|---|---|---|
| `streamfold` | cursor in 20 digits, dot, codec | see `container.py`: a description and the state |
| `plain` | cursor, dot, codec: `1000.json` | the state alone, for programs without this library |

Readers know both. A naming of your own is a class below and a line in `NAMINGS`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Final

from streamfold.errors import InvalidError
from streamfold.follow.encoding import container
from streamfold.follow.encoding.container import Description, Unpacked

if TYPE_CHECKING:
    from streamfold.follow.snapshots.snapshot_store import SnapshotInfo

#: Digits of a cursor: as many as a 64-bit number has, so that keys sort as numbers do.
_DIGITS: Final = 20
_PADDED: Final = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z0-9_-]+)")
_PLAIN: Final = re.compile(rf"(0|[1-9][0-9]{{0,{_DIGITS - 2}}})\.([a-z0-9_-]+)")


class Naming(ABC):
    """One way of naming blobs of snapshots, and of packing them."""

    name: str

    @abstractmethod
    def key(self, cursor: int, codec: str) -> str:
        """The key of a snapshot, below the prefix."""

    @abstractmethod
    def parse(self, key: str) -> tuple[int, str] | None:
        """Cursor and codec that a key names; None if it is not one of this naming."""

    @abstractmethod
    def pack(self, pieces: Iterable[bytes | memoryview], described: Description) -> bytes:
        """The blob of a snapshot; size and digest of the description are worked out here."""

    @abstractmethod
    async def unpack(
        self, info: SnapshotInfo, blob: AsyncIterator[bytes], on_bytes: Callable[[int], None]
    ) -> Unpacked:
        """Read a blob to its end and check it as far as its form allows."""


class ContainerNaming(Naming):
    """Streamfold's own: a damaged or misplaced blob is recognised."""

    name = "streamfold"

    def key(self, cursor: int, codec: str) -> str:
        return f"{cursor:0{_DIGITS}d}.{codec}"

    def parse(self, key: str) -> tuple[int, str] | None:
        match = _PADDED.fullmatch(key)
        return (int(match[1]), match[2]) if match else None

    def pack(self, pieces: Iterable[bytes | memoryview], described: Description) -> bytes:
        return container.pack(pieces, described)

    async def unpack(
        self, info: SnapshotInfo, blob: AsyncIterator[bytes], on_bytes: Callable[[int], None]
    ) -> Unpacked:
        return await container.unpack(info.name, blob, on_bytes)


class PlainNaming(Naming):
    """The state as it is, under its cursor: only the codec can detect damage."""

    name = "plain"

    def key(self, cursor: int, codec: str) -> str:
        return f"{cursor}.{codec}"

    def parse(self, key: str) -> tuple[int, str] | None:
        match = _PLAIN.fullmatch(key)
        return (int(match[1]), match[2]) if match else None

    def pack(self, pieces: Iterable[bytes | memoryview], described: Description) -> bytes:
        return b"".join(pieces)

    async def unpack(
        self, info: SnapshotInfo, blob: AsyncIterator[bytes], on_bytes: Callable[[int], None]
    ) -> Unpacked:
        pieces, size = deque[bytes](), 0
        async for piece in blob:
            pieces.append(piece)
            size += len(piece)
            on_bytes(size)
        described = Description.of(info.name, info.cursor, info.codec, info.created_at)
        return Unpacked(info.name, described, pieces)


CONTAINER: Final = ContainerNaming()
PLAIN: Final = PlainNaming()
#: All that readers know, and writers may choose, by name.
NAMINGS: Final[dict[str, Naming]] = {naming.name: naming for naming in (CONTAINER, PLAIN)}


def find_naming(name: str) -> Naming:
    """The naming that a caller names, or InvalidError with the known names."""
    if name not in NAMINGS:
        raise InvalidError(f"snapshot naming {name!r} is unknown: use {' or '.join(NAMINGS)}")
    return NAMINGS[name]
