"""A handle to one stream of a store, for both faces and for applications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Final

import msgspec

from streamfold.errors import (
    BasinDeletingError,
    PositionTrimmedError,
    StreamDeletingError,
    TooLargeError,
)
from streamfold.model.configs import StreamConfigLayer
from streamfold.model.names import StreamRef
from streamfold.model.positions import StreamPosition
from streamfold.model.records import Record
from streamfold.model.resources import ForkPage, Page, ProducerProgress, StreamStatus
from streamfold.records.batch import RecordBatch
from streamfold.store.append_queues import AppendQueues, Submission, ended, settle_refusal
from streamfold.store.catalog import listing
from streamfold.store.catalog.creation import Creator, NewStream
from streamfold.store.catalog.snapshots import Publication, Snapshot
from streamfold.store.catalog.staged_parts import SNAPSHOT_BYTES_MAX, StagedPart
from streamfold.store.log.admission import AppendRequest
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.read.reader import Reader, ReaderCalls, read_once, renew
from streamfold.store.read.requests import ReadBatch, ReadRequest
from streamfold.store.read.seek import apply_retention
from streamfold.store.supervisor import MountedStore, Supervisor


class SnapshotHandle(msgspec.Struct, frozen=True):
    """The snapshots of one stream, addressed by the stream's name."""

    supervisor: Supervisor
    #: Opens the stream, which must exist.
    existing: Callable[[], AbstractAsyncContextManager[tuple[MountedStore, StreamLog]]]

    async def publish(self, new: Publication) -> Snapshot:
        """Store a snapshot. Idempotent."""
        self.supervisor.space.check_upload(new.size or 0)
        async with self.existing() as (mounted, log):
            return await mounted.snapshots.publish(log, new)

    async def published(self, new: Publication, digest: str) -> Snapshot | None:
        """Return the newest snapshot if it is `new` with this digest.

        If `new` trims, so does this.
        """
        async with self.existing() as (mounted, log):
            return await mounted.snapshots.published(log, new, digest)

    async def stage_part(self, pieces: AsyncIterator[bytes], size: int | None) -> str:
        """Store one part of a snapshot to be published later. Returns the part's name."""
        self.supervisor.space.check_upload(size or 0)
        async with self.existing() as (_, log):
            return await self.supervisor.parts.stage(log.id, pieces, size)

    async def staged_parts(self) -> list[StagedPart]:
        """Return the stream's unpublished parts, oldest first."""
        async with self.existing() as (_, log):
            return await self.supervisor.parts.list(log.id)

    async def publish_parts(
        self,
        part_ids: Sequence[str],
        make: Callable[[AsyncIterator[bytes], int], Publication],
    ) -> Snapshot:
        """Publish a snapshot assembled from parts.

        `make` receives its bytes and their total size.
        """
        parts = self.supervisor.parts
        async with self.existing() as (mounted, log):
            with parts.alone(log.id):
                staged = await parts.find(log.id, part_ids)
                size = sum(part.size_bytes for part in staged)
                if size > SNAPSHOT_BYTES_MAX:
                    raise TooLargeError(
                        f"the parts have {size} bytes: a snapshot has at most {SNAPSHOT_BYTES_MAX}"
                    )
                self.supervisor.space.check_upload(size)
                async with aclosing(parts.read(log.id, staged)) as pieces:
                    snapshot = await mounted.snapshots.publish(log, make(pieces, size))
                await parts.forget(log.id, part_ids)
                return snapshot

    async def discard_parts(self) -> None:
        """Delete all unpublished parts of the stream."""
        parts = self.supervisor.parts
        async with self.existing() as (_, log):
            with parts.alone(log.id):
                await parts.discard(log.id, [part.part for part in await parts.list(log.id)])

    async def all(self) -> list[Snapshot]:
        """Return every snapshot that the stream can be followed from, oldest first."""
        async with self.existing() as (mounted, log):
            return await mounted.snapshots.all(log)

    async def find(self, seq_num: int | None) -> Snapshot | None:
        """Return the snapshot at `seq_num`, which must exist.

        Without `seq_num`, return the newest, if any.
        """
        async with self.existing() as (mounted, log):
            if seq_num is None:
                return await mounted.snapshots.newest(log)
            return await mounted.snapshots.at(log, seq_num)

    async def pieces(self, snapshot: Snapshot) -> AsyncGenerator[bytes]:
        """Yield a snapshot's bytes in pieces. The snapshot is not deleted meanwhile."""
        mounted = await self.supervisor.mounted()
        async with aclosing(mounted.snapshots.blobs.read(snapshot)) as pieces:
            async for piece in pieces:
                yield piece

    async def retain(
        self,
        seq_num: int,
        *,
        whole_appends: bool,
        key: SealingKey | None = None,
    ) -> None:
        """Trim the records before `seq_num`, which a snapshot must cover."""
        async with self.existing() as (mounted, log):
            await mounted.snapshots.retain(log, seq_num, whole_appends=whole_appends, key=key)


#: Creates a stream with its basin's default configuration.
BASIN_DEFAULTS: Final = StreamConfigLayer()


class StreamHandle(msgspec.Struct, frozen=True):
    """A stream addressed by name, whether or not it exists.

    `create_with` configures the stream if a call creates it, which depends on the basin's
    configuration. With None, the stream must exist. `key` opens and seals the records of a stream
    that has a cipher.
    """

    ref: StreamRef
    supervisor: Supervisor
    queues: AppendQueues

    # Appending

    def append(
        self,
        records: RecordBatch | Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
        create_with: StreamConfigLayer | None = BASIN_DEFAULTS,
        key: SealingKey | None = None,
    ) -> Submission:
        """Submit `records` as one batch, appended atomically after all batches submitted before it.

        With `match_seq_num`, the append is refused unless the first record gets this seq_num. With
        `fencing_token`, it is refused unless the stream has this token. `create_with` and `key` are
        those of the class.

        Submissions wait in memory: before submitting much more, wait until this one is `decided`.
        """
        return self.submit(
            AppendRequest.of(
                records,
                match_seq_num=match_seq_num,
                fencing_token=fencing_token,
                create_with=create_with,
                key=key,
            )
        )

    def submit(self, request: AppendRequest | asyncio.Future[AppendRequest]) -> Submission:
        """Submit an append of any kind. The request may still be under construction."""
        return self.queues.append(self.ref, request)

    # Reading

    async def open(
        self,
        key: SealingKey | None = None,
        *,
        create_with: StreamConfigLayer | None = BASIN_DEFAULTS,
        on_append: bool = False,
    ) -> StreamPosition:
        """Return the tail, creating the stream if necessary. Raises if the stream needs a `key`."""
        async with self._opened(create_with, on_append=on_append) as (_, log):
            log.check_key(key)
            return log.durable

    async def tail(
        self, *, create_with: StreamConfigLayer | None = BASIN_DEFAULTS
    ) -> StreamPosition:
        """Return the position after the last durable record."""
        async with self._opened(create_with) as (_, log):
            return log.durable

    async def read(
        self,
        request: ReadRequest,
        key: SealingKey | None = None,
        *,
        create_with: StreamConfigLayer | None = BASIN_DEFAULTS,
    ) -> ReadBatch:
        """Read at most 1000 records and 1 MiB. Raises PositionUnwrittenError at the tail."""
        async with self._opened(create_with) as (mounted, log):
            log.check_key(key)
            await renew(mounted.mount, log)
            batch = await read_once(mounted.mount, log, request, key)
            self.supervisor.usage.record_read(log.basin, batch.metered)
            return batch

    @asynccontextmanager
    async def follow(
        self,
        request: ReadRequest,
        key: SealingKey | None = None,
        *,
        create_with: StreamConfigLayer | None = BASIN_DEFAULTS,
        before_own_batch: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Reader]:
        """Open a reader of stored and then new records, within the limits of `request`."""
        async with self._opened(create_with) as (mounted, log):
            log.check_key(key)
            await renew(mounted.mount, log)
            calls = self._reader_calls(before_own_batch)
            reader = await Reader.open(mounted.mount, log, request, key, calls)
            self.supervisor.usage.record_read_session(log.basin)
            async with aclosing(reader):
                yield reader

    @asynccontextmanager
    async def reading(
        self,
        seq_num: int | None,
        key: SealingKey | None = None,
        *,
        before_own_batch: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Reader]:
        """Open a reader from `seq_num`, or the tail. It raises rather than skip records."""
        async with self.existing() as (mounted, log):
            log.check_key(key)
            await renew(mounted.mount, log)
            start = int(log.durable.seq_num) if seq_num is None else seq_num
            await apply_retention(mounted.mount, log)
            if start < log.readable_from:
                raise PositionTrimmedError(start, log.retained_from)
            calls = self._reader_calls(before_own_batch)
            async with aclosing(Reader.at(mounted.mount, log, start, key, calls)) as reader:
                yield reader

    def _reader_calls(self, before_own_batch: Callable[[], Awaitable[None]] | None) -> ReaderCalls:
        delivered = partial(self.supervisor.usage.record_delivery, self.ref.basin)
        return ReaderCalls(delivered, before_own_batch)

    # The stream itself

    async def create(self, spec: NewStream) -> tuple[StreamStatus, bool]:
        """Return the stream's status and whether this call created it.

        Raises AlreadyExistsError if a different stream of this name exists.
        """
        self.supervisor.space.check()
        mounted = await self.supervisor.mounted()
        creation = await Creator(mounted.mount, mounted.catalog).create(self.ref, spec)
        status, begins_at, created = creation
        if created and status.tail > begins_at:
            self.supervisor.notify_listeners(*self.ref, begins_at, status.tail)
        return status, created

    async def status(self) -> StreamStatus:
        """Return the stream's state. This does not count as use."""
        async with self.existing() as (mounted, log):
            await apply_retention(mounted.mount, log)
            return log.status

    async def forks(self, start_after: int, limit: int) -> ForkPage:
        """Return where the stream was forked, and a page of the streams that need its records.

        Also works on a deleted stream that is kept for its forks.
        """
        async with self.existing(kept_for_forks=True) as (mounted, log):
            origin = log.row.traits.origin if log.row.traits else None
            engine = mounted.mount.engine
            forks, following = await listing.list_forks(engine, log.id, start_after, limit)
            return ForkPage(origin, tuple(forks), following)

    async def producers(self, start_after: str, limit: int) -> Page[ProducerProgress]:
        """Return the durable progress of the stream's producers, in byte order of their ids."""
        async with self.existing() as (mounted, log):
            return await listing.list_producers(mounted.mount.engine, log.id, start_after, limit)

    async def delete(self) -> None:
        """Delete the stream. Records that forks need stay until the forks are deleted."""
        async with self.existing() as (mounted, log):
            await mounted.catalog.delete_stream(log.ref)
            mounted.upkeep.request_pass()

    @property
    def snapshots(self) -> SnapshotHandle:
        """The stream's snapshots."""
        return SnapshotHandle(self.supervisor, self.existing)

    @asynccontextmanager
    async def existing(
        self, *, kept_for_forks: bool = False
    ) -> AsyncIterator[tuple[MountedStore, StreamLog]]:
        """Lease the log of a live stream.

        With `kept_for_forks`, also of one kept only for forks.
        """
        mounted = self.supervisor.current or await self.supervisor.mounted()
        with await mounted.catalog.lease(self.ref) as log:
            if log.failure is not None:
                raise log.failure.with_traceback(None)
            if log.over:
                creator = Creator(mounted.mount, mounted.catalog)
                if not (kept_for_forks and await creator.forked(log.id)):
                    raise await ended(mounted, log)
            yield mounted, log

    @asynccontextmanager
    async def _opened(
        self, create_with: StreamConfigLayer | None, *, on_append: bool = False
    ) -> AsyncIterator[tuple[MountedStore, StreamLog]]:
        """Lease the stream's log, creating the stream if its basin is configured to."""
        mounted = self.supervisor.current or await self.supervisor.mounted()
        with await mounted.catalog.lease(self.ref, create_with, on_append=on_append) as log:
            try:
                log.check_alive()
            except (BasinDeletingError, StreamDeletingError) as error:
                await settle_refusal(error, mounted, log)
                raise
            yield mounted, log
