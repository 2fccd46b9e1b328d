"""Stores and lists snapshots: in named blobs of a snapshot store, or in the stream.

| naming | key below the prefix | content |
|---|---|---|
| `streamfold` | cursor in 20 digits, dot, codec | see `container.py`: a description and the state |
| `plain` | cursor, dot, codec: `1000.json` | the state alone, for programs without this library |

Readers understand both. To add a naming, write a class below and add it to `NAMINGS`.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from streamfold.backoff import Backoff
from streamfold.errors import InvalidError
from streamfold.follow.clients.client import StreamClient
from streamfold.follow.clients.feed import Feed
from streamfold.follow.encoding import container
from streamfold.follow.encoding.assembly import PartialSnapshot, SnapshotAssembly
from streamfold.follow.encoding.codecs import Codec
from streamfold.follow.encoding.container import Description, UnpackedBlob
from streamfold.follow.encoding.record_forms import HEADERS, RecordForm, form_of
from streamfold.follow.errors import SnapshotCorruptError, SnapshotUnsupportedError

#: Digits of a padded cursor: as many as a 64-bit number has, so that keys sort numerically.
_DIGITS: Final = 20
_PADDED: Final = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z0-9_-]+)")
_PLAIN: Final = re.compile(rf"(0|[1-9][0-9]{{0,{_DIGITS - 2}}})\.([a-z0-9_-]+)")
#: Codec names appear in keys, headers, content types and a description of limited length.
_CODEC_NAME: Final = re.compile(r"[a-z0-9_-]{1,40}")
S = TypeVar("S")


class Naming(ABC):
    """A scheme for naming and packing snapshot blobs."""

    name: str

    @abstractmethod
    def key(self, cursor: int, codec: str) -> str:
        """Return a snapshot's key below the prefix."""

    @abstractmethod
    def parse(self, key: str) -> tuple[int, str] | None:
        """Return the cursor and codec in a key, or None if the key does not follow this naming."""

    @abstractmethod
    def pack(self, pieces: Iterable[bytes | memoryview], described: Description) -> bytes:
        """Return a snapshot's blob, with the description's size and digest filled in."""

    @abstractmethod
    async def unpack(
        self, info: SnapshotInfo, blob: AsyncIterator[bytes], on_bytes: Callable[[int], None]
    ) -> UnpackedBlob:
        """Read a blob to its end and verify it to the extent that its format allows."""


class ContainerNaming(Naming):
    """Streamfold's own naming, which detects damaged and misplaced blobs."""

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
    ) -> UnpackedBlob:
        return await container.unpack(info.name, blob, on_bytes)


class PlainNaming(Naming):
    """The bare state under its cursor. Only the codec can detect damage."""

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
    ) -> UnpackedBlob:
        pieces, size = deque[bytes](), 0
        async for piece in blob:
            pieces.append(piece)
            size += len(piece)
            on_bytes(size)
        described = Description.of(info.name, info.cursor, info.codec, info.created_at)
        return UnpackedBlob(info.name, described, pieces)


CONTAINER: Final = ContainerNaming()
PLAIN: Final = PlainNaming()
#: Every naming that readers understand and writers may choose, by name.
NAMINGS: Final[dict[str, Naming]] = {naming.name: naming for naming in (CONTAINER, PLAIN)}


def find_naming(name: str) -> Naming:
    """Return the naming called `name`. Raises InvalidError, which lists the known names."""
    if name not in NAMINGS:
        raise InvalidError(f"snapshot naming {name!r} is unknown: use {' or '.join(NAMINGS)}")
    return NAMINGS[name]


class Placement(enum.StrEnum):
    """Where a snapshot is stored: outside, in one record, or in frames."""

    EXTERNAL = "external"
    RECORD = "record"
    FRAMED = "framed"


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Everything known about a snapshot without reading it."""

    placement: Placement
    #: Blob key, or snapshot id if it is in the stream.
    name: str
    #: The state includes all records before this seq_num.
    cursor: int
    codec: str
    #: Bytes, or None while only the first record of a framed snapshot has been read.
    size: int | None
    #: Milliseconds since the Unix epoch.
    created_at: int
    #: How an external snapshot is named and packed: one of `NAMINGS`.
    naming: str = CONTAINER.name

    def __str__(self) -> str:
        return f"{self.placement} snapshot {self.name}"


class SnapshotStore(ABC):
    """Stores snapshots outside the stream, as blobs packed by a `Naming`, one per cursor and codec.

    A store raises the blob errors of `streamfold.blob`: `BlobNotFoundError`,
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
        """Return all snapshots, newest (largest cursor) first."""

    @abstractmethod
    def load(self, info: SnapshotInfo) -> AsyncIterator[bytes]:
        """Yield the blob in pieces."""

    @abstractmethod
    async def save(self, cursor: int, codec: str, blob: bytes) -> bool:
        """Write the blob durably and atomically, only if there is none for this cursor yet.

        Returns False if another writer was first. Of racing callers, at most one gets True.
        """

    @abstractmethod
    async def delete(self, info: SnapshotInfo) -> None:
        """Delete the snapshot. Succeeds if it does not exist."""

    async def unpack(
        self, info: SnapshotInfo, on_bytes: Callable[[int], None] = lambda _: None
    ) -> UnpackedBlob:
        """Load a whole snapshot and verify it, calling `on_bytes` with the bytes read so far."""
        return await NAMINGS[info.naming].unpack(info, self.load(info), on_bytes)

    async def newest(self) -> SnapshotInfo | None:
        """Return the snapshot with the largest cursor, or None if there is none."""
        infos = await self.list()
        return infos[0] if infos else None


class Writing(enum.Enum):
    """Where a snapshot taker puts new snapshots."""

    EXTERNAL = "external"
    IN_STREAM = "in-stream"
    #: In the stream while the state fits one record, then outside if there is a store.
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Snapshots(Generic[S]):
    """Where to look for snapshots and where to put new ones.

    Readers always consider snapshots in the stream. With a `store`, they take the newest of both.
    """

    codec: Codec[S]
    store: SnapshotStore | None
    writing: Writing
    #: Form of new single-record snapshots in the stream.
    form: RecordForm = HEADERS
    #: Whether snapshots in the stream trim the records that they cover. Without trimming, readers
    #: search for the newest one from the tail backwards.
    trim: bool = True

    def __post_init__(self) -> None:
        if not _CODEC_NAME.fullmatch(self.codec.name):
            raise InvalidError(
                f"codec name {self.codec.name[:60]!r} must have 1 to 40 of a-z, 0-9, - and _: no "
                "reader would find snapshots of another name"
            )


#: Snapshots of any type of state. The codec limits what a state can hold.
AnySnapshots = Snapshots[Any]


async def list_snapshots(client: StreamClient, snapshots: AnySnapshots) -> list[SnapshotInfo]:
    """Return all whole snapshots, largest cursor first. Reads the stream to its tail."""
    outside = await snapshots.store.list() if snapshots.store else []
    inside = await list_in_stream(client, Backoff(attempts=3))
    return sorted(outside + inside, key=lambda info: info.cursor, reverse=True)


async def list_in_stream(client: StreamClient, backoff: Backoff) -> list[SnapshotInfo]:
    """Return the whole snapshots still in the stream, in order."""
    infos: list[SnapshotInfo] = []
    assembly = SnapshotAssembly(keep=False)
    tail = (await client.check_tail()).seq_num
    if not await client.peek(0, 1):
        return infos
    feed = Feed(client, 0, backoff)
    try:
        while feed.position < tail:
            for record in await feed.next() or ():
                if form_of(record) is None:
                    continue
                try:
                    parts = assembly.add(record)
                except (SnapshotCorruptError, SnapshotUnsupportedError):
                    continue  # not a whole snapshot
                if parts is not None:
                    infos.append(_info(parts))
    finally:
        await feed.close()
    return infos


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
