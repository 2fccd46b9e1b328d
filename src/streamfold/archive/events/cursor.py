"""A sink's progress, in one small document beside the manifest, and the events still due.

    <folder>/events/<sink>.json

It is replaced only by compare-and-swap, so two processes that deliver for one sink notice each
other. It may lag behind the sent events but never lead: events that it does not cover are sent
again.

Nothing is queued. Events can be derived from the manifest as long as their artifacts are live, so
no crash between a commit and its events loses one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise

import msgspec

from streamfold.archive.events.event import Event, describe
from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.manifest.positions import format_time
from streamfold.blob import BlobChangedError, BlobStore
from streamfold.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ConflictError,
    DataCorruptError,
    InvalidError,
)
from streamfold.undecodable import UNDECODABLE

CURSOR_VERSION = 1
#: Folder of the cursors. Garbage collection never looks into it.
FOLDER = "events/"


class SinkPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The artifact whose event was delivered last."""

    archive_id: str | None
    commit_id: str | None
    kind: str
    epoch: int
    from_position: str | None
    to_position: str


class DueArtifact(msgspec.Struct, frozen=True):
    """An artifact to announce, and whether changes before it are missing."""

    artifact: Artifact
    gap: bool


def position_of(manifest: Manifest, artifact: Artifact) -> SinkPosition:
    """Return the position of a sink that has received the artifact's event."""
    return SinkPosition(
        archive_id=manifest.archive_id,
        commit_id=artifact.commit_id,
        kind=artifact.kind,
        epoch=artifact.epoch,
        from_position=artifact.from_position,
        to_position=artifact.to_position,
    )


def find_due(manifest: Manifest, position: SinkPosition | None) -> list[DueArtifact]:
    """Return the artifacts to announce after `position`, in order, or all live ones for None.

    If `position` is no longer live, announcing begins at the newest base, which is marked as a gap,
    unless the oldest live base of a later epoch is exactly at that position. Without a position,
    the sink may still have received events before its first cursor was stored, so the oldest base
    is a gap unless nothing ever preceded it.
    """
    artifacts = manifest.artifacts
    if position is None:
        return [DueArtifact(artifacts[0], artifacts[0].epoch > 1), *_linked(artifacts)]
    for index in range(len(artifacts) - 1, -1, -1):
        if position_of(manifest, artifacts[index]) == position:
            return list(_linked(artifacts[index:]))
    return _find_due_after_pruning(manifest, position)


def events_of(manifest: Manifest, due: list[DueArtifact], manifest_uri: str) -> Iterator[Event]:
    """Yield the events one by one. A long backlog takes no memory beyond the manifest's."""
    for item in due:
        yield describe(manifest, item.artifact, manifest_uri, gap=item.gap)


def _find_due_after_pruning(manifest: Manifest, position: SinkPosition) -> list[DueArtifact]:
    later = tuple(a for a in manifest.artifacts if a.epoch > position.epoch)
    same_archive = manifest.archive_id == position.archive_id
    # The last diff of an epoch ends where the next base begins, so nothing is missing between them.
    if same_archive and later and later[0].to_position == position.to_position:
        return [DueArtifact(later[0], False), *_linked(later)]
    newest = manifest.artifacts.index(manifest.base)
    return [DueArtifact(manifest.base, True), *_linked(manifest.artifacts[newest:])]


def _linked(artifacts: tuple[Artifact, ...]) -> Iterator[DueArtifact]:
    """Yield all but the first. A base that does not begin where its predecessor ends has a gap."""
    for before, after in pairwise(artifacts):
        yield DueArtifact(after, after.is_base and after.to_position != before.to_position)


class EventCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The document. `revision` grows with each write, so no two versions have the same bytes."""

    version: int = CURSOR_VERSION
    sink: str
    revision: int
    updated_at: str
    event_id: str
    #: `place` in the file.
    position: SinkPosition = msgspec.field(name="place")


class CursorFile:
    """One sink's cursor: the stored version, and deliveries since."""

    def __init__(self, blobs: BlobStore, sink: str, now: Callable[[], datetime]) -> None:
        self._blobs = blobs
        self._sink = sink
        self._key = cursor_key(sink)
        self._now = now
        # The stored cursor when it was last read or written.
        self._stored: EventCursor | None = None
        self._etag: str | None = None
        # Whether storage may differ from `_stored`.
        self._is_uncertain = True
        self._delivered: tuple[str, SinkPosition] | None = None

    @property
    def position(self) -> SinkPosition | None:
        """The last delivered position known to this process."""
        return self._delivered[1] if self._delivered else None

    def advance(self, event_id: str, position: SinkPosition) -> None:
        """Record a delivery. It becomes durable with the next `save`."""
        self._delivered = (event_id, position)

    async def settle(self) -> None:
        """Reconcile this process's cursor with the stored one. Called before anything is sent."""
        if self._is_uncertain:
            await self._look()
        await self.save()

    async def save(self) -> None:
        """Store the last delivery durably. Writes nothing if it is already stored."""
        if self._delivered is None or self._delivered == _delivered(self._stored):
            return
        event_id, position = self._delivered
        cursor = EventCursor(
            sink=self._sink,
            revision=self._stored.revision + 1 if self._stored else 1,
            updated_at=format_time(self._now()),
            event_id=event_id,
            position=position,
        )
        self._is_uncertain = True
        self._etag = await self._swap(_encode(cursor))
        self._stored, self._is_uncertain = cursor, False

    async def _swap(self, data: bytes) -> str:
        try:
            if self._etag is None:
                return await self._blobs.put_if_absent(self._key, data)
            return await self._blobs.put_if_match(self._key, data, self._etag)
        except (BlobChangedError, BlobExistsError, BlobNotFoundError):
            pass
        raise ConflictError(
            f"{self._key!r} was changed by another process, which delivers for sink "
            f"{self._sink!r} too: run one, or give them different names",
            code="event_cursor_conflict",
        )

    async def _look(self) -> None:
        cursor, etag = await self._read()
        # If unchanged, keep the deliveries since. Otherwise our own write has arrived after all, or
        # another process wrote: then storage decides.
        if cursor != self._stored:
            self._delivered = _delivered(cursor)
        self._stored, self._etag, self._is_uncertain = cursor, etag, False

    async def _read(self) -> tuple[EventCursor | None, str | None]:
        try:
            data, etag = await self._blobs.get_with_etag(self._key)
        except BlobNotFoundError:
            return None, None
        return _decode(self._key, data), etag


def cursor_key(sink: str) -> str:
    """Return the key of a sink's cursor. Raises InvalidError if the name is not a plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", sink):
        raise InvalidError(
            f"sink name {sink!r} must be 1 to 64 letters, digits, dots, dashes or underscores, and "
            "begin with a letter or digit"
        )
    return f"{FOLDER}{sink}.json"


def _delivered(cursor: EventCursor | None) -> tuple[str, SinkPosition] | None:
    return (cursor.event_id, cursor.position) if cursor else None


def _encode(cursor: EventCursor) -> bytes:
    return msgspec.json.format(msgspec.json.encode(cursor), indent=2) + b"\n"


def _decode(key: str, data: bytes) -> EventCursor:
    try:
        cursor = msgspec.json.decode(data, type=EventCursor)
    except UNDECODABLE as error:
        reason = str(error)
    else:
        if cursor.version <= CURSOR_VERSION:
            return cursor
        reason = f"its version is {cursor.version}, and {CURSOR_VERSION} is the newest supported"
    raise DataCorruptError(
        f"cursor {key!r} cannot be used ({reason}): restore it, or delete it to have everything "
        "that is live sent again",
        code="event_cursor_invalid",
    )
