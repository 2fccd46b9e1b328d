"""Stream snapshots: each replaces all records before a position.

A snapshot's bytes are a blob, written first. Its row in the store then makes it a snapshot. A blob
without a row is collected unless it is being written or read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from streamfold.blob.blob_store import BlobStore
from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    DataCorruptError,
    InvalidError,
    PositionTrimmedError,
    SnapshotConflictError,
    SnapshotNotFoundError,
    StorageFullError,
    StreamfoldError,
)
from streamfold.model.records import CONTINUED
from streamfold.store import keys, rows
from streamfold.store.catalog.catalog import Catalog
from streamfold.store.engine.disk_space import DiskSpace, SpaceClaim, is_disk_full
from streamfold.store.engine.engine import Engine, Op
from streamfold.store.leftovers import LEFTOVERS_MAX, Leftovers
from streamfold.store.log.log_leases import LogLease
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.mount import Mount
from streamfold.store.read.cursor import Cursor
from streamfold.store.read.requests import Allowance
from streamfold.store.read.seek import apply_retention
from streamfold.store.rows import SnapshotRow

logger = logging.getLogger(__name__)

#: Bytes of a snapshot read at a time and held by each of its readers.
READ_PIECE = 1 << 20
#: Snapshots kept per stream: the newest ones.
SNAPSHOTS_KEPT = 16
_FOLDER = re.compile(r"([0-9a-f]{16})/")


class Digest(Protocol):
    """Identifies a snapshot by its content. The server verifies reads with its `SnapshotDigest`."""

    def update(self, data: bytes) -> None: ...
    def hexdigest(self) -> str: ...


class Snapshot(msgspec.Struct, frozen=True):
    """A published snapshot. Immutable."""

    #: The first seq_num that it does not cover.
    seq_num: int
    content_type: str
    digest: str
    #: Size in bytes.
    size: int
    #: Milliseconds since the Unix epoch.
    created_at: int
    blob: str


@dataclass(frozen=True, slots=True)
class Publication:
    """A snapshot to be published."""

    seq_num: int
    content_type: str
    pieces: AsyncIterator[bytes]
    digest: Digest
    #: The digest that the newest snapshot must have; None = any.
    match: str | None
    #: Whether the position must be the end of an append.
    whole_appends: bool
    key: SealingKey | None
    #: Whether to trim the records that it covers; None = as configured for the stream.
    trim: bool | None = None
    #: Total bytes of all pieces, if known in advance.
    size: int | None = None


@dataclass(slots=True)
class SnapshotBlobs:
    """Snapshot blobs, and the number of calls that currently use each."""

    store: BlobStore
    _used: Counter[str] = field(default_factory=Counter)
    #: Blobs whose rows are deleted but that were being read or frozen.
    _retired: set[str] = field(default_factory=set)

    @contextmanager
    def using(self, blob: str) -> Iterator[None]:
        """Protect a blob from collection."""
        self._used[blob] += 1
        try:
            yield
        finally:
            self._used[blob] -= 1
            if not self._used[blob]:
                del self._used[blob]

    async def read(self, snapshot: Snapshot) -> AsyncGenerator[bytes]:
        """Yield the snapshot in pieces of `READ_PIECE` bytes.

        No file or connection is open while the caller handles a piece.
        """
        with self.using(snapshot.blob):
            for start in range(0, snapshot.size, READ_PIECE):
                length = min(READ_PIECE, snapshot.size - start)
                piece = await self.store.get_range(snapshot.blob, start, length)
                if len(piece) < length:
                    raise DataCorruptError(
                        f"blob {snapshot.blob!r} of the snapshot at {snapshot.seq_num} ends at byte "
                        f"{start + len(piece)} of {snapshot.size}: restore it from a backup"
                    )
                yield piece

    def idle(self, blobs: Iterable[str]) -> list[str]:
        """Return the `blobs` that are not being written or read."""
        return [blob for blob in blobs if blob not in self._used]

    async def delete(self, blobs: Iterable[str], engine: Engine) -> None:
        """Delete `blobs`, which no row names, and those left over from earlier calls.

        Blobs that are being read or are frozen stay until a later call.
        """
        self._retired.update(blobs)
        if not self._retired or await engine.frozen():
            return
        for blob in list(self._retired):
            if blob not in self._used:
                await self.store.delete(blob)
                self._retired.discard(blob)

    async def by_stream(self) -> AsyncGenerator[tuple[int, list[str]]]:
        """Yield each stream that has blobs, with all of them. Other files are ignored.

        Uses one listing for all streams: with one per stream, thousands of streams would take
        minutes.
        """
        stream_id, blobs = 0, list[str]()
        async for meta in self.store.list():
            if (match := _FOLDER.match(meta.key)) is None:
                continue
            if (folder_id := int(match[1], 16)) != stream_id and blobs:
                yield stream_id, blobs
                blobs = []
            stream_id = folder_id
            blobs.append(meta.key)
        if blobs:
            yield stream_id, blobs


@dataclass(frozen=True, slots=True)
class StreamSnapshots:
    """The snapshots of all streams of one mount."""

    mount: Mount
    catalog: Catalog
    blobs: SnapshotBlobs
    #: Whether snapshots trim streams that do not configure this.
    trim_by_default: bool
    #: The disk to which blobs are written.
    space: DiskSpace
    leftovers: Leftovers

    async def all(self, log: StreamLog) -> list[Snapshot]:
        """Return every snapshot that the stream can be followed from, oldest first."""
        await apply_retention(self.mount, log)
        return await self._rows(log.id, log.retained_from)

    async def newest(self, log: StreamLog) -> Snapshot | None:
        snapshots = await self.all(log)
        return snapshots[-1] if snapshots else None

    async def at(self, log: StreamLog, seq_num: int) -> Snapshot:
        """Return the snapshot at `seq_num`. Raises SnapshotNotFoundError if there is none."""
        snapshot = next((s for s in await self.all(log) if s.seq_num == seq_num), None)
        if snapshot is None:
            raise SnapshotNotFoundError(
                f"stream {log.name!r} has no snapshot at {seq_num}: list them to see which"
            )
        return snapshot

    async def publish(self, log: StreamLog, new: Publication) -> Snapshot:
        """Store a snapshot. Idempotent."""
        await self._check(log, new)
        blob = f"{_folder(log.id)}{new.seq_num:020d}-{uuid.uuid4().hex}"
        with self.blobs.using(blob):
            counted = await self._upload(blob, new)
            row = SnapshotRow(
                new.content_type, new.digest.hexdigest(), counted.size, self.mount.now(), blob
            )
            snapshot = await self.catalog.finish(self._commit(log, new, row))
        await self._prune_published(log)
        return snapshot

    async def published(self, log: StreamLog, new: Publication, digest: str) -> Snapshot | None:
        """Return the newest snapshot if it is `new` with this digest. If `new` trims, so does this.

        For retries without the bytes: a snapshot's parts are gone once it is published.
        """
        return await self.catalog.finish(self._published(log, new, digest))

    async def _published(self, log: StreamLog, new: Publication, digest: str) -> Snapshot | None:
        with LogLease(log):
            async with self.catalog.locks.hold(*log.ref):
                log.check_alive()
                newest = await self.newest(log)
                if newest is None or (newest.seq_num, newest.digest) != (new.seq_num, digest):
                    return None
                await self._trim_again(log, new)
        await self._prune_published(log)
        return newest

    async def _trim_again(self, log: StreamLog, new: Publication) -> None:
        """Trim what `new`, already published, covers: only this request may ask for the trim."""
        if self._trims(log, new):
            log.trim(new.seq_num)
            await self.mount.committer.write_with(log)

    async def _commit(self, log: StreamLog, new: Publication, row: SnapshotRow) -> Snapshot:
        """Commit the blob as a snapshot.

        Protects blob and log, because the caller may be cancelled.
        """
        with self.blobs.using(row.blob), LogLease(log):
            try:
                snapshot = await self._write_row(log, new, row)
            except StreamfoldError as error:
                if error.definite:
                    await self._discard(row.blob)
                raise
            if snapshot.blob != row.blob:  # it was published before
                await self._discard(row.blob)
            return snapshot

    async def _discard(self, blob: str) -> None:
        """Delete a blob that certainly has no row. If that fails, a later collection deletes it."""
        try:
            await self.blobs.store.delete(blob)
        except (BlobUnavailableError, BlobOutcomeUnknownError) as error:
            logger.warning("the blob of a snapshot that was not published is left: %s", error)

    async def _upload(self, blob: str, new: Publication) -> _Counted:
        """Write the blob.

        Raises StorageFullError, leaving no blob, once it would touch the reserve.
        """
        with self.space.claim(new.size) as claim:
            counted = _Counted(new.pieces, new.digest, claim)
            try:
                await self.blobs.store.put(blob, counted.pieces())
            except (asyncio.CancelledError, BlobOutcomeUnknownError):
                await self.catalog.finish(self._discard(blob))  # the blob may exist
                raise
            except BlobUnavailableError as error:
                if isinstance(error.__cause__, OSError) and is_disk_full(error.__cause__):
                    raise StorageFullError(
                        "the disk became full while the snapshot was written: nothing was stored; free "
                        "some space, or send it again later"
                    ) from error
                raise
        return counted

    async def retain(
        self, log: StreamLog, seq_num: int, *, whole_appends: bool, key: SealingKey | None
    ) -> None:
        """Trim the records before `seq_num`, which a snapshot must cover."""
        async with self.catalog.locks.hold(*log.ref):
            log.check_alive()  # a trim would replace the clean-up row of a deletion
            if seq_num < log.retained_from:
                raise SnapshotConflictError(
                    f"position {seq_num} is trimmed already: give {log.retained_from} or a later one"
                )
            newest = await self.newest(log)
            if newest is None or newest.seq_num < seq_num:
                raise SnapshotConflictError(
                    f"no snapshot of stream {log.name!r} covers the records before {seq_num}: "
                    "publish one first"
                )
            if whole_appends:
                await self._check_boundary(log, seq_num, key)
            log.trim(seq_num)
            await self.mount.committer.write_with(log)

    async def prune(self, log: StreamLog) -> None:
        """Remove snapshots whose following records are trimmed, and the oldest beyond the limit."""
        snapshots = await self._rows(log.id, 0)
        usable = [s for s in snapshots if s.seq_num >= log.retained_from]
        retained = usable[-SNAPSHOTS_KEPT:]
        gone = [s for s in snapshots if s not in retained]
        if gone:
            await self._remove(log.id, gone)

    async def _prune_published(self, log: StreamLog) -> None:
        """Prune after a commit.

        Errors are not raised, because the client would take its snapshot for rejected.
        """
        try:
            await self.prune(log)
        except StreamfoldError as error:
            logger.warning(
                "old snapshots of stream %s are left to the next publication: %s", log.name, error
            )

    async def forget(self, stream_id: int) -> None:
        """Remove all snapshots of a deleted stream."""
        snapshots = await self._rows(stream_id, 0)
        if snapshots:
            await self._remove(stream_id, snapshots)

    async def _remove(self, stream_id: int, gone: Sequence[Snapshot]) -> None:
        """Delete the rows of `gone`, then their blobs."""
        ops: list[Op] = [(keys.snapshot(stream_id, s.seq_num), None) for s in gone]
        await self.mount.committer.write(ops)
        await self.blobs.delete([s.blob for s in gone], self.mount.engine)

    async def sweep(self) -> None:
        """Find blobs that no row names, and delete the overdue ones.

        Raises WriterFencedError after a takeover, because a process that has taken over writes rows
        that this one does not see. Lists blobs before rows: by the time rows are read, the writer
        of an idle blob has committed or failed.
        """
        unnamed: list[str] = []
        async with aclosing(self.blobs.by_stream()) as streams:
            async for stream_id, blobs in streams:
                idle = self.blobs.idle(blobs)
                named = {snapshot.blob for snapshot in await self._rows(stream_id, 0)}
                unnamed += [blob for blob in idle if blob not in named]
                if len(unnamed) > LEFTOVERS_MAX:
                    break
        if unnamed:
            await self.mount.engine.check()
        await self.blobs.delete(await self.leftovers.overdue(unnamed), self.mount.engine)

    async def _write_row(self, log: StreamLog, new: Publication, row: SnapshotRow) -> Snapshot:
        async with self.catalog.locks.hold(*log.ref):
            # Check again under the lock: much may have happened during the upload.
            log.check_alive()
            await self._check(log, new)
            newest = await self.newest(log)
            if newest is not None and newest.seq_num == new.seq_num:
                if newest.digest == row.digest:
                    await self._trim_again(log, new)
                    return newest
                raise SnapshotConflictError(
                    f"stream {log.name!r} has another snapshot at {new.seq_num}, with digest "
                    f"{newest.digest}: snapshots never change; publish one at a later position"
                )
            if new.seq_num < log.retained_from:  # trimmed during the checks
                raise PositionTrimmedError(new.seq_num, log.retained_from)
            if self._trims(log, new):
                log.trim(new.seq_num)
            # One commit: without the snapshot, the trim would drop records that nothing covers.
            op = keys.snapshot(log.id, new.seq_num), rows.encode(row)
            await self.mount.committer.write_with(log, [op])
            return _snapshot(new.seq_num, row)

    def _trims(self, log: StreamLog, new: Publication) -> bool:
        """Return whether `new` trims: by its own setting, else the stream's, else the store's."""
        for choice in (new.trim, log.row.config.trim_on_snapshot):
            if choice is not None:
                return choice
        traits = log.row.traits
        return self.trim_by_default or (traits is not None and traits.trim_on_snapshot)

    async def _check(self, log: StreamLog, new: Publication) -> None:
        await apply_retention(self.mount, log)
        first, tail = log.retained_from, int(log.durable.seq_num)
        if new.seq_num < first:
            raise PositionTrimmedError(new.seq_num, first)
        if new.seq_num > tail:
            raise SnapshotConflictError(
                f"stream {log.name!r} ends at {tail}: a snapshot cannot cover more, up to "
                f"{new.seq_num}"
            )
        newest = await self.newest(log)
        if new.match is not None and (newest is None or newest.digest != new.match):
            digest = "none" if newest is None else newest.digest
            raise SnapshotConflictError(
                f"the newest snapshot is {digest}, not {new.match}: read it, then decide"
            )
        if newest is not None and new.seq_num < newest.seq_num:
            raise SnapshotConflictError(
                f"stream {log.name!r} has a newer snapshot, at {newest.seq_num}"
            )
        if new.whole_appends:
            await self._check_boundary(log, new.seq_num, new.key)

    async def _check_boundary(self, log: StreamLog, seq_num: int, key: SealingKey | None) -> None:
        if seq_num in (log.retained_from, int(log.durable.seq_num)):
            return
        cursor = Cursor(self.mount, log, seq_num - 1, Allowance(1, None, None), key)
        try:
            batch = await cursor.next(fill=True)
        finally:
            await cursor.close()
        if batch is not None and CONTINUED in batch.records()[0].headers:
            raise InvalidError(
                f"position {seq_num} is within an append: give one where an append ends"
            )

    async def _rows(self, stream_id: int, start: int) -> list[Snapshot]:
        snapshots = []
        span = keys.snapshots_span(stream_id, start)
        async with aclosing(self.mount.engine.scan(*span, first=SNAPSHOTS_KEPT + 1)) as pages:
            async for page in pages:
                for key, value in page:
                    row = rows.decode(value, SnapshotRow)
                    snapshots.append(_snapshot(keys.snapshot_seq_num(key), row))
        return snapshots


class _Counted:
    """Counts and digests the pieces that it yields."""

    def __init__(self, pieces: AsyncIterator[bytes], digest: Digest, claim: SpaceClaim) -> None:
        self._pieces = pieces
        self._digest = digest
        self._claim = claim
        self.size = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            self._claim.add(len(piece))
            self._digest.update(piece)
            self.size += len(piece)
            yield piece


def _folder(stream_id: int) -> str:
    return f"{stream_id:016x}/"


def _snapshot(seq_num: int, row: SnapshotRow) -> Snapshot:
    return Snapshot(seq_num, row.content_type, row.digest, row.size, row.created_at, row.blob)
