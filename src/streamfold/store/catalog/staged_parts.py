"""Staged parts: a snapshot too large for one request is staged in parts, then published.

A part is its own blob, `parts/{stream id}/{time}-{random id}`, and not a snapshot yet. A part not
published within a day is deleted, and the number of parts per stream is limited. A stream that
reuses a name has another id, so it never gets the parts of the former stream.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from typing import Final, NamedTuple

from streamfold.blob.blob_store import BlobStore
from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    RetryLaterError,
    StorageFullError,
    StreamfoldError,
)
from streamfold.store.catalog.snapshots import READ_PIECE
from streamfold.store.engine.disk_space import DiskSpace, SpaceClaim, is_disk_full

logger = logging.getLogger(__name__)

#: Maximum bytes of one part, and of one request that publishes a whole snapshot.
PART_BYTES_MAX: Final = 128 << 20
#: Maximum bytes of a snapshot published in parts.
SNAPSHOT_BYTES_MAX: Final = 1 << 30
#: Maximum unpublished parts per stream, and their bytes: enough for a snapshot of the largest size
#: and another attempt at it.
STAGED_PARTS_MAX: Final = 8192
STAGED_BYTES_MAX: Final = 2 * SNAPSHOT_BYTES_MAX
#: Milliseconds until an unpublished part is deleted, and between searches for expired parts.
PART_LIFETIME: Final = 24 * 3_600_000
_SWEEP_INTERVAL: Final = 3_600_000
#: Maximum parts that one search deletes, to bound its memory. The next search continues.
_SWEPT_MAX: Final = 10_000
#: Maximum snapshots assembled concurrently: each reads and writes up to a gibibyte.
_PUBLISHED_AT_ONCE: Final = 2

_FOLDER: Final = "parts/"
_PART_ID: Final = re.compile(r"([0-9a-f]{13})-[0-9a-f]{32}")
_KEY: Final = re.compile(rf"{_FOLDER}([0-9a-f]{{16}})/{_PART_ID.pattern}")


class StagedPart(NamedTuple):
    """An unpublished part."""

    part: str
    size_bytes: int
    #: Milliseconds since the Unix epoch.
    staged_at: int


class StagedPartsFullError(StreamfoldError):
    """Raised when a stream has the maximum number of parts or bytes. Nothing was stored."""

    code = "staged_parts_limit"

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"the stream can have {limit} {what} of snapshots that are not published: publish them, or "
            "discard them with DELETE at .../snapshot/parts"
        )
        #: `parts` or `bytes`, and the limit.
        self.what = what
        self.limit = limit


class PartsBusyError(RetryLaterError):
    """Raised while another call publishes or discards parts. Nothing was changed."""

    code = "snapshot_parts_busy"


class StagedParts:
    """The staged parts of all streams."""

    def __init__(
        self,
        store: BlobStore,
        space: DiskSpace,
        now: Callable[[], int],
        *,
        parts_max: int = STAGED_PARTS_MAX,
        bytes_max: int = STAGED_BYTES_MAX,
    ) -> None:
        self._store = store
        self._parts_max = parts_max
        self._bytes_max = bytes_max
        self._space = space
        self._now = now
        #: Number of parts being received, by stream, and their bytes as far as known.
        self._arriving: Counter[int] = Counter()
        self._arriving_bytes: Counter[int] = Counter()
        #: Streams whose parts are being published or discarded.
        self._used: set[int] = set()
        #: The stream whose expired parts are being deleted.
        self._swept: int | None = None
        self._next_sweep = 0

    async def stage(self, stream_id: int, pieces: AsyncIterator[bytes], size: int | None) -> str:
        """Store a part durably, and return its name.

        Raises StagedPartsFullError before reading any of its bytes.
        """
        with self._counted(stream_id, PART_BYTES_MAX if size is None else size):
            # Counted before listing: a part that arrives completely meanwhile is then counted
            # either way.
            count, total = self._arriving[stream_id], self._arriving_bytes[stream_id]
            for part in await self.list(stream_id):
                count += 1
                total += part.size_bytes
            if count > self._parts_max:
                raise StagedPartsFullError("parts", self._parts_max)
            if total > self._bytes_max:
                raise StagedPartsFullError("bytes", self._bytes_max)
            part_id = f"{self._now():013x}-{uuid.uuid4().hex}"
            with self._space.claim(size) as claim:
                try:
                    await self._store.put(_key(stream_id, part_id), _claimed(pieces, claim))
                except BlobUnavailableError as error:
                    if isinstance(error.__cause__, OSError) and is_disk_full(error.__cause__):
                        raise StorageFullError(
                            "the disk became full while a part of a snapshot was written: nothing was "
                            "stored; free some space, or send it again later"
                        ) from error
                    raise
            return part_id

    @contextmanager
    def _counted(self, stream_id: int, size: int) -> Iterator[None]:
        self._arriving[stream_id] += 1
        self._arriving_bytes[stream_id] += size
        try:
            yield
        finally:
            self._arriving[stream_id] -= 1
            self._arriving_bytes[stream_id] -= size
            if not self._arriving[stream_id]:
                del self._arriving[stream_id], self._arriving_bytes[stream_id]

    async def list(self, stream_id: int) -> list[StagedPart]:
        """Return the stream's unpublished parts, oldest first."""
        folder = _key(stream_id, "")
        return sorted(
            [
                StagedPart(match[0], meta.size, int(match[1], 16))
                async for meta in self._store.list(folder)
                if (match := _PART_ID.fullmatch(meta.key.removeprefix(folder)))
            ]
        )

    @contextmanager
    def alone(self, stream_id: int) -> Iterator[None]:
        """Hold the stream's parts exclusively. Raises PartsBusyError if another call uses them."""
        if stream_id in self._used or stream_id == self._swept:
            raise PartsBusyError(
                "parts of this stream are being published or discarded: repeat it a little later"
            )
        if len(self._used) >= _PUBLISHED_AT_ONCE:
            raise PartsBusyError(
                f"{_PUBLISHED_AT_ONCE} snapshots are being put together, which is the most at once: "
                "repeat it a little later"
            )
        self._used.add(stream_id)
        try:
            yield
        finally:
            self._used.discard(stream_id)

    async def find(self, stream_id: int, part_ids: Sequence[str]) -> Sequence[StagedPart]:
        """Return the named parts, in this order. Raises InvalidError if one does not exist."""
        staged = {part.part: part for part in await self.list(stream_id)}
        for part_id in part_ids:
            if part_id not in staged:
                raise InvalidError(
                    f"part {part_id[:64]!r} is not staged for this stream: it was published or "
                    "discarded, or is older than a day; send it again"
                )
        return [staged[part_id] for part_id in part_ids]

    async def read(self, stream_id: int, parts: Iterable[StagedPart]) -> AsyncGenerator[bytes]:
        """Yield the bytes of parts, in pieces of `READ_PIECE` bytes."""
        for part in parts:
            for start in range(0, part.size_bytes, READ_PIECE):
                length = min(READ_PIECE, part.size_bytes - start)
                yield await self._store.get_range(_key(stream_id, part.part), start, length)

    async def discard(self, stream_id: int, part_ids: Iterable[str]) -> None:
        """Delete the parts."""
        for part_id in part_ids:
            await self._store.delete(_key(stream_id, part_id))

    async def forget(self, stream_id: int, part_ids: Iterable[str]) -> None:
        """Delete published parts. Parts that storage fails to delete expire within a day."""
        try:
            await self.discard(stream_id, part_ids)
        except (BlobUnavailableError, BlobOutcomeUnknownError) as error:
            logger.warning("parts of a snapshot that was published are left for a day: %s", error)

    async def sweep(self, check: Callable[[], Awaitable[None]]) -> None:
        """Delete parts older than a day, once an hour. `check` raises after a takeover."""
        now = self._now()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_INTERVAL
        expired: list[tuple[int, str]] = []
        async for meta in self._store.list(_FOLDER):
            match = _KEY.fullmatch(meta.key)
            if match is None or len(expired) >= _SWEPT_MAX:
                continue
            if int(match[2], 16) + PART_LIFETIME <= now:
                expired.append((int(match[1], 16), meta.key))
        if not expired:
            return
        await check()
        deleted = 0
        for stream_id, key in expired:
            if stream_id in self._used:  # a publication may have started since the list was made
                continue
            self._swept = stream_id  # and none can start while a part of its stream is deleted
            try:
                await self._store.delete(key)
            finally:
                self._swept = None
            deleted += 1
        logger.info("deleted %d parts of snapshots that nobody published for a day", deleted)


async def _claimed(pieces: AsyncIterator[bytes], claim: SpaceClaim) -> AsyncIterator[bytes]:
    async for piece in pieces:
        claim.add(len(piece))
        yield piece


def _key(stream_id: int, part_id: str) -> str:
    return f"{_FOLDER}{stream_id:016x}/{part_id}"
