"""Where snapshots are kept: outside the stream behind a seam, or in the stream."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from streamfold.follow.encoding.codecs import Codec
from streamfold.follow.encoding.container import Unpacked
from streamfold.follow.encoding.record_forms import HEADERS, RecordForm
from streamfold.follow.snapshots.naming import CONTAINER, NAMINGS, Naming

S = TypeVar("S")


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
    #: Of an external one: how it is named and packed, see `naming.py`.
    naming: str = CONTAINER.name

    def __str__(self) -> str:
        return f"{self.placement} snapshot {self.name}"


class SnapshotStore(ABC):
    """Snapshots outside the stream, as blobs in the form of a `Naming`, one per cursor and codec.

    A store raises `BlobError`s as `streamfold.blob` has them: `BlobNotFoundError`,
    `BlobUnavailableError`, `BlobOutcomeUnknownError`.
    """

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
    """Where a snapshotter puts new snapshots."""

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


#: For folds whose state is of any type; the codec decides what it can hold.
AnySnapshots = Snapshots[Any]
