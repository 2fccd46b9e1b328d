"""Streams with traits: created with content, closed for good, forked, expired, and appended to by
producers that may repeat themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from streamfold.errors import (
    BasinDeletingError,
    PositionTrimmedError,
    StreamfoldError,
    StreamForkedError,
    StreamNotFoundError,
    TooLargeError,
)
from streamfold.model import names
from streamfold.model.configs import BasinConfig
from streamfold.model.names import StreamRef
from streamfold.model.resources import Claim, ForkPage, Page, ProducerProgress, StreamStatus
from streamfold.records.batch import RecordBatch
from streamfold.store.appends import Appends, settle_refusal
from streamfold.store.catalog import listing
from streamfold.store.catalog.creation import Content, Creator, ForkSpec, StreamSpec, prepared
from streamfold.store.catalog.snapshots import Publication, Snapshot
from streamfold.store.catalog.staged_parts import SNAPSHOT_BYTES_MAX, StagedPart
from streamfold.store.log.admission import AppendRequest, Unrecorded
from streamfold.store.log.sealing import SealingKey
from streamfold.store.log.shares import AppendAck
from streamfold.store.log.stream_log import StreamLog
from streamfold.store.read.reader import Reader, renew
from streamfold.store.read.seek import apply_retention
from streamfold.store.rows import ProducerRow
from streamfold.store.supervisor import MountedStore, Supervisor

#: Metered bytes of one append; less than `inflight_bytes` is by default.
APPEND_BYTES_MAX = 32 << 20

__all__ = ["Appended", "Content", "DurableStreams", "ForkSpec", "StreamSpec", "prepared"]


class Appended(msgspec.Struct, frozen=True):
    """A durable append."""

    #: Whether it repeats an earlier append, so that nothing was written.
    repeated: bool
    tail: int
    closed: bool
    #: How far the producer has come.
    producer: ProducerRow | None


class PendingAppend(msgspec.Struct, frozen=True):
    """An append that has its slot in the stream, and may not be durable yet."""

    ack: asyncio.Future[AppendAck]
    closes: bool
    #: How far the producer has come, with this append.
    producer: ProducerRow | None

    async def durable(self) -> Appended:
        return Appended(False, int((await self.ack).end.seq_num), self.closes, self.producer)


@dataclass(frozen=True, slots=True)
class DurableStreams:
    """Operations on streams with traits; a stream without has the default ones."""

    supervisor: Supervisor
    appends: Appends
    now: Callable[[], int]

    async def ensure_basin(self, basin: str) -> None:
        """Create the basin unless it exists; an existing one keeps its configuration."""
        name = names.parse_bucket_name(basin)
        mounted = await self.supervisor.mounted()
        if await mounted.mount.basin(name) is None:
            await mounted.catalog.open_basin(name, BasinConfig())

    async def has_basin(self, basin: str) -> bool:
        mounted = await self.supervisor.mounted()
        return await mounted.mount.basin(names.parse_bucket_name(basin)) is not None

    async def create(self, basin: str, stream: str, spec: StreamSpec) -> tuple[StreamStatus, bool]:
        """The stream, and whether this created it; AlreadyExistsError if a different one exists."""
        ref = StreamRef.parse(basin, stream)
        self.supervisor.space.check()
        mounted = await self.supervisor.mounted()
        status, begins_at, created = await _creator(mounted).create(ref, spec)
        if created and status.tail > begins_at:
            self.supervisor.notify_listeners(basin, stream, begins_at, status.tail)
        return status, created

    async def status(self, basin: str, stream: str) -> StreamStatus:
        """The stream's state; this does not count as use."""
        async with self._using(basin, stream) as (mounted, log):
            await apply_retention(mounted.mount, log)
            return log.status

    async def forks(self, basin: str, stream: str, start_after: int, limit: int) -> ForkPage:
        """Where the stream was forked, and a page of the streams that need its records.

        A stream that was deleted, but is kept for its forks, has them, too.
        """
        async with self._using(basin, stream, kept_for_forks=True) as (mounted, log):
            origin = log.row.traits.origin if log.row.traits else None
            engine = mounted.mount.engine
            found, following = await listing.list_forks(engine, log.id, start_after, limit)
            return ForkPage(origin, tuple(found), following)

    async def producers(
        self, basin: str, stream: str, start_after: str, limit: int
    ) -> Page[ProducerProgress]:
        """The durable progress of the stream's producers, in byte order of their ids."""
        async with self._using(basin, stream) as (mounted, log):
            return await listing.list_producers(mounted.mount.engine, log.id, start_after, limit)

    async def delete(self, basin: str, stream: str) -> None:
        """Delete the stream; records that forks need stay until the forks are deleted."""
        async with self._using(basin, stream) as (mounted, log):
            await mounted.catalog.delete_stream(log.ref)
            mounted.upkeep.request_pass()

    def try_append(
        self,
        ref: StreamRef,
        claim: Claim,
        content: Callable[[str], Sequence[RecordBatch]],
        key: SealingKey | None = None,
    ) -> PendingAppend | None:
        """`append` for the usual case, without waiting; `content` is called with the content type.

        Returns None and does nothing if the stream is not in memory, if memory or disk has no room, or
        if the append is repeated or would be refused: call `append` then.
        """
        supervisor = self.supervisor
        mounted = supervisor.current
        if mounted is None or supervisor.space.full:
            return None
        mount = mounted.mount
        log = mount.log_in_memory(ref)
        if log is None or log.failure is not None or log.over:
            return None
        if mount.committer.read_only is not None:
            return None
        now, admission = self.now(), supervisor.admission
        try:
            if log.repeats(claim, key, now):
                return None
        except StreamfoldError:
            return None
        request = AppendRequest(ref, tuple(content(log.terms.content_type)), claim=claim, key=key)
        metered = request.metered
        if metered > APPEND_BYTES_MAX or not admission.acquire_at_once(metered):
            return None
        try:
            ack = log.apply(request, now)
        except BaseException:
            admission.release(metered)
            raise
        if isinstance(ack, Unrecorded):
            raise AssertionError("an append with content has records")
        log.renew(now)
        mount.committer.touch(log)
        return PendingAppend(
            ack, claim.close, log.terms.producer(claim.producer.id) if claim.producer else None
        )

    async def append(
        self,
        basin: str,
        stream: str,
        claim: Claim,
        content: Content,
        key: SealingKey | None = None,
    ) -> Appended:
        """Append what `content` makes for the stream's content type, all of it or nothing.

        It is durable when this returns. Terms are checked before `content` is called.
        """
        async with self._using(basin, stream) as (mounted, log):
            ack = await self._accept(mounted, log, claim, content, key)
            # Read now: what others append meanwhile may not be durable when this is.
            producer = log.terms.producer(claim.producer.id) if claim.producer else None
            if not isinstance(ack, Unrecorded):
                return Appended(False, int((await ack).end.seq_num), claim.close, producer)
            log.renew(self.now())
            # Only the terms changed, or nothing did: the state behind that may not be durable yet.
            await mounted.mount.committer.write_with(log)
            repeated = ack is Unrecorded.REPEATED
            return Appended(repeated, int(log.durable.seq_num), log.durable_closed, producer)

    async def _accept(
        self,
        mounted: MountedStore,
        log: StreamLog,
        claim: Claim,
        content: Content,
        key: SealingKey | None,
    ) -> asyncio.Future[AppendAck] | Unrecorded:
        try:
            if log.repeats(claim, key, self.now()):
                return Unrecorded.REPEATED
        except StreamfoldError as error:
            await settle_refusal(error, mounted, log)
            raise
        batches = await content(log.terms.content_type)
        request = AppendRequest(log.ref, tuple(batches), claim=claim, key=key)
        if not request.only_trims:
            self.supervisor.space.check()
        if request.metered > APPEND_BYTES_MAX:
            raise TooLargeError(
                f"an append of {request.metered} bytes is too large: send at most "
                f"{APPEND_BYTES_MAX}"
            )
        return await self.appends.accept(mounted, log, request)

    # Snapshots

    async def publish(self, basin: str, stream: str, new: Publication) -> Snapshot:
        """Store a snapshot; repeating it changes nothing."""
        self.supervisor.space.check_upload(new.size or 0)
        async with self._using(basin, stream) as (mounted, log):
            return await mounted.snapshots.publish(log, new)

    async def published(
        self, basin: str, stream: str, new: Publication, digest: str
    ) -> Snapshot | None:
        """The newest snapshot if that is `new`, of this digest; trims what it covers if `new` does."""
        async with self._using(basin, stream) as (mounted, log):
            return await mounted.snapshots.published(log, new, digest)

    async def stage_part(
        self, basin: str, stream: str, pieces: AsyncIterator[bytes], size: int | None
    ) -> str:
        """Store a part of a snapshot that is to be published later; returns its name."""
        self.supervisor.space.check_upload(size or 0)
        async with self._using(basin, stream) as (_, log):
            return await self.supervisor.parts.stage(log.id, pieces, size)

    async def staged_parts(self, basin: str, stream: str) -> list[StagedPart]:
        """The parts of a stream that are not published, oldest first."""
        async with self._using(basin, stream) as (_, log):
            return await self.supervisor.parts.list(log.id)

    async def publish_parts(
        self,
        basin: str,
        stream: str,
        part_ids: Sequence[str],
        make: Callable[[AsyncIterator[bytes], int], Publication],
    ) -> Snapshot:
        """Publish the snapshot that parts make together; `make` gets its bytes and their number."""
        parts = self.supervisor.parts
        async with self._using(basin, stream) as (mounted, log):
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

    async def discard_parts(self, basin: str, stream: str) -> None:
        """Delete all parts of a stream that are not published."""
        parts = self.supervisor.parts
        async with self._using(basin, stream) as (_, log):
            with parts.alone(log.id):
                await parts.discard(log.id, [part.part for part in await parts.list(log.id)])

    async def snapshots(self, basin: str, stream: str) -> list[Snapshot]:
        """Every snapshot from which the stream can be followed, oldest first."""
        async with self._using(basin, stream) as (mounted, log):
            return await mounted.snapshots.all(log)

    async def snapshot(self, basin: str, stream: str, seq_num: int | None) -> Snapshot | None:
        """The snapshot at a position, which must exist; without a position the newest, if any."""
        async with self._using(basin, stream) as (mounted, log):
            if seq_num is None:
                return await mounted.snapshots.newest(log)
            return await mounted.snapshots.at(log, seq_num)

    async def snapshot_pieces(self, snapshot: Snapshot) -> AsyncGenerator[bytes]:
        """The bytes of a snapshot, in pieces; it is not deleted meanwhile."""
        mounted = await self.supervisor.mounted()
        async with aclosing(mounted.snapshots.blobs.read(snapshot)) as pieces:
            async for piece in pieces:
                yield piece

    async def retain(
        self,
        basin: str,
        stream: str,
        seq_num: int,
        *,
        whole_appends: bool,
        key: SealingKey | None = None,
    ) -> None:
        """Trim the records before `seq_num`, which a snapshot must cover."""
        async with self._using(basin, stream) as (mounted, log):
            await mounted.snapshots.retain(log, seq_num, whole_appends=whole_appends, key=key)

    @asynccontextmanager
    async def reading(
        self, basin: str, stream: str, seq_num: int | None, key: SealingKey | None = None
    ) -> AsyncIterator[Reader]:
        """A reader that starts at record `seq_num`, or at the tail."""
        async with self._using(basin, stream) as (mounted, log):
            log.check_key(key)
            await renew(mounted.mount, log)
            start = int(log.durable.seq_num) if seq_num is None else seq_num
            await apply_retention(mounted.mount, log)
            if start < log.readable_from:
                raise PositionTrimmedError(start, log.retained_from)
            reader = Reader.at(mounted.mount, log, start, key)
            reader.on_delivered = partial(self.supervisor.usage.record_delivery, basin)
            async with aclosing(reader):
                yield reader

    @asynccontextmanager
    async def _using(
        self, basin: str, stream: str, *, kept_for_forks: bool = False
    ) -> AsyncIterator[tuple[MountedStore, StreamLog]]:
        """The log of a stream that is neither deleted nor expired, or is at least kept for forks."""
        mounted = self.supervisor.current or await self.supervisor.mounted()
        with await mounted.catalog.lease(StreamRef.parse(basin, stream)) as log:
            if log.failure is not None:
                raise log.failure.with_traceback(None)
            if log.over and not (kept_for_forks and await _creator(mounted).forked(log.id)):
                await self._refuse(mounted, log)
            yield mounted, log

    async def _refuse(self, mounted: MountedStore, log: StreamLog) -> None:
        await mounted.catalog.deletion(log.ref)
        if log.basin_deleting:
            raise BasinDeletingError(log.basin)
        if await _creator(mounted).forked(log.id):
            raise StreamForkedError(*log.ref)
        raise StreamNotFoundError(*log.ref)


def _creator(mounted: MountedStore) -> Creator:
    return Creator(mounted.mount, mounted.catalog)
