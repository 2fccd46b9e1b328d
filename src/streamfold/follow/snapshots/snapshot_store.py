"""Where snapshots are kept: outside the stream behind a seam, under names, or in the stream.

| naming | key below the prefix | content |
|---|---|---|
| `streamfold` | cursor in 20 digits, dot, codec | see `container.py`: a description and the state |
| `plain` | cursor, dot, codec: `1000.json` | the state alone, for programs without this library |

Readers know both. A naming of your own is a class below and a line in `NAMINGS`.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamClient
from streamfold.follow.clients.feed import Backoff, Feed
from streamfold.follow.encoding import container
from streamfold.follow.encoding.assembly import Assembly, PartialSnapshot
from streamfold.follow.encoding.codecs import Codec
from streamfold.follow.encoding.container import Description, Unpacked
from streamfold.follow.encoding.record_forms import HEADERS, RecordForm, form_of
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError

#: Digits of a cursor: as many as a 64-bit number has, so that keys sort as numbers do.
_DIGITS: Final = 20
_PADDED: Final = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z0-9_-]+)")
_PLAIN: Final = re.compile(rf"(0|[1-9][0-9]{{0,{_DIGITS - 2}}})\.([a-z0-9_-]+)")
#: Names of codecs: part of keys, headers and content types, and of a description of limited length.
_CODEC_NAME: Final = re.compile(r"[a-z0-9_-]{1,40}")
S = TypeVar("S")


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


class Placement(enum.StrEnum):
    """Where a snapshot is: outside, in one record, or in frames."""

    EXTERNAL = "external"
    RECORD = "record"
    FRAMED = "framed"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What is known of a snapshot without reading it."""

    placement: Placement
    #: Key of a blob, or id of a snapshot in the stream.
    name: str
    #: The state has all records before it.
    cursor: int
    codec: str
    #: Bytes; None while only the beginning of a framed one was looked at.
    size: int | None
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: Of an external one: how it is named and packed: one of `NAMINGS`.
    naming: str = CONTAINER.name

    def __str__(self) -> str:
        return f"{self.placement} snapshot {self.name}"


class SnapshotStore(ABC):
    """Snapshots outside the stream, as blobs in the form of a `Naming`, one per cursor and codec.

    A store raises `BlobError`s as `streamfold.blob` has them: `BlobNotFoundError`,
    `BlobUnavailableError`, `BlobOutcomeUnknownError`.
    """

    #: Whether snapshots can be deleted.
    prunable: bool = True

    @property
    def naming(self) -> Naming:
        """How the blobs of new snapshots are packed."""
        return CONTAINER

    @abstractmethod
    async def list(self) -> list[SnapshotInfo]:
        """All snapshots, the newest, which has the largest cursor, first."""

    @abstractmethod
    def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        """Yield the blob in pieces."""

    @abstractmethod
    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        """Write the blob durably, whole or not at all, and only if this cursor has none.

        False means that another was first; of racing callers at most one gets True.
        """

    @abstractmethod
    async def delete(self, info: SnapshotInfo) -> None:
        """Remove the snapshot; a missing one is fine."""

    async def unpack(
        self, info: SnapshotInfo, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Unpacked:
        """Load a snapshot whole and check it; `on_bytes` is called with the bytes read so far."""
        return await NAMINGS[info.naming].unpack(info, self.load(info), on_bytes)

    async def newest(self) -> SnapshotInfo | None:
        """The snapshot with the largest cursor."""
        found = await self.list()
        return found[0] if found else None


class Writing(enum.Enum):
    """Where a snapshot taker puts new snapshots."""

    EXTERNAL = "external"
    IN_STREAM = "in-stream"
    #: In the stream while the state fits one record; beyond that outside, if a store is given.
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Snapshots(Generic[S]):
    """Where to look for snapshots, and where to put them.

    Readers always know snapshots in the stream; with a `store`, they take the newest of both.
    """

    codec: Codec[S]
    store: SnapshotStore | None
    writing: Writing
    #: Of new snapshots in one record of the stream.
    form: RecordForm = HEADERS
    #: Whether those in the stream trim the records that they cover. Without that, readers look for the
    #: newest one from the tail backwards.
    trim: bool = True

    def __post_init__(self) -> None:
        if not _CODEC_NAME.fullmatch(self.codec.name):
            raise InvalidError(
                f"codec name {self.codec.name[:60]!r} must have 1 to 40 of a-z, 0-9, - and _: no "
                "reader would find snapshots of another name"
            )


#: For folds whose state is of any type; the codec decides what it can hold.
AnySnapshots = Snapshots[Any]


async def list_snapshots(
    client: StreamClient, snapshots: AnySnapshots, backoff: Backoff | None = None
) -> list[SnapshotInfo]:
    """All whole snapshots, the one with the largest cursor first; reads the stream to its tail."""
    outside = await snapshots.store.list() if snapshots.store else []
    inside = await list_in_stream(client, backoff or Backoff(attempts=3))
    return sorted(outside + inside, key=lambda info: info.cursor, reverse=True)


async def list_in_stream(client: StreamClient, backoff: Backoff) -> list[SnapshotInfo]:
    """Whole snapshots that the stream still holds, in order."""
    found: list[SnapshotInfo] = []
    assembly = Assembly(keep=False)
    tail = (await client.check_tail()).seq_num
    if not await client.peek(0, 1):
        return found
    feed = Feed(client, 0, backoff)
    try:
        while feed.position < tail:
            for record in await feed.next() or ():
                if form_of(record) is None:
                    continue
                try:
                    parts = assembly.add(record)
                except (SnapshotCorruptError, SnapshotUnsupportedError):
                    continue  # not a whole one
                if parts is not None:
                    found.append(_info(parts))
    finally:
        await feed.close()
    return found


def _info(parts: PartialSnapshot) -> SnapshotInfo:
    placement = Placement.RECORD if parts.in_one_record else Placement.FRAMED
    return SnapshotInfo(
        placement,
        parts.snapshot,
        parts.opening.covers_before,
        parts.opening.codec,
        parts.size,
        parts.timestamp,
    )
